"""Many tensors into one flat bucket, cast on the way: what is sent to an inference engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import FLOATS, check_tensor
from ..dispatch import define_op
from .reference import pack_weights_reference, views_of


def _fake(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    return None


_op = define_op(
    "pack_weights",
    "(Tensor[] tensors, Tensor(a!) out) -> ()",
    reference=pack_weights_reference,
    kernel="fastrl.kernels.pack_weights.kernel:pack_weights_triton",
    fake=_fake,
    mutates_args=("out",),
)


def pack_weights(tensors: Sequence[torch.Tensor], out: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Copy the tensors, cast to `dtype`, back to back into `out`.

        out[o_i : o_i + numel_i] = cast(tensor_i.flatten()),   o_i = sum of the sizes before

    Args:
        tensors: float tensors of any shapes, strides and dtypes, on one device.
        out: the bucket: 1-D contiguous, of `dtype`, or uint8 (its bytes are used as `dtype`); large enough.
        dtype: dtype to cast to, rounding to nearest.

    Returns:
        a view of `out` per tensor, shaped like it.

    Raises:
        ValueError: the bucket is too small or of another dtype, or a tensor cannot be packed.
    """
    if dtype not in FLOATS:
        raise ValueError(f"pack_weights: dtype = {dtype!r}: use one of {', '.join(map(str, FLOATS))}")
    check_tensor("pack_weights", "out", out, dtypes=(dtype, torch.uint8), ndim=1)
    if not out.is_contiguous():
        raise ValueError(f"pack_weights: out has stride {out.stride()}: a contiguous bucket is needed")
    for i, t in enumerate(tensors):
        check_tensor("pack_weights", f"tensors[{i}]", t, device=out.device)
    need = sum(t.numel() for t in tensors)
    size = torch.empty((), dtype=dtype).element_size()
    room = out.numel() * out.element_size() // size
    if need > room:
        raise ValueError(f"pack_weights: out holds {room} values of {dtype}: {need} are needed")
    if out.dtype != dtype:
        if out.data_ptr() % size:
            raise ValueError(f"pack_weights: out starts at address {out.data_ptr()}: a multiple of {size} is needed")
        out = out[: room * size].view(dtype)
    plain = [t.detach() for t in tensors]
    _op(plain, out)
    return views_of(plain, out)
