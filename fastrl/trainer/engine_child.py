"""The program of an engine process: `python -m fastrl.trainer.engine_child DESCRIPTOR`, started by `ProcessLink`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_receiver import WeightReceiver
from fastrl.dist.weight_wire import remove_abandoned
from fastrl.rollout.backend import Backend, BackendSettings
from fastrl.rollout.child import serve


class Receiver:
    """Updates of a `WeightReceiver`, each compared with what the engine's own model has before its first tensor."""

    def __init__(self, address: dict[str, Any], expected: list[TensorSpec]) -> None:
        self.expected = expected
        self.receiver = WeightReceiver(address["address"], address["token"], tied=True, timeout_s=address["timeout_s"])

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the next update."""
        self.receiver.check_manifest(self.expected)
        yield from self.receiver.tensors()

    def close(self) -> None:
        """Close the line."""
        self.receiver.close()

    def abandon(self) -> None:
        """Remove the socket of a trainer that is gone."""
        remove_abandoned(self.receiver.address)


def make_backend(settings: BackendSettings) -> Backend:
    """The backend of this process."""
    from fastrl.rollout.vllm import VLLMBackend

    return VLLMBackend(settings)


def make_receiver(settings: BackendSettings) -> Callable[[dict[str, Any]], Receiver]:
    """From the sender's address to a receiver that expects the engine's own tensors."""
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
