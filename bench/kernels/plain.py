"""The batch-level ops as plain torch writes them: loops, scatters, unfused formulas. In float64 they are the reference.

What people use without any of the libraries compared here; `bench/gpu/kernels.py` times the same functions on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch


def eager_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> Any:
    """The usual loop over tokens."""
    m, carry, following, found = mask.to(rewards.dtype), 0.0, 0.0, []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = (delta + gamma * lam * carry) * m[:, t] + (1 - m[:, t]) * carry
        following = values[:, t] * m[:, t] + (1 - m[:, t]) * following
        found.append(carry)
    advantages = torch.stack(found[::-1], dim=1) * m
    return advantages, (advantages + values) * m


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float, chunk: int = 64
) -> Any:
    """A scan by chunks of time: inside a chunk one product with powers of gamma lambda, between chunks a carry.

    For masks that are prefixes: behind the last token everything is 0, so nothing has to be carried through.
    """
    m = mask.to(rewards.dtype)
    following = torch.nn.functional.pad((values * m)[:, 1:], (0, 1))
    delta = (rewards + gamma * following - values) * m
    rows, columns = delta.shape
    chunk = min(chunk, columns)
    delta = torch.nn.functional.pad(delta, (0, -columns % chunk))
    parts = delta.view(rows, -1, chunk)
    decay = gamma * lam
    steps = torch.arange(chunk, dtype=delta.dtype)
    powers = torch.tril(decay ** (steps[:, None] - steps[None]).clamp(min=0))  # [from, to]: decay^(from - to)
    inside = parts @ powers
    tail = decay ** (chunk - steps)
    carry, found = torch.zeros(rows, 1, dtype=delta.dtype), []
    for part in inside.unbind(1)[::-1]:
        part = part + carry * tail
        carry = part[:, :1]
        found.append(part)
    advantages = torch.cat(found[::-1], 1)[:, :columns] * m
    return advantages, (advantages + values) * m


def eager_groups(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Scatter sums; ids are 0 .. G-1 already."""
    count = int(ids.max()) + 1
    n = torch.zeros(count, device=scores.device, dtype=scores.dtype).index_add_(0, ids, torch.ones_like(scores))
    mean = torch.zeros(count, device=scores.device, dtype=scores.dtype).index_add_(0, ids, scores) / n
    d = scores - mean[ids]
    std = (torch.zeros(count, device=scores.device, dtype=scores.dtype).index_add_(0, ids, d * d) / (n - 1)).sqrt()
    return d / (std[ids] + 1e-6)


def eager_policy(lp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Clipped loss with dual clip, mean over tokens."""
    loss, mask = eager_policy_tokens(lp, old, adv), mask.to(lp.dtype)
    return (loss * mask).sum() / mask.sum()


def eager_policy_tokens(lp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    """max(-A r, -A clip(r)), capped at -3 A where A < 0."""
    ratio = (lp - old).clamp(-20, 20).exp()
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    return torch.where(adv < 0, torch.minimum(loss, -adv * 3.0), loss)


def eager_aggregate(loss: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """[B, L] losses -> one number, by the definition of the mode."""
    m = mask.to(loss.dtype)
    counts, sums = m.sum(1), (loss * m).sum(1)
    if mode == "token-mean":
        return sums.sum() / counts.sum()
    if mode == "seq-mean-token-mean":
        return (sums / counts).mean()
    return sums.mean() / (loss.shape[1] if mode == "seq-mean-token-sum-norm" else 1)


def eager_value(v: torch.Tensor, old: torch.Tensor, ret: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    held = torch.minimum(torch.maximum(v, old - 0.5), old + 0.5)
    return 0.5 * (torch.maximum((v - ret) ** 2, (held - ret) ** 2) * mask).sum() / mask.sum()


def eager_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.to(x.dtype)
    n = mask.sum()
    mean = (x * mask).sum() / n
    var = (((x - mean) * mask) ** 2).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def eager_kl(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    y = (ref - lp).clamp(-20, 20)
    return (y.exp() - y - 1).clamp(-10, 10)


def eager_mismatch(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, log_w = mask.sum(), (new - old).clamp(-20, 20) * mask
    return ((log_w.exp() - 1 - log_w) * mask).sum() / n, (log_w.exp() ** 2 * mask).sum() / n - 1
