"""AdamW over fp32 masters, rates that are a function of the update count, and no update from a non-finite gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastrl.dist.collectives import sum_gradients, world_size
from fastrl.errors import TrainingError
from fastrl.trainer.metrics import Metrics


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of finished updates.

        rate(k) = peak * min(1, (k+1)/warmup) * shape((k - warmup) / (total - warmup))

    k counts finished optimizer updates, so `rate(k)` is the rate that update k+1 uses. `linear` and `cosine` fall to
    `min_ratio` of the peak when k reaches `total`; `constant` stays.
    """

    peak: float
    kind: str = "constant"  # constant, linear, cosine
    warmup: int = 0  # updates
    total: int = 0  # updates of the whole run, all ranks take the same ones
    min_ratio: float = 0.0

    def rate(self, finished: int) -> float:
        """Learning rate of the update that follows `finished` updates."""
        if finished < self.warmup:
            return self.peak * (finished + 1) / self.warmup
        if self.kind == "constant" or self.total <= self.warmup:
            return self.peak
        progress = min(1.0, (finished - self.warmup) / (self.total - self.warmup))
        shape = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)


def total_updates(num_steps: int, updates_per_step: int, epochs_per_batch: int) -> int:
    """Optimizer updates of a run: steps x updates per step x epochs over each batch. Micro-batches do not count."""
    return num_steps * updates_per_step * epochs_per_batch


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients together, over every shard of every rank; a 0-d tensor.

    norm = sqrt(sum_p ||grad_p||^2)
    """
    norms = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norms.full_tensor() if hasattr(norms, "full_tensor") else norms


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whole or sharded, by min(1, max_norm / (norm + 1e-6))."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.mul_(factor.to(local.device))


class Optimizer:
    """One model's optimizer: clip, step or skip, schedule.

    A non-finite gradient norm leaves weights, moments and schedule untouched, clears the gradients and is counted;
    `max_skipped` of them in a row end the training with the cause.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        *,
        name: str,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_skipped: int = 3,
        torch_optimizer: torch.optim.Optimizer | None = None,
        offload_moments: bool = False,
    ) -> None:
        self.name, self.schedule = name, schedule
        self.offload_moments = offload_moments  # they wait in CPU memory between updates
        self.max_grad_norm, self.max_skipped = max_grad_norm, max_skipped
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.updates = 0  # finished updates
        self.skipped_in_a_row = 0
        self.skipped_total = 0
        self.torch_optimizer = torch_optimizer or torch.optim.AdamW(
            parameter_groups(module, weight_decay), lr=schedule.peak, betas=betas, eps=eps, fused=True
        )

    @property
    def lr(self) -> float:
        """Rate of the next update."""
        return self.schedule.rate(self.updates)

    def step(self, loss_is_finite: bool = True) -> tuple[Tensor, bool]:
        """Clip the gradients to `max_grad_norm` and apply them; returns (norm before clipping, whether it was applied).

        The decision is the same on all ranks because the norm is global. Raises TrainingError after `max_skipped`
        non-finite norms in a row.
        """
        sum_gradients(self.parameters)
        norm = global_grad_norm(self.parameters)
        if not (loss_is_finite and math.isfinite(float(norm))):
            self.zero_grad()
            self.skipped_in_a_row += 1
            self.skipped_total += 1
            if self.skipped_in_a_row >= self.max_skipped:
                raise TrainingError(
                    f"{self.skipped_in_a_row} updates of the {self.name} in a row had a non-finite loss or gradient "
                    f"(last gradient norm {float(norm)}): lower the {self.name}'s learning rate (now {self.lr:g}), "
                    "or look for NaN in rewards and log-probs in the run's rollouts/"
                )
            return torch.full_like(norm, float("nan")), False
        clip_gradients(self.parameters, self.max_grad_norm, norm)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = self.lr
        self.move_moments(to_parameters=True)
        self.torch_optimizer.step()
        self.zero_grad()
        self.move_moments(to_parameters=False)
        self.updates += 1
        self.skipped_in_a_row = 0
        return norm, True

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.torch_optimizer.zero_grad(set_to_none=True)

    def move_moments(self, *, to_parameters: bool) -> None:
        """Bring the moments to their parameters' device, or give that memory back, where they are offloaded."""
        if not self.offload_moments:
            return
        for p, state in self.torch_optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(p.device if to_parameters else "cpu")

    def make_state(self) -> None:
        """Zero moments where no update has made any yet, the same as the first update would start from.

        A checkpoint then always holds them, and loading one finds tensors laid out over the ranks as parameters are.
        """
        for group in self.torch_optimizer.param_groups:
            for p in group["params"]:
                if not self.torch_optimizer.state[p]:
                    self.torch_optimizer.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device),
                        "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                    }

    def with_masters(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the module as it is trained: here the parameters are the masters."""
        return weights

    def take_masters(self, weights: Mapping[str, Tensor]) -> None:
        """Called after the module has loaded `weights`, which `with_masters` gave."""

    def state_dict(self) -> dict[str, Any]:
        """Counters, without the moments (`torch_optimizer` holds those)."""
        return {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row, "skipped_total": self.skipped_total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self.updates = state["updates"]
        self.skipped_in_a_row, self.skipped_total = state["skipped_in_a_row"], state["skipped_total"]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices only: vectors (norms, biases) keep weight decay 0. Two groups always, so that a run can resume."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def record_update(metrics: Metrics, prefix: str, optimizer: Optimizer, norm: Tensor, lr: float, applied: bool) -> None:
    """Write what one update did: norm, rate and counts, under `optim/<prefix>...`."""
    metrics.add(f"optim/{prefix}grad_norm", norm, 1)
    metrics.set(f"optim/{prefix}lr", lr)
    metrics.add_sum(f"optim/{prefix}updates", float(applied) / world_size())
    metrics.add_sum(f"optim/{prefix}skipped_updates", float(not applied) / world_size())
