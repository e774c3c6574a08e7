"""The optimizers of a run from its configuration: how many updates, at which rates, over which parameters."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fastrl.config.schema import Config
from fastrl.trainer.optim import Optimizer, Schedule, total_updates
from fastrl.trainer.plan import Plan
from fastrl.trainer.view_optimizer import ViewOptimizer


def number_of_steps(config: Config, num_prompts: int) -> int:
    """Training steps of the run: total_steps, or total_epochs x steps per epoch (the last partial batch is a step)."""
    if config.optim.total_steps is not None:
        return config.optim.total_steps
    per_epoch = math.ceil(num_prompts / config.rollout.num_prompts_per_step)
    return math.ceil(per_epoch * (config.optim.total_epochs or 1.0))


def actor_schedule(config: Config, plan: Plan, total_steps: int) -> Schedule:
    """The policy's schedule runs over its own updates: those after the critic's warm-up."""
    o = config.optim
    steps = total_steps - (config.critic.warmup_steps if plan.critic else 0)
    total = total_updates(max(steps, 0), plan.updates_per_step, plan.epochs_per_batch)
    return Schedule(o.lr, o.schedule, o.lr_warmup_updates, total, o.min_lr_ratio)


def make_optimizer(
    config: Config,
    module: nn.Module,
    schedule: Schedule,
    name: str,
    weight_decay: float,
    max_grad_norm: float,
    masters: dict[str, Tensor] | None = None,
) -> Optimizer:
    """AdamW with the run's moments and the model's own schedule, decay and clipping; `masters` are those of views."""
    o = config.optim
    options: dict[str, Any] = {
        "name": name,
        "betas": o.betas,
        "eps": o.eps,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "max_skipped": o.max_skipped_updates,
        "offload_moments": config.parallel.offload == "optimizer",
    }
    if masters is not None:
        return ViewOptimizer(module, schedule, masters=masters, **options)
    return Optimizer(module, schedule, **options)
