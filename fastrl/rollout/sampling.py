"""Drawing tokens: softmax, optional truncation, and an inverse-CDF walk in two levels.

    p = softmax(z / temperature),   token = min {v : p_1 + ... + p_v > u (p_1 + ... + p_V)}

The uniform u comes from outside (seeds.py). The cumulative sum over V tokens is walked in two levels, sums of blocks of
about sqrt(V) tokens and then the tokens of one block, so that one row costs a softmax and one more read of it.
Several samples may draw from the same row.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fastrl.rollout.engine import SamplingParams

_CANDIDATES = 256  # tokens that top_p looks at before it sorts a whole row


def draw(
    logits: Tensor, rows: np.ndarray, temperatures: np.ndarray, uniforms: np.ndarray, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray]:
    """One token for each of S samples from R rows of logits.

    Args:
        logits: [R, V], overwritten.
        rows: [S] int64, the row each sample draws from.
        temperatures: [S] float64, 0 is greedy.
        uniforms: [S] float64 in [0, 1).
        params: top_k, top_p and min_p.

    Returns:
        tokens [S] int64 and log-probs [S] float32 (float64 logits keep float64) of the distribution that was drawn
        from; for greedy samples of the plain softmax.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tokens = np.empty(len(rows), np.int64)
    log_probs = np.empty(len(rows), np.float64 if logits.dtype == torch.float64 else np.float32)
    distinct = np.unique(temperatures)
    for temperature in distinct:
        chosen = np.flatnonzero(temperatures == temperature)
        if len(distinct) == 1:
            local, z = rows, logits
        else:
            used, local = np.unique(rows[chosen], return_inverse=True)
            z = logits[torch.from_numpy(used).to(logits.device)]
        index = torch.from_numpy(np.ascontiguousarray(local)).to(logits.device)
        if temperature == 0:
            picked, log_prob = _greedy(z, index)
        else:
            u = torch.from_numpy(np.ascontiguousarray(uniforms[chosen])).to(logits.device)
            picked, log_prob = _inverse_cdf(probabilities(z, float(temperature), params), index, u)
        tokens[chosen] = picked.cpu().numpy()
        log_probs[chosen] = log_prob.cpu().numpy()
    return tokens, log_probs


def probabilities(logits: Tensor, temperature: float, params: SamplingParams) -> Tensor:
    """logits [R, V] -> the distribution [R, V] that samples are drawn from; may overwrite the logits."""
    z = logits if temperature == 1.0 else logits.div_(temperature)
    if params.truncated:
        z = z.masked_fill_(z < _threshold(z, params), -math.inf)
    return torch.softmax(z, dim=-1)


def _threshold(z: Tensor, params: SamplingParams) -> Tensor:
    """The smallest logit [R, 1] that is kept: the largest of what top_k, top_p and min_p ask for."""
    limit = torch.full_like(z[:, :1], -math.inf)
    if params.top_k and params.top_k < z.shape[-1]:
        limit = z.topk(params.top_k, dim=-1).values[:, -1:]
    if params.top_p < 1:
        limit = torch.maximum(limit, _nucleus(z, limit, params.top_p))
    if params.min_p > 0:
        limit = torch.maximum(limit, z.amax(-1, keepdim=True) + math.log(params.min_p))
    return limit


def _nucleus(z: Tensor, limit: Tensor, top_p: float) -> Tensor:
    """The logit [R, 1] of the last token of the smallest set of most likely ones whose mass reaches top_p."""
    kept = z.masked_fill(z < limit, -math.inf)
    total = kept.logsumexp(-1, keepdim=True)

    def walk(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best = kept[rows].topk(count, dim=-1).values
        before = (best - total[rows]).exp().double().cumsum(-1) - (best - total[rows]).exp()
        last = (before < top_p).sum(-1, keepdim=True) - 1  # a token is in while the mass before it is short of top_p
        return best.gather(-1, last), last[:, 0] == count - 1

    everything = torch.arange(z.shape[0], device=z.device)
    count = min(_CANDIDATES, z.shape[-1])
    result, open_ended = walk(everything, count)
    if count < z.shape[-1] and bool(open_ended.any()):
        rest = everything[open_ended]
        result[rest] = walk(rest, z.shape[-1])[0]
    return result


def _greedy(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token (the first of equals) and its log-prob, for each sample."""
    best, tokens = logits.max(dim=-1)
    log_prob = best - logits.logsumexp(dim=-1)
    return tokens[index], log_prob[index]


def _inverse_cdf(p: Tensor, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """p [R, V], index [S] into its rows, u [S] float64 -> tokens [S], log-probs [S]."""
    vocabulary = p.shape[-1]
    width = max(1, math.isqrt(vocabulary))
    whole = vocabulary // width * width
    sums = p[:, :whole].unflatten(-1, (-1, width)).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, p[:, whole:].sum(-1, keepdim=True)], dim=-1)
    blocks = sums[index]  # [S, blocks]
    cdf = blocks.double().cumsum(-1)
    target = u.to(cdf.dtype)[:, None] * cdf[:, -1:]
    block = _first_above(cdf, target, blocks)
    residual = target - (cdf.gather(-1, block) - blocks.gather(-1, block))
    position = block * width + torch.arange(width, device=p.device)
    inside = p[index[:, None], position.clamp(max=vocabulary - 1)].masked_fill_(position >= vocabulary, 0)
    offset = _first_above(inside.double().cumsum(-1), residual, inside)
    return (block * width + offset)[:, 0], inside.gather(-1, offset)[:, 0].log()


def _first_above(cdf: Tensor, target: Tensor, mass: Tensor) -> Tensor:
    """The first column [S, 1] whose cumulative sum exceeds the target; never one without mass."""
    found = torch.searchsorted(cdf, target, right=True)
    columns = torch.arange(mass.shape[-1], device=mass.device)
    last = torch.where(mass > 0, columns, 0).amax(-1, keepdim=True)
    return torch.minimum(found, last)
