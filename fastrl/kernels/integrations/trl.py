"""TRL's log-prob and entropy functions (1.16) on `fastrl.kernels`, and its grouped advantages as a function.

TRL computes advantages and the policy loss inside methods of its trainers; `group_advantages` and `clipped_policy_loss`
are what to call there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from .. import group_normalize, log_prob
from . import replace_everywhere

IGNORED = -100


def _labels(index: torch.Tensor, row_mask: torch.Tensor | None) -> torch.Tensor:
    return index if row_mask is None else torch.where(row_mask == 0, torch.full_like(index, IGNORED), index)


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probs of `index` [...] or [..., K] under logits [..., V] / temperature, shaped like index."""
    if index.dim() == logits.dim() - 1:
        return log_prob(logits, _labels(index, row_mask), temperature=temperature).log_prob.to(logits.dtype)
    first = index[..., 0]
    wanted = log_prob(logits, first, temperature=temperature).log_prob
    chosen = torch.gather(logits, -1, index).to(wanted.dtype) / temperature
    values = (chosen - chosen[..., :1] + wanted.unsqueeze(-1)).to(logits.dtype)
    return values if row_mask is None else values.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 128) -> torch.Tensor:
    """Entropy of each row in nats, logits.shape[:-1]."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = log_prob(logits, labels, want_entropy=True).entropy
    assert entropy is not None
    return entropy.to(logits.dtype)


def selective_log_softmax_and_entropy(
    logits: torch.Tensor,
    index: torch.Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs of index [...], entropy of each row) from one read of the logits."""
    result = log_prob(logits, _labels(index, row_mask), temperature=temperature, want_entropy=True)
    assert result.entropy is not None
    entropy = result.entropy if entropy_requires_grad else result.entropy.detach()
    return result.log_prob.to(logits.dtype), entropy.to(logits.dtype)


def group_advantages(rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group") -> torch.Tensor:
    """What GRPOTrainer makes of the summed rewards [S] of all processes: NaN rewards do not count and get 0.

    A = (r - mean_g) / (std_g + 1e-4)    scale_rewards "group"        A = r - mean_g    "none"
    """
    if scale_rewards not in ("group", "none"):
        raise ValueError(f"group_advantages: scale_rewards = {scale_rewards!r}: use one of group, none")
    if num_generations < 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"group_advantages: num_generations = {num_generations}: a divisor of {rewards.numel()}, "
            "the number of rewards, is needed"
        )
    ids = torch.arange(rewards.numel(), device=rewards.device) // num_generations
    return group_normalize(
        rewards, ids, scale="std" if scale_rewards == "group" else "none", eps=1e-4, valid=~rewards.isnan()
    )


def install() -> Callable[[], None]:
    """Replace TRL's functions in every loaded TRL module; returns the function that undoes it."""
    utils = importlib.import_module("trl.trainer.utils")
    names = ("selective_log_softmax", "selective_log_softmax_and_entropy", "entropy_from_logits")
    return replace_everywhere("trl", [(getattr(utils, name), globals()[name]) for name in names])
