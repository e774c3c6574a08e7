"""Row kernels of the head: statistics in one read of the logits, their gradient in place, and both in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import launch
from ..checks import check_label_values
from ..dispatch import on_device_of
from .reference import RowOptions, RowStatistics, as_row_groups, empty_statistics
from .row_device import (
    NEVER,
    add_tile,
    column_offsets,
    columns_to_grid,
    gradient_tile,
    load_scores,
    merge_threads,
    tanh,
    tile_columns,
)


@triton.jit
def _row_sums(
    row, stride, end, scale, inner, STRIDED: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(max f, sum 2^t, sum 2^t t, sum 4^t) of the columns below `end`: full tiles, then a masked one.

    A skewed row starts off the 16-byte grid: the few columns before the grid are a masked tile of their own, so that
    the full tiles load 16 bytes at a time all the same.
    """
    top = tl.full([1, WIDTH], NEVER, tl.float32)
    total = tl.zeros([1, WIDTH], tl.float32)
    weighted = tl.zeros([1, WIDTH], tl.float32)
    squares = tl.zeros([1, WIDTH], tl.float32)
    if SKEWED:
        skip = tl.minimum(columns_to_grid(row), end)
        f = load_scores(row, tile_columns(0, DEPTH, WIDTH), stride, skip, inner, False, STRIDED, CAPPED)
        top, total, weighted, squares = add_tile(f, scale, top, total, weighted, squares, ENTROPY, SQUARES)
        row = tl.multiple_of(row + skip, 16)
        end = end - skip
    full = end // (DEPTH * WIDTH)
    for i in range(full):
        columns = tile_columns(i * (DEPTH * WIDTH), DEPTH, WIDTH)
        f = load_scores(row, columns, stride, end, inner, True, STRIDED, CAPPED)
        top, total, weighted, squares = add_tile(f, scale, top, total, weighted, squares, ENTROPY, SQUARES)
    if full * (DEPTH * WIDTH) < end:
        columns = tile_columns(full * (DEPTH * WIDTH), DEPTH, WIDTH)
        f = load_scores(row, columns, stride, end, inner, False, STRIDED, CAPPED)
        top, total, weighted, squares = add_tile(f, scale, top, total, weighted, squares, ENTROPY, SQUARES)
    return merge_threads(scale, top, total, weighted, squares, ENTROPY, SQUARES)


@triton.jit
def _row_start(logits, r, width, group_stride, row_stride):
    """Address of row r of [A, width, V] rows in two strides, in 64-bit arithmetic."""
    group = r // width
    return logits + group.to(tl.int64) * group_stride + (r - group * width).to(tl.int64) * row_stride


@triton.jit
def _row_scale(temperature, r, number, top, PER_ROW: tl.constexpr):
    """c log2(e) of row r, c = top / temperature."""
    if PER_ROW:
        number = tl.load(temperature + r).to(tl.float32)
    return top / number * 1.4426950408889634


@triton.jit
def _label_score(row, label, stride, vocabulary, inner, CAPPED: tl.constexpr):
    """f of the label; NaN where the label is none of the vocabulary's, so that no wrong number comes of it."""
    known = (label >= 0) & (label < vocabulary)
    f = tl.load(row + label * stride, mask=known, other=float("nan")).to(tl.float32)
    if CAPPED:
        f = tanh(inner * f)
    return f


@triton.jit(do_not_specialize=["width", "ignore"])
def statistics_kernel(
    logits, labels, temperature, log_prob, entropy, sum_sq, row_max, log_sum,
    width, group_stride, row_stride, stride, vocabulary, number, top, inner, ignore,
    PER_ROW: tl.constexpr, STRIDED: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row a program: log_prob, entropy, sum of squares, max f and log2 S."""
    r = tl.program_id(0)
    label = tl.load(labels + r).to(tl.int64)
    ignored = label == ignore
    row = _row_start(logits, r, width, group_stride, row_stride)
    scale = _row_scale(temperature, r, number, top, PER_ROW)
    end = tl.where(ignored, 0, vocabulary)  # an ignored row is not read
    high, total, weighted, squares = _row_sums(
        row, stride, end, scale, inner, STRIDED, SKEWED, CAPPED, ENTROPY, SQUARES, DEPTH, WIDTH
    )
    picked = _label_score(row, tl.where(ignored, 0, label), stride, end, inner, CAPPED)
    lg = tl.log2(total)
    tl.store(row_max + r, high)
    tl.store(log_sum + r, lg)
    tl.store(log_prob + r, tl.where(ignored, 0.0, ((picked - high) * scale - lg) * 0.6931471805599453))
    if ENTROPY:
        tl.store(entropy + r, tl.where(ignored, 0.0, (lg - weighted / total) * 0.6931471805599453))
    if SQUARES:
        tl.store(sum_sq + r, tl.where(ignored, 0.0, squares / (total * total)))


@triton.jit
def _clear_row(target, stride, vocabulary, STRIDED: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    zero = tl.zeros([DEPTH, WIDTH], tl.float32).to(target.dtype.element_ty)
    full = vocabulary // (DEPTH * WIDTH)
    for i in range(full):
        columns = tile_columns(i * (DEPTH * WIDTH), DEPTH, WIDTH)
        tl.store(target + column_offsets(columns, stride, STRIDED), zero)
    columns = tile_columns(full * (DEPTH * WIDTH), DEPTH, WIDTH)
    tl.store(target + column_offsets(columns, stride, STRIDED), zero, mask=columns < vocabulary)


@triton.jit
def _write_row(
    row, target, stride, target_stride, vocabulary, label, scale, high, constant, linear, at_label, inner,
    STRIDED: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of a row, last tile first: what a pass before this one read last is still in the cache."""
    if SKEWED:  # `target` is as far off the grid as `row`
        skip = tl.minimum(columns_to_grid(row), vocabulary)
        columns = tile_columns(0, DEPTH, WIDTH)
        f = load_scores(row, columns, stride, skip, inner, False, STRIDED, CAPPED)
        d = gradient_tile(f, columns, label, scale, high, constant, linear, at_label, CAPPED, ENTROPY)
        tl.store(target + columns, d.to(target.dtype.element_ty), mask=columns < skip)
        row = tl.multiple_of(row + skip, 16)
        target = tl.multiple_of(target + skip, 16)
        label = label - skip
        vocabulary = vocabulary - skip
    full = vocabulary // (DEPTH * WIDTH)
    if full * (DEPTH * WIDTH) < vocabulary:
        columns = tile_columns(full * (DEPTH * WIDTH), DEPTH, WIDTH)
        f = load_scores(row, columns, stride, vocabulary, inner, False, STRIDED, CAPPED)
        d = gradient_tile(f, columns, label, scale, high, constant, linear, at_label, CAPPED, ENTROPY)
        place = target + column_offsets(columns, target_stride, STRIDED)
        tl.store(place, d.to(target.dtype.element_ty), mask=columns < vocabulary)
    for i in range(full):
        columns = tile_columns((full - 1 - i) * (DEPTH * WIDTH), DEPTH, WIDTH)
        f = load_scores(row, columns, stride, vocabulary, inner, True, STRIDED, CAPPED)
        d = gradient_tile(f, columns, label, scale, high, constant, linear, at_label, CAPPED, ENTROPY)
        tl.store(target + column_offsets(columns, target_stride, STRIDED), d.to(target.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "width", "ignore"])
def gradient_kernel(
    logits, out, labels, temperature, grad_log_prob, grad_entropy, entropy, row_max, log_sum,
    rows, width, group_stride, row_stride, stride, out_group_stride, out_row_stride, out_stride,
    vocabulary, number, top, inner, ignore,
    PER_ROW: tl.constexpr, STRIDED: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row a program, the last row first: d loss / d logits into `out`, which may be the logits."""
    r = rows - 1 - tl.program_id(0)
    label = tl.load(labels + r).to(tl.int64)
    scale = _row_scale(temperature, r, number, top, PER_ROW)
    outer = scale * 0.6931471805599453
    if CAPPED:
        outer = outer * inner
    g = tl.load(grad_log_prob + r).to(tl.float32)
    lg = tl.load(log_sum + r)
    dead = g == 0
    inverse = tl.exp2(-lg) * outer
    constant = -g * inverse
    linear = 0.0
    if ENTROPY:
        h = tl.load(grad_entropy + r).to(tl.float32)
        dead = dead & (h == 0)
        linear = -0.6931471805599453 * h * inverse
        constant -= h * (tl.load(entropy + r) - 0.6931471805599453 * lg) * inverse
    dead = dead | (label == ignore)
    row = _row_start(logits, r, width, group_stride, row_stride)
    target = _row_start(out, r, width, out_group_stride, out_row_stride)
    if dead:  # not read: it may hold anything
        _clear_row(target, out_stride, vocabulary, STRIDED, DEPTH, WIDTH)
    else:
        _write_row(
            row, target, stride, out_stride, vocabulary, label, scale, tl.load(row_max + r),
            constant, linear, g * outer, inner, STRIDED, SKEWED, CAPPED, ENTROPY, DEPTH, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width", "ignore"])
def weighted_kernel(
    logits, labels, temperature, weights, log_prob,
    width, group_stride, row_stride, stride, vocabulary, number, top, inner, ignore,
    PER_ROW: tl.constexpr, STRIDED: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """log_prob of a row, then d (weight log_prob) / d logits in the logits' place, read again from the cache."""
    r = tl.program_id(0)
    label = tl.load(labels + r).to(tl.int64)
    ignored = label == ignore
    row = _row_start(logits, r, width, group_stride, row_stride)
    scale = _row_scale(temperature, r, number, top, PER_ROW)
    end = tl.where(ignored, 0, vocabulary)
    high, total, _weighted, _squares = _row_sums(
        row, stride, end, scale, inner, STRIDED, SKEWED, CAPPED, False, False, DEPTH, WIDTH
    )
    picked = _label_score(row, tl.where(ignored, 0, label), stride, end, inner, CAPPED)
    lg = tl.log2(total)
    tl.store(log_prob + r, tl.where(ignored, 0.0, ((picked - high) * scale - lg) * 0.6931471805599453))
    g = tl.load(weights + r).to(tl.float32)
    outer = scale * 0.6931471805599453
    if CAPPED:
        outer = outer * inner
    # threads read the label's logit, one of them overwrites it
    tl.debug_barrier()
    if ignored | (g == 0):
        _clear_row(row, stride, vocabulary, STRIDED, DEPTH, WIDTH)
    else:
        _write_row(
            row, row, stride, stride, vocabulary, label, scale, high,
            -g * tl.exp2(-lg) * outer, 0.0, g * outer, inner, STRIDED, SKEWED, CAPPED, False, DEPTH, WIDTH,
        )  # fmt: skip


def _options(options: RowOptions) -> tuple[torch.Tensor | None, tuple[float, float, float, int]]:
    """(temperature per row or None, (temperature, top, inner, ignore)) as the kernels take them."""
    rows = options.temperature
    rows = None if rows is None else rows.reshape(-1).to(torch.float32).contiguous()
    top = options.logit_softcap or options.logit_scale
    inner = options.logit_scale / options.logit_softcap if options.logit_softcap else 1.0
    return rows, (options.temperature_value, top, inner, options.ignore_index)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of [A, B, V]; 0 where there is one index only, whatever the tensor says there."""
    group, row, column = x.stride()
    return group if x.shape[0] > 1 else 0, row if x.shape[1] > 1 else 0, column


def _address(x: torch.Tensor) -> int:
    return 0 if x.device.type == "meta" else x.data_ptr()


def _flags(options: RowOptions, logits: torch.Tensor, out: torch.Tensor | None = None) -> dict[str, bool]:
    """`out`: where the gradient goes if not into the logits. See the kernels for what the flags change."""
    group, row, column = _strides(logits)
    strided = column != 1 or (out is not None and out.stride(2) != 1)
    # rows that do not all start at multiples of 16 elements get no wide loads without the skewed path
    skewed = not strided and (_address(logits) % 16 != 0 or group % 16 != 0 or row % 16 != 0)
    if out is not None and skewed:
        # the tiles of both have to reach the grid after the same number of columns
        step = 16 // logits.element_size()
        same = all((a - b) % step == 0 for a, b in zip((group, row), _strides(out)))
        skewed = same and (_address(logits) - _address(out)) % 16 == 0
    return {
        "PER_ROW": options.temperature is not None,
        "STRIDED": strided,
        "SKEWED": skewed,
        "CAPPED": bool(options.logit_softcap),
    }


def statistics_of_rows_triton(
    logits: torch.Tensor, labels: torch.Tensor, options: RowOptions, out: RowStatistics
) -> RowStatistics:
    """Same as `statistics_of_rows`, for logits [..., V] in any strides."""
    groups = as_row_groups(logits)
    group_stride, row_stride, stride = _strides(groups)
    count, vocabulary = labels.numel(), logits.shape[-1]
    if count == 0:
        return out
    temperature, numbers = _options(options)
    config = launch.config("row_statistics", logits, vocabulary)
    with on_device_of(logits):
        statistics_kernel[(count,)](
            groups, labels.reshape(-1).contiguous(), temperature, *out, groups.shape[1],
            group_stride, row_stride, stride, vocabulary, *numbers,
            ENTROPY=out.entropy.numel() == count, SQUARES=out.sum_sq.numel() == count,
            **_flags(options, groups), **config,
        )  # fmt: skip
    return out


def gradient_of_rows_triton(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: RowOptions,
    statistics: RowStatistics,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Same as `gradient_of_rows`, for logits [..., V] in any strides."""
    groups = as_row_groups(logits)
    group_stride, row_stride, stride = _strides(groups)
    written = out.view(groups.shape)
    count, vocabulary = labels.numel(), logits.shape[-1]
    if count == 0:
        return out
    temperature, numbers = _options(options)
    config = launch.config("row_gradient", logits, vocabulary)
    h = None if grad_entropy is None else grad_entropy.reshape(-1).contiguous()
    with on_device_of(logits):
        gradient_kernel[(count,)](
            groups, written, labels.reshape(-1).contiguous(), temperature, grad_log_prob.reshape(-1).contiguous(), h,
            statistics.entropy, statistics.row_max, statistics.log_sum, count, groups.shape[1],
            group_stride, row_stride, stride, *_strides(written), vocabulary, *numbers,
            ENTROPY=h is not None, **_flags(options, groups, written), **config,
        )  # fmt: skip
    return out


def weighted_rows_triton(
    logits: torch.Tensor, labels: torch.Tensor, options: RowOptions, weights: torch.Tensor, log_prob: torch.Tensor
) -> None:
    """log_prob [N] of the rows, and d sum(weights log_prob) / d logits in the logits' place, in one launch."""
    groups = as_row_groups(logits)
    group_stride, row_stride, stride = _strides(groups)
    count, vocabulary = labels.numel(), logits.shape[-1]
    if count == 0:
        return
    temperature, numbers = _options(options)
    config = launch.config("row_weighted", logits, vocabulary)
    with on_device_of(logits):
        weighted_kernel[(count,)](
            groups, labels.reshape(-1).contiguous(), temperature, weights.reshape(-1).contiguous(), log_prob,
            groups.shape[1], group_stride, row_stride, stride, vocabulary, *numbers,
            **_flags(options, groups), **config,
        )  # fmt: skip


def log_prob_triton(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    want_entropy: bool,
    want_sum_sq: bool,
    ignore_index: int,
) -> RowStatistics:
    """Same arguments and results as `log_prob_reference`."""
    check_label_values("log_prob", labels, logits.shape[-1], ignore_index)
    out = empty_statistics(labels.numel(), logits, want_entropy, want_sum_sq)
    options = RowOptions(temperature, temperature_value, ignore_index=ignore_index)
    statistics_of_rows_triton(logits, labels, options, out)
    return RowStatistics(*(x.reshape(labels.shape) if x.numel() == labels.numel() else x for x in out))


def log_prob_backward_triton(
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
    """Same arguments and results as `log_prob_backward_reference`."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    options = RowOptions(temperature, temperature_value, ignore_index=ignore_index)
    statistics = RowStatistics(row_max, entropy, row_max, row_max, log_sum)
    return gradient_of_rows_triton(logits, labels, options, statistics, grad_log_prob, grad_entropy, out)
