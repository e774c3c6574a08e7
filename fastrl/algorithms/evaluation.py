"""Figures of an evaluation with n samples for each prompt, and how sure they are.

    mean       mean over prompts of the mean score
    pass@k     1 - C(n-c, k) / C(n, k), c correct samples of n        https://arxiv.org/abs/2107.03374
    maj@k      expected score of the most frequent answer of k samples, equally frequent ones averaged
    best@k     sum_i C(i-1, k-1) / C(n, k) s_(i), s_(1) <= ... <= s_(n): the expected best of k; worst@k likewise
    NAME/low, NAME/high   95 % bootstrap interval over prompts

Nothing is drawn with replacement inside a prompt. A prompt with fewer than k samples leaves the figures at k.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl.algorithms.counter_random import uniform

CORRECT = 1.0 - 1e-6  # a score from here on counts as a correct answer


def log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """log C(n, k) of float64 tensors; -inf where k > n."""
    inside = k <= n
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=0) + 1)
    return torch.where(inside, value, -torch.inf)


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """1 - C(n-c, k)/C(n, k), the chance that k of the n samples contain a correct one: all [P] -> [P] float64.

    A product over the correct ones, so that it is exact where factorials would overflow: 1 - prod_j (1 - k/j),
    j from n-c+1 to n. NaN where n < k.
    """
    n, c = num_samples.double(), num_correct.double()
    steps = torch.arange(int(c.max()) if c.numel() else 0, dtype=torch.float64, device=n.device)
    j = n[:, None] - steps
    factors = torch.where(steps < c[:, None], (1.0 - k / j).clamp(min=0.0), 1.0)
    return torch.where(n >= k, 1.0 - factors.prod(-1), torch.nan)


def best_at_k(scores: Tensor, counts: Tensor, k: int) -> Tensor:
    """Expected best score of k samples drawn without replacement.

    Args:
        scores: [P, N] float, each row's samples first, anything behind them. counts: [P] int, samples of a row.

    Returns:
        [P] float64; NaN where a row has fewer than k samples.
    """
    n = counts.double()[:, None]
    rank = torch.arange(1, scores.shape[1] + 1, dtype=torch.float64, device=scores.device)[None]
    ordered = torch.where(rank <= n, scores.double(), torch.inf).sort(-1).values
    kk = torch.full_like(n, float(k))
    weight = torch.where(rank <= n, (log_binomial(rank - 1, kk - 1) - log_binomial(n, kk)).exp(), 0.0)
    value = (torch.where(rank <= n, ordered, 0.0) * torch.where(rank >= k, weight, 0.0)).sum(-1)
    return torch.where(counts >= k, value, torch.nan)


def worst_at_k(scores: Tensor, counts: Tensor, k: int) -> Tensor:
    """Expected worst score of k samples; arguments as `best_at_k`."""
    return -best_at_k(-scores, counts, k)


def majority_at_k(
    scores: Tensor, answers: Tensor, counts: Tensor, k: int, *, num_draws: int = 64, seed: int = 0
) -> Tensor:
    """Expected score of the majority answer of k samples; equally frequent answers are averaged.

    Exact for k = n; for k < n the mean over `num_draws` subsets without replacement, drawn by address.

    Args:
        scores, answers: [P, N], answers int64 equal where the answers are; counts: [P] int.
    """
    num_rows, width = scores.shape
    inside = torch.arange(width, device=scores.device)[None] < counts[:, None]
    whole = k >= width and bool((counts == k).all())
    total = torch.zeros(num_rows, dtype=torch.float64, device=scores.device)
    rows = torch.arange(num_rows, device=scores.device)[:, None]
    columns = torch.arange(width, device=scores.device)[None]
    for draw in range(1 if whole else num_draws):
        order = torch.where(inside, uniform(seed, draw, rows, columns), 2.0).argsort(-1).argsort(-1)
        total += majority(scores, answers, inside & (order < k))
    return torch.where(counts >= k, total / (1 if whole else num_draws), torch.nan)


def majority(scores: Tensor, answers: Tensor, member: Tensor) -> Tensor:
    """Mean score of the members whose answer is (one of) the most frequent, each such answer counting once: [P]."""
    equal = (answers[:, :, None] == answers[:, None, :]) & member[:, None, :]
    votes = torch.where(member, equal.sum(-1), 0)
    top = member & (votes == votes.amax(-1, keepdim=True))
    weight = torch.where(top, 1.0 / votes.clamp(min=1), 0.0).double()
    return (weight * torch.where(member, scores.double(), 0.0)).sum(-1) / weight.sum(-1).clamp(min=1e-300)


def bootstrap_interval(
    per_prompt: Tensor, *, level: float = 0.95, num_draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean when prompts are drawn with replacement: per_prompt [P] float -> (low, high)."""
    x = per_prompt[~per_prompt.isnan()].double()
    if not x.numel():
        return float("nan"), float("nan")
    means = torch.empty(num_draws, dtype=torch.float64, device=x.device)
    slots = torch.arange(x.numel(), device=x.device)[None]
    chunk = max(1, (1 << 22) // x.numel())
    for start in range(0, num_draws, chunk):
        draws = torch.arange(start, min(start + chunk, num_draws), device=x.device)[:, None]
        index = (uniform(seed, draws, slots) * x.numel()).long().clamp(max=x.numel() - 1)
        means[start : start + chunk] = x[index].mean(-1)
    tail = (1.0 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64, device=x.device)).tolist()
    return low, high


def evaluate(
    scores: Tensor,
    group_id: Tensor,
    answers: Sequence[Hashable] | None = None,
    *,
    correct: float = CORRECT,
    seed: int = 0,
    num_draws: int = 1000,
) -> dict[str, float]:
    """Every figure of one data source.

    Args:
        scores: [N] float, one per sample, NaN = could not be scored (leaves its prompt's figures).
        group_id: [N] int, the prompt of each sample.
        answers: [N] extracted answers, for maj@k; None (or None inside, counted as an answer of its own) leaves it out.
        correct: score from which a sample counts as correct in pass@k.

    Returns:
        name -> number: mean, and with several samples pass@k, maj@k, best@k, worst@k for k = 1, 2, 4, ... and n, each
        with /low and /high. Empty when nothing could be scored.
    """
    known = ~scores.isnan()
    table, counts, coded = by_prompt(scores[known], group_id[known], picked(answers, known))
    if not counts.numel():
        return {}
    inside = torch.arange(table.shape[1], device=table.device)[None] < counts[:, None]
    columns = {"mean": torch.where(inside, table, 0.0).sum(-1) / counts}
    num_correct = (inside & (table >= correct)).sum(-1)
    most = int(counts.max())
    for k in powers(most) if most > 1 else []:
        columns[f"pass@{k}"] = pass_at_k(counts, num_correct, k)
        if k > 1:
            columns[f"best@{k}"] = best_at_k(table, counts, k)
            columns[f"worst@{k}"] = worst_at_k(table, counts, k)
            if coded is not None:
                columns[f"maj@{k}"] = majority_at_k(table, coded, counts, k, seed=seed)
    out: dict[str, float] = {}
    for name, column in columns.items():
        out[name] = float(column.nanmean())
        out[f"{name}/low"], out[f"{name}/high"] = bootstrap_interval(column, seed=seed, num_draws=num_draws)
    return out


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({1 << i for i in range(n.bit_length())} | {n})


def picked(answers: Sequence[Hashable] | None, known: Tensor) -> Tensor | None:
    """Answers as int64 codes, equal where the answers are, for the known samples."""
    if answers is None:
        return None
    codes: dict[Hashable, int] = {}
    coded = [codes.setdefault((i, None) if a is None else (None, a), len(codes)) for i, a in enumerate(answers)]
    return torch.tensor(coded, dtype=torch.int64, device=known.device)[known]


def by_prompt(scores: Tensor, group_id: Tensor, coded: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples as rows of prompts [P, N] float64 with counts [P], and answers likewise (0 behind the samples)."""
    ids, index, counts = torch.unique(group_id, return_inverse=True, return_counts=True)
    order = torch.argsort(index, stable=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]]) if counts.numel() else counts
    column = torch.arange(order.numel(), device=scores.device) - starts[index[order]]
    shape = (ids.numel(), int(counts.max()) if counts.numel() else 0)
    table = torch.zeros(shape, dtype=torch.float64, device=scores.device)
    table[index[order], column] = scores[order].double()
    if coded is None:
        return table, counts, None
    codes = torch.zeros(shape, dtype=torch.int64, device=scores.device)
    codes[index[order], column] = coded[order]
    return table, counts, codes
