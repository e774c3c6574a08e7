"""Softmax statistics of rows of logits and their gradient, in plain torch: a few rows at a time in reused buffers.

With f = u (or tanh(u logit_scale / logit_softcap)) and c = logit_scale / temperature (or logit_softcap / temperature):

    z = c f,   t = (z - max z) log2(e),   S = sum 2^t,   log softmax(z)_j = ln2 (t_j - log2 S)

Powers of two, because torch's vectorised exp2 is 2.7 times as fast as its exp on a CPU. A block of rows is small enough
for the cache, so that each of the passes over it costs little beside the one read of the logits.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch

from ..checks import check_label_values
from ..dispatch import accumulate_dtype

LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)
BLOCK_ELEMENTS = 1 << 19  # of a row block: its float32 copy and a second buffer stay in a CPU's cache


class RowOptions(NamedTuple):
    """How logits become a distribution. `temperature` [N] replaces the number if given; softcap 0 means none."""

    temperature: torch.Tensor | None = None
    temperature_value: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    ignore_index: int = -100


class RowStatistics(NamedTuple):
    """[N] each; entropy and sum_sq are empty where not asked for. row_max is max f, log_sum is log2 S."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    sum_sq: torch.Tensor
    row_max: torch.Tensor
    log_sum: torch.Tensor

    def rows(self, part: slice) -> RowStatistics:
        """Views of some of the rows."""
        return RowStatistics(*(x[part] for x in self))


def as_row_groups(x: torch.Tensor) -> torch.Tensor:
    """[..., V] as [A, B, V], a view wherever two strides can describe the rows (so also for logits[:, :-1])."""
    vocabulary = x.shape[-1]
    if x.numel() == 0:
        return x.reshape(1, math.prod(x.shape[:-1]), vocabulary)
    for shape in ((1, -1, vocabulary), (-1, *x.shape[-2:])):
        try:
            return x.view(shape)
        except RuntimeError:
            continue
    return x.reshape(1, -1, vocabulary)


def empty_statistics(count: int, like: torch.Tensor, want_entropy: bool, want_sum_sq: bool) -> RowStatistics:
    """Uninitialised statistics of `count` rows of logits like `like`."""
    dtype = accumulate_dtype(like)
    sizes = (count, count if want_entropy else 0, count if want_sum_sq else 0, count, count)
    return RowStatistics(*(like.new_empty(n, dtype=dtype) for n in sizes))


def coefficients(options: RowOptions, dtype: torch.dtype, count: int, device: torch.device) -> torch.Tensor:
    """c of every row, [N]: what f is multiplied by."""
    top = options.logit_softcap or options.logit_scale
    if options.temperature is not None:
        return top / options.temperature.reshape(-1).to(dtype)
    return torch.full((count,), top / options.temperature_value, dtype=dtype, device=device)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, list[torch.Tensor]] = {}


_kept = _Kept()


def _buffers(number: int, rows: int, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Scratch [rows, V] for a block. On a CPU it is kept for the next call: fresh pages cost as much as the passes."""
    size = rows * like.shape[1]
    if like.device.type != "cpu" or size > BLOCK_ELEMENTS:
        return [like.new_empty((rows, like.shape[1]), dtype=dtype) for _ in range(number)]
    kept = _kept.buffers.setdefault(dtype, [])
    while len(kept) < number:
        kept.append(torch.empty(BLOCK_ELEMENTS, dtype=dtype))
    return [x[:size].view(rows, like.shape[1]) for x in kept[:number]]


def _scores(rows: torch.Tensor, buffer: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """f of the rows in the accumulation dtype: the rows themselves where nothing is to be done, else in `buffer`."""
    if options.logit_softcap:
        return buffer.copy_(rows).mul_(options.logit_scale / options.logit_softcap).tanh_()
    return rows if rows.dtype == buffer.dtype else buffer.copy_(rows)


def _floor(dtype: torch.dtype) -> float:
    """A finite t below which 2^t is 0: stands in for -inf where a product with 0 would make NaN."""
    return -1100.0 if dtype == torch.float64 else -160.0


def statistics_of_rows(
    logits: torch.Tensor, labels: torch.Tensor, options: RowOptions, out: RowStatistics
) -> RowStatistics:
    """Fill `out` (see `empty_statistics`) from logits [N, V] and labels [N]."""
    count, vocabulary = logits.shape
    want_entropy, want_sum_sq = out.entropy.numel() == count, out.sum_sq.numel() == count
    dtype = out.log_prob.dtype
    step = max(1, min(count, BLOCK_ELEMENTS // max(vocabulary, 1)))
    scale = coefficients(options, dtype, count, logits.device) * LOG2E
    ignored = labels == options.ignore_index
    safe = torch.where(ignored, 0, labels).long()
    first, *more = _buffers(2 if want_entropy else 1, step, logits, dtype)
    second = more[0] if want_entropy else first
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        n = part.stop - start
        f = _scores(logits[part], first[:n], options)
        top = torch.amax(f, 1, out=out.row_max[part])
        t = torch.sub(f, top.unsqueeze(1), out=first[:n]).mul_(scale[part].unsqueeze(1))
        picked = t.gather(1, safe[part].unsqueeze(1)).squeeze(1)
        if want_entropy:
            t.clamp_(min=_floor(dtype))
        e = torch.exp2(t, out=second[:n])
        total = e.sum(1)
        log_sum = torch.log2(total, out=out.log_sum[part])
        torch.sub(picked, log_sum, out=out.log_prob[part]).mul_(LN2)
        if want_entropy:
            torch.sub(log_sum, torch.linalg.vecdot(e, t) / total, out=out.entropy[part]).mul_(LN2)
        if want_sum_sq:
            torch.div(torch.linalg.vecdot(e, e), total * total, out=out.sum_sq[part])
    if bool(ignored.any()):
        for values in (out.log_prob, out.entropy if want_entropy else None, out.sum_sq if want_sum_sq else None):
            if values is not None:
                values.masked_fill_(ignored, 0)
    return out


def gradient_of_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: RowOptions,
    statistics: RowStatistics,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write d loss / d logits [N, V] into `out`, which may be `logits` itself.

        d z_j = g (1[j = label] - p_j) - h p_j (log p_j + H),    d u_j = d z_j (logit_scale / temperature) (1 - f_j^2)

    with g, h [N] the gradients of log_prob and entropy (the last factor with a softcap only). Rows whose label is
    ignored, or where both gradients are 0, get exactly 0 whatever their logits hold.
    """
    count, vocabulary = logits.shape
    dtype = statistics.row_max.dtype
    step = max(1, min(count, BLOCK_ELEMENTS // max(vocabulary, 1)))
    c = coefficients(options, dtype, count, logits.device)
    scale = c * LOG2E
    outer = c * (options.logit_scale / options.logit_softcap) if options.logit_softcap else c
    g = grad_log_prob.reshape(-1).to(dtype)
    dead = g == 0
    inverse = torch.exp2(-statistics.log_sum)
    linear = None
    constant = -g * inverse * outer
    if grad_entropy is not None:
        h = grad_entropy.reshape(-1).to(dtype)
        dead &= h == 0
        linear = -LN2 * h * inverse * outer
        constant = constant - h * (statistics.entropy - LN2 * statistics.log_sum) * inverse * outer
    ignored = labels == options.ignore_index
    dead |= ignored
    safe = torch.where(ignored, 0, labels).long()
    any_dead = bool(dead.any())
    at_label = g * outer
    buffers = _buffers(3 if options.logit_softcap else 2, step, logits, dtype)
    capped = buffers[2] if options.logit_softcap else buffers[0]
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        n = part.stop - start
        f = _scores(logits[part], capped[:n], options)
        t = torch.sub(f, statistics.row_max[part].unsqueeze(1), out=buffers[0][:n]).mul_(scale[part].unsqueeze(1))
        direct = out[part] if out.dtype == dtype and not options.logit_softcap else t
        if linear is None:
            d = torch.mul(t.exp2_(), constant[part].unsqueeze(1), out=direct)
        else:
            p = torch.exp2(t.clamp_(min=_floor(dtype)), out=buffers[1][:n])
            d = torch.mul(t.mul_(linear[part].unsqueeze(1)).add_(constant[part].unsqueeze(1)), p, out=direct)
        d.scatter_add_(1, safe[part].unsqueeze(1), at_label[part].unsqueeze(1))
        if options.logit_softcap:
            d.mul_(f.square_().neg_().add_(1))
        if any_dead:
            d.masked_fill_(dead[part].unsqueeze(1), 0)
        if direct is t:
            out[part].copy_(d)
    return out


def weighted_of_rows(
    logits: torch.Tensor, labels: torch.Tensor, options: RowOptions, weights: torch.Tensor, log_prob: torch.Tensor
) -> None:
    """log_prob [N] of logits [N, V], and d sum(weights log_prob) / d logits in the logits' place."""
    count = logits.shape[0]
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, count, step):  # the second read of a block comes from the cache
        part = slice(start, min(start + step, count))
        rows, mine = logits[part], labels[part]
        temperature = None if options.temperature is None else options.temperature.reshape(-1)[part]
        chosen = options._replace(temperature=temperature)
        found = statistics_of_rows(rows, mine, chosen, empty_statistics(mine.numel(), rows, False, False))
        log_prob[part] = found.log_prob
        gradient_of_rows(rows, mine, chosen, found, weights[part], None, rows)


def log_prob_reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    want_entropy: bool,
    want_sum_sq: bool,
    ignore_index: int,
) -> RowStatistics:
    """The statistics of `fastrl.kernels.log_prob`, shaped like labels."""
    check_label_values("log_prob", labels, logits.shape[-1], ignore_index)
    groups = as_row_groups(logits)
    flat = labels.reshape(-1)
    count, width = flat.numel(), groups.shape[1]
    out = empty_statistics(count, logits, want_entropy, want_sum_sq)
    for index in range(groups.shape[0]):
        part = slice(index * width, (index + 1) * width)
        options = RowOptions(
            None if temperature is None else temperature.reshape(-1)[part], temperature_value, ignore_index=ignore_index
        )
        statistics_of_rows(groups[index], flat[part], options, out.rows(part))
    return RowStatistics(*(x.reshape(labels.shape) if x.numel() == count else x for x in out))


def log_prob_backward_reference(
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    entropy: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    """d loss / d logits, a new contiguous tensor like logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    groups = as_row_groups(logits)
    written, width = out.view(groups.shape), groups.shape[1]
    rows = lambda x, part: x if x is None or x.numel() == 0 else x.reshape(-1)[part]  # noqa: E731
    for index in range(groups.shape[0]):
        part = slice(index * width, (index + 1) * width)
        options = RowOptions(rows(temperature, part), temperature_value, ignore_index=ignore_index)
        top = rows(row_max, part)
        statistics = RowStatistics(top, rows(entropy, part), top, top, rows(log_sum, part))
        gradient_of_rows(
            groups[index],
            labels.reshape(-1)[part],
            options,
            statistics,
            rows(grad_log_prob, part),
            rows(grad_entropy, part),
            written[index],
        )
    return out
