"""The chain rule of ops that make their gradient in the forward: saved gradient times upstream gradient."""

from __future__ import annotations

import torch

from .dispatch import define_op, refuse_double_backward


def _reference(gradient: torch.Tensor, upstream: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    scaled = gradient * upstream.to(gradient.dtype)
    if count is not None:
        scaled = scaled / count.to(gradient.dtype).clamp(min=1)
    # an upstream of exactly 0 is a masked token: whatever the saved gradient holds there, nothing flows
    return torch.where(upstream == 0, torch.zeros_like(scaled), scaled)


def _fake(gradient: torch.Tensor, upstream: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


chain = define_op(
    "chain",
    "(Tensor gradient, Tensor upstream, Tensor? count) -> Tensor",
    reference=_reference,
    kernel="fastrl.kernels.chain_kernel:chain_triton",
    fake=_fake,
)
refuse_double_backward(chain, "fastrl.kernels")
