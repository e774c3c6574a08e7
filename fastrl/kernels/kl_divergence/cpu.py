"""KL estimators on a CPU: k3 in blocks, in place."""

from __future__ import annotations

import torch

from ..cpu_blocks import blocks, buffers
from ..dispatch import accumulate_dtype
from .reference import CAP, LIMIT, value_of


def kl_divergence_cpu(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, value: str, gradient: str) -> torch.Tensor:
    """Same arguments and values as `kl_divergence_reference`; not differentiable."""
    dtype, total = accumulate_dtype(log_prob, ref_log_prob), log_prob.numel()
    if value != "k3":
        return value_of(log_prob.to(dtype) - ref_log_prob.to(dtype), value)
    new, old = log_prob.reshape(-1), ref_log_prob.reshape(-1)
    out = new.new_empty(total, dtype=dtype)
    (buffer,) = buffers(1, total, dtype)
    same = new.dtype == old.dtype == dtype
    for part in blocks(total):
        y = torch.sub(old[part], new[part], out=out[part]) if same else out[part].copy_(old[part]).sub_(new[part])
        y.clamp_(-LIMIT, LIMIT)
        torch.sub(torch.expm1(y, out=buffer[: y.shape[0]]), y, out=y).clamp_(-CAP, CAP)
    return out.view(log_prob.shape)
