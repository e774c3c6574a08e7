"""The program of an engine process: `python -m fastrl.trainer.engine_child DESCRIPTOR`, started by `ProcessLink`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_receiver import WeightReceiver
from fastrl.dist.weight_wire import remove_abandoned
from fastrl.dist.zero_copy import SharedWeightsReceiver
from fastrl.errors import EngineError
from fastrl.rollout.backend import Backend, BackendSettings
from fastrl.rollout.child import serve

shared: SharedReceiver | None = None  # of this process's engine


class Receiver:
    """Updates of a `WeightReceiver`, each compared with what the engine's own model has before its first tensor."""

    def __init__(self, address: dict[str, Any], expected: list[TensorSpec]) -> None:
        self.expected = expected
        self.receiver = WeightReceiver(address["address"], address["token"], tied=True, timeout_s=address["timeout_s"])

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the next update."""
        self.receiver.check_manifest(self.expected)
        yield from self.receiver.tensors()

    def in_place(self) -> bool:
        """They are sent."""
        return False

    def close(self) -> None:
        """Close the line."""
        self.receiver.close()

    def abandon(self) -> None:
        """Remove the socket of a trainer that is gone."""
        remove_abandoned(self.receiver.address)


class SharedReceiver:
    """Weights that are the trainer's memory, mapped while the engine starts."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self.receiver = SharedWeightsReceiver(shared["address"], shared["token"], timeout_s=shared["timeout_s"])

    def load_format(self) -> str:
        """The name under which vLLM finds a loader that puts the memory into its model."""
        from fastrl.rollout.vllm_shared import sharing_unsupported, use_shared_weights

        problem = sharing_unsupported()
        if problem is not None:
            raise EngineError(f"rollout.zero_copy: {problem}")
        return use_shared_weights(
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

    def abandon(self) -> None:
        """Remove the socket of a trainer that is gone."""
        remove_abandoned(self.receiver.address)


def make_backend(settings: BackendSettings) -> Backend:
    """The backend of this process."""
    from fastrl.rollout.vllm import VLLMBackend

    if settings.shared_weights is not None:
        global shared
        shared = SharedReceiver(settings.shared_weights)
        settings = replace(settings, options={**settings.options, "load_format": shared.load_format()})
    return VLLMBackend(settings)


def make_receiver(settings: BackendSettings) -> Callable[[dict[str, Any]], Receiver | SharedReceiver]:
    """From the sender's address to a receiver that expects the engine's own tensors."""
    if shared is not None:
        receiver: SharedReceiver = shared
        return lambda address: receiver
    from fastrl.trainer.expected_weights import expected_weights

    expected = expected_weights(
        settings.model,
        getattr(torch, settings.dtype),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    return lambda address: Receiver(address, expected)


if __name__ == "__main__":
    serve(int(sys.argv[1]), make_backend, make_receiver)
