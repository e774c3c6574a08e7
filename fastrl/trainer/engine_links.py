"""Ways to the engine: a process of its own or this one; weights in buckets, one by one, or in common."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastrl.config.schema import Config
from fastrl.dist.weight_sync import Delivery, LocalReceiver, WeightRefused, WeightsDiffer, WeightSender
from fastrl.dist.zero_copy import SharedWeights
from fastrl.rollout.backend import Backend, BackendSettings, SharedTensors
from fastrl.rollout.link import DeliveryRefused, Link, LocalLink
from fastrl.rollout.process_link import ProcessLink, Sender
from fastrl.rollout.shared_folder import SharedFolder
from fastrl.trainer.engine_devices import check_devices, engine_device, engine_environment, local_seat
from fastrl.trainer.expected_weights import ExpectedWeights
from fastrl.trainer.shared_engine import SharedSender, note_update, shared_tensors

CHILD = "fastrl.trainer.engine_child"


def make_link(
    config: Config,
    model: nn.Module,
    settings: BackendSettings,
    folder: SharedFolder | None,
    shared: SharedWeights | None = None,
) -> Link:
    """The way to the backend.

    Args:
        config: of the run.
        model: the policy, whose weights are delivered unless they are `shared`.
        settings: of the backend.
        folder: of a tensor-parallel engine.
        shared: weights that the backend computes with in place.
    """
    dtype, r = getattr(torch, settings.dtype), config.rollout
    if r.vllm_in_process and shared is not None:
        return LocalLink(lambda s: local_backend(s, shared_tensors(shared)), settings, note_update(shared))
    if r.vllm_in_process:
        return LocalLink(local_backend, settings, LocalDelivery(model, settings, dtype, r.verify_weights))
    sender: Sender
    if shared is None:
        bucket_bytes = int(r.bucket_gib * (1 << 30))
        transport = r.weight_transport
        if r.devices is not None and transport == "auto":
            transport = "shared_memory"  # an engine that sees its own GPU alone cannot map the trainer's
        options = {"transport": transport, "bucket_bytes": bucket_bytes, "verify": r.verify_weights}
        sender = BucketSender(model, dtype, r.engine_timeout_s, **options)
    else:
        sender = SharedSender(shared, r.engine_timeout_s, r.verify_weights)
        settings = replace(settings, shared_weights=True)
    return ProcessLink(
        CHILD,
        settings,
        sender,
        timeout_s=r.engine_timeout_s,
        environment=device_environment(config, settings),
        mark=None if folder is None else folder.mark(0),
    )


def local_backend(settings: BackendSettings, shared: SharedTensors | None = None) -> Any:
    """A backend in this process, with the process as it was afterwards."""
    from fastrl.rollout.process_state import preserved

    with preserved():
        from fastrl.rollout.vllm import VLLMBackend

        return VLLMBackend(settings, shared)


def device_environment(config: Config, settings: BackendSettings) -> dict[str, str | None]:
    """Variables that give the child its GPU: the trainer's own, or one of `rollout.devices`; nothing on a CPU."""
    if settings.device != "cuda":
        return {}
    devices, (local_rank, local_size) = config.rollout.devices, local_seat()
    if devices is not None:
        check_devices(
            devices,
            local_size=local_size,
            present=torch.cuda.device_count(),
            tensor_parallel_size=settings.tensor_parallel_size,
        )
    device = engine_device(devices, local_rank, torch.cuda.current_device())
    return engine_environment(device, settings.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES"))


class BucketSender:
    """A `WeightSender` as a `ProcessLink` wants it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, timeout_s: float, **options: Any) -> None:
        self.sender = WeightSender(model, dtype=dtype, timeout_s=timeout_s, **options)
        self.timeout_s = timeout_s
        self.last: Delivery | None = None

    def address(self) -> dict[str, Any]:
        """Where the child finds the sender."""
        return {"address": self.sender.address, "token": self.sender.token, "timeout_s": self.timeout_s}

    def send(self, model: nn.Module, version: int) -> None:
        """Deliver; see Sender.send."""
        self.sender.source.model = model
        try:
            self.last = self.sender.send(version)
        except (WeightRefused, WeightsDiffer) as error:
            raise DeliveryRefused(str(error)) from error

    def take_part(self) -> None:
        """Join the gathers of sharded weights for the other ranks' sake."""
        self.sender.take_part()

    def close(self) -> None:
        """Give buckets and socket back."""
        self.sender.close()


class LocalDelivery:
    """A delivery to a backend in this process, compared with what its model expects before the first tensor."""

    def __init__(self, model: nn.Module, settings: BackendSettings, dtype: torch.dtype, verify: str) -> None:
        self.sender = WeightSender(model, transport="in_process", dtype=dtype, verify=verify)
        self.expected = ExpectedWeights(
            settings.model, dtype, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )

    def __call__(self, backend: Backend, model: nn.Module, version: int) -> None:
        """Load the weights of `model`. Raises WeightError."""

        def load(receiver: LocalReceiver) -> None:
            receiver.check_manifest(self.expected.specs)
            backend.load_weights(self.expected.checkpoint(receiver.tensors()))

        self.sender.source.model = model
        self.sender.attach(load, tied=True)
        self.sender.send(version)
