"""The program of an engine process: `python -m fastrl.trainer.engine_child DESCRIPTOR`, started by `ProcessLink`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_receiver import WeightReceiver
from fastrl.dist.weight_wire import remove_abandoned
from fastrl.dist.zero_copy import SharedWeightsReceiver
from fastrl.models.cpu import keep_heap
from fastrl.rollout.backend import Backend, BackendSettings, SharedTensors
from fastrl.rollout.child import Receiver, serve

if TYPE_CHECKING:
    from fastrl.trainer.expected_weights import ExpectedWeights

MakeBackend = Callable[[BackendSettings, SharedTensors | None], Backend]


class BucketReceiver:
    """Updates of a `WeightReceiver`, each compared with what the engine's own model has before its first tensor."""

    def __init__(self, address: dict[str, Any], expected: ExpectedWeights) -> None:
        self.expected = expected
        self.receiver = WeightReceiver(address["address"], address["token"], tied=True, timeout_s=address["timeout_s"])

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the next update."""
        self.receiver.check_manifest(self.expected.specs)
        yield from self.expected.checkpoint(self.receiver.tensors())

    def in_place(self) -> bool:
        """They are sent."""
        return False

    def close(self) -> None:
        """Close the line."""
        self.receiver.close()


class SharedReceiver:
    """Weights that are the trainer's memory, mapped while the engine starts."""

    def __init__(self, address: dict[str, Any]) -> None:
        self.receiver = SharedWeightsReceiver(address["address"], address["token"], timeout_s=address["timeout_s"])

    def tensors(self) -> SharedTensors:
        """The memory for a backend."""
        return SharedTensors(
            lambda wanted: self.receiver.accept([TensorSpec(*fields) for fields in wanted]),
            self.receiver.layout.num_bytes,
        )

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Nothing is sent."""
        return iter(())

    def in_place(self) -> bool:
        """Wait for the trainer's word that its weights are new."""
        self.receiver.wait()
        return True

    def close(self) -> None:
        """Close the line; the memory is unmapped when the process ends."""
        self.receiver.line.close()


class Program:
    """An engine process: its backend, and where its weights come from."""

    def __init__(self, make_backend: MakeBackend) -> None:
        self.make_backend = make_backend
        self.shared: SharedReceiver | None = None

    def backend(self, settings: BackendSettings, address: dict[str, Any]) -> Backend:
        """The backend of this process, with the trainer's memory where it computes with that."""
        if not settings.shared_weights:
            return self.make_backend(settings, None)
        self.shared = SharedReceiver(address)
        return self.make_backend(settings, self.shared.tensors())

    def receiver(self, settings: BackendSettings) -> Callable[[dict[str, Any]], Receiver]:
        """From the sender's address to a receiver that expects the engine's own tensors."""
        shared = self.shared
        if shared is not None:
            return lambda address: shared
        from fastrl.trainer.expected_weights import ExpectedWeights

        expected = ExpectedWeights(
            settings.model,
            getattr(torch, settings.dtype),
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
        return lambda address: BucketReceiver(address, expected)


def abandon(address: dict[str, Any]) -> None:
    """Remove the socket of a trainer that is gone."""
    remove_abandoned(address["address"])


def vllm_backend(settings: BackendSettings, shared: SharedTensors | None) -> Backend:
    """vLLM in this process."""
    if settings.device == "cpu":
        keep_heap()  # an update frees packed weights and makes new ones of the same sizes
    from fastrl.rollout.vllm import VLLMBackend

    return VLLMBackend(settings, shared)


if __name__ == "__main__":
    program = Program(vllm_backend)
    serve(int(sys.argv[1]), program.backend, program.receiver, abandon)
