"""What a loaded trainer keeps on one GPU in each phase of a step, and how much is left to the engine beside it.

Read from the model at hand when a run starts. Whether a model of some shape fits at all, activations included, is
worked out without loading one by `fastrl.trainer.memory_plan`.

A step has three phases. The peak of each, per rank:

    train     parameters + gradients + optimizer state + frozen models + what the engine keeps asleep
    deliver   parameters + optimizer state + frozen models + one layer gathered + two buckets + the engine's weights
    generate  what the trainer does not offload + frozen models + reward models + the engine's weights, keys and values

Policy and critic are trained and offloaded alike. Reward models score while the engine is awake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fastrl.config.schema import Config
from fastrl.trainer.engine_devices import engines_per_device, local_seat

GIB = 1 << 30
MARGIN_GIB = 2.0  # CUDA contexts of two processes, graphs, and what allocators keep between sizes
LARGEST_FRACTION = 0.92


@dataclass(frozen=True)
class Beside:
    """Models that a rank holds beside the policy."""

    trained: tuple[nn.Module, ...] = ()  # the critic
    frozen: tuple[nn.Module, ...] = ()  # on the device all the time: a reference that is not offloaded
    scoring: tuple[nn.Module, ...] = ()  # reward models, wherever they wait between uses


ALONE = Beside()


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes in GiB on one GPU; `total` is None where they are not measured against a device."""

    parameters: float
    gradients: float
    optimizer: float
    layer: float  # the largest unit that is gathered whole
    buckets: float
    engine_weights: float
    kv: float | None  # None: whatever is left
    total: float | None
    sleep_level: int
    offload: str
    shared: bool = True  # trainer and engine on one device
    frozen: float = 0.0  # models that are on the device in every phase
    scoring: float = 0.0  # models that are there while samples are generated

    @property
    def kept_while_generating(self) -> float:
        """What the trainer leaves on the device while samples are generated."""
        if not self.shared:
            return 0.0
        trained = {"none": self.parameters + self.optimizer, "optimizer": self.parameters, "all": 0.0}[self.offload]
        return trained + self.frozen + self.scoring

    @property
    def engine_asleep(self) -> float:
        """What the engine keeps on the device while the policy trains."""
        return self.engine_weights if self.shared and self.sleep_level == 0 else 0.0

    def phases(self) -> dict[str, float]:
        """Peak of each phase, activations apart."""
        engine = self.engine_weights if self.shared else 0.0
        kv = (self.kv or 0.0) if self.shared else 0.0
        return {
            "train": self.parameters + self.gradients + self.optimizer + self.frozen + self.engine_asleep,
            "deliver": self.parameters + self.optimizer + self.frozen + self.layer + self.buckets + engine,
            "generate": self.kept_while_generating + self.buckets + engine + kv,
        }

    def fraction(self) -> float:
        """The part of the device that the engine may use while it generates."""
        if self.total is None:
            raise ValueError("there is no device to take a part of")
        left = self.total - self.kept_while_generating - (self.buckets if self.shared else 0.0) - MARGIN_GIB
        return max(0.05, min(LARGEST_FRACTION, left / self.total))

    def lines(self) -> list[str]:
        """The budget in words, for the console."""
        phases = ", ".join(f"{name} {size:.2f}" for name, size in self.phases().items())
        device = "" if self.total is None else f" of {self.total:.1f}"
        kv = "what is left" if self.kv is None else f"{self.kv:.2f}"
        return [
            f"memory        peak GiB per rank{device}, activations apart: {phases} (keys and values: {kv})",
            f"              sleep level {self.sleep_level}, offload {self.offload}",
        ]


def budget(
    config: Config,
    model: nn.Module,
    *,
    kv_bytes: int | None,
    sleep_level: int,
    total_bytes: int | None = None,
    bucket_gib: float = 0.25,
    in_place: bool = False,
    beside: Beside = ALONE,
) -> MemoryBudget:
    """The budget of one rank.

    Args:
        config: of the run.
        model: the policy, perhaps sharded over the ranks.
        kv_bytes: size of the engine's key/value space; None where it takes what is left.
        sleep_level: of the engine while the policy trains.
        total_bytes: memory of the device; None where there is none.
        bucket_gib: size of each of two staging buckets.
        in_place: the engine computes with the trainer's weights, which are float32 or have masters beside them.
        beside: the run's other models.
    """
    numbers = sum(p.numel() for p in model.parameters())  # of whole tensors, also where they are sharded
    held, trained, critic = (
        held_numbers(model),
        held_numbers(model, trained=True),
        sum(map(held_numbers, beside.trained)),
    )
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers(model)), default=0)
    itemsize = 4 if config.run.dtype == "float32" else 2
    return MemoryBudget(
        parameters=4 * (critic + (0 if in_place and itemsize == 4 else held)) / GIB,
        gradients=4 * (trained + critic) / GIB,
        optimizer=8 * (trained + critic) / GIB,
        layer=(4 + itemsize) * largest / GIB if held < numbers else 0.0,
        buckets=0.0 if in_place else 2 * bucket_gib,
        engine_weights=itemsize * numbers / config.rollout.tensor_parallel_size / GIB,
        kv=None if kv_bytes is None else kv_bytes / GIB,
        total=None if total_bytes is None else total_bytes / GIB,
        sleep_level=sleep_level,
        offload=config.rollout.offload,
        shared=config.rollout.devices is None,
        frozen=held_bytes(beside.frozen) / GIB,
        scoring=held_bytes(beside.scoring) / GIB,
    )


def local_parameters(model: nn.Module) -> Iterable[tuple[torch.Tensor, bool]]:
    """What this rank holds of each parameter, and whether it is trained."""
    for p in model.parameters():
        yield p.to_local() if isinstance(p, DTensor) else p, p.requires_grad


def held_numbers(model: nn.Module, *, trained: bool = False) -> int:
    """How many numbers of a model this rank holds; with `trained` those of parameters that get a gradient."""
    return sum(p.numel() for p, trains in local_parameters(model) if trains or not trained)


def held_bytes(models: Iterable[nn.Module]) -> int:
    """Bytes of models as they are held."""
    return sum(p.numel() * p.element_size() for model in models for p, _ in local_parameters(model))


def engine_fraction(
    config: Config, model: nn.Module, device: torch.device, *, in_place: bool = False, beside: Beside = ALONE
) -> float:
    """The part of a GPU that the engine may use, weights in common counted in, from what the trainer keeps there."""
    sizes = budget(
        config,
        model,
        kv_bytes=None,
        sleep_level=0 if in_place else sleep_level(config, device),
        total_bytes=device_bytes(device),
        in_place=in_place,
        beside=beside,
    )
    return rounded_down(sizes.fraction() / engines_per_device(config.rollout.devices, local_seat()[1]))


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the longest module list in it."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(blocks):
            blocks = list(module)
    return blocks


def sleep_level(config: Config, device: torch.device) -> int:
    """`rollout.sleep_level`, derived where it is null: everything on a shared GPU, keys and values elsewhere."""
    given = config.rollout.sleep_level
    if given is not None:
        return given
    return 2 if device.type == "cuda" and config.rollout.devices is None else 0


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def rounded_down(fraction: float) -> float:
    """Two digits, never more than the number itself: every rank derives the same."""
    return math.floor(fraction * 100) / 100
