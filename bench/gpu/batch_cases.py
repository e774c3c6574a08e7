"""The batch-level ops for `bench/gpu/kernels.py`: advantages, groups, statistics, losses, KL, packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from cost_model import batch_cost, group_cost, pack_cost
from kernels import Case
from plain import (
    eager_gae,
    eager_groups,
    eager_kl,
    eager_mismatch,
    eager_policy,
    eager_value,
    eager_whiten,
)

import fastrl.kernels as K


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def gradient(call: Callable[..., torch.Tensor], x: torch.Tensor, *data: torch.Tensor) -> Callable[[], Any]:
    """Loss and its gradient, from a leaf."""

    def run() -> Any:
        leaf = x.detach().requires_grad_()
        loss = call(leaf, *data)
        loss.backward()
        return loss, leaf.grad

    return run


def three(ours: Callable[..., Any], plain: Callable[..., Any], *data: Any, compile_too: bool = True) -> dict[str, Any]:
    """fastrl, eager and compiled calls on the same data."""
    fast = compiled(plain)
    found = {"fastrl": lambda: ours(*data), "eager": lambda: plain(*data)}
    return found | ({"compile": lambda: fast(*data)} if compile_too else {})


def scans(device: str, scale: float) -> Iterator[Case]:
    for rows, columns in ((512, 4096), (64, 1024), (4, 131072)):
        columns = max(64, int(columns * scale))
        x, y = (torch.randn(rows, columns, device=device) for _ in range(2))
        lengths = torch.randint(columns // 4, columns + 1, (rows, 1), device=device)
        mask = torch.arange(columns, device=device)[None] < lengths
        mask &= torch.rand(rows, columns, device=device) < 0.9

        def ours(r: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> Any:
            return K.gae(r, v, m, gamma=0.99, gae_lambda=0.95)

        data = (x, y, mask)
        variants = {"fastrl": lambda f=ours, d=data: f(*d)}
        if columns <= 4096:
            variants["eager"] = lambda d=data: eager_gae(*d, 0.99, 0.95)
        exact = [t.double() for t in (x, y)]
        yield Case(
            f"gae {rows}x{columns}",
            batch_cost("gae", rows * columns),
            variants,
            lambda f=ours, e=exact, m=mask: f(*e, m),
        )


def elementwise(device: str, scale: float) -> Iterator[Case]:
    tokens = max(256, int((1 << 20) * scale))
    x, y, z = (torch.randn(tokens, device=device) * 0.3 - 1 for _ in range(3))
    mask = torch.rand(tokens, device=device) < 0.9
    exact = [t.double() for t in (x, y, z)]

    def case(name: str, cost: str, ours: Any, plain: Any, *data: torch.Tensor, tolerance: float = 1e-3) -> Case:
        precise = [t.double() if t.is_floating_point() else t for t in data]
        return Case(
            f"{name} {tokens}", batch_cost(cost, tokens), three(ours, plain, *data), lambda: ours(*precise), tolerance
        )

    def policy(lp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return K.clipped_policy_loss(lp, old, adv, m).loss

    def value(v: torch.Tensor, old: torch.Tensor, ret: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return K.clipped_value_loss(v, old, ret, m).loss

    yield case("clipped_policy_loss", "clipped_policy_loss", policy, eager_policy, x, y, z, mask)
    yield case("whiten", "whiten", K.whiten, eager_whiten, x, mask)
    yield case("kl_divergence", "kl_divergence", K.kl_divergence, eager_kl, x, y)
    yield case("aggregate", "aggregate", K.aggregate, lambda t, m: (t * m).sum() / m.sum(), x, mask)
    yield case(
        "mismatch_stats",
        "mismatch_stats",
        lambda a, b, m: K.mismatch_stats(a, b, m)[3:7:3],
        eager_mismatch,
        x,
        y,
        mask,
    )
    for name, ours, plain in (
        ("clipped_policy_loss", policy, eager_policy),
        ("clipped_value_loss", value, eager_value),
    ):
        fast = compiled(plain)
        yield Case(
            f"{name} + backward {tokens}",
            batch_cost(f"{name}+grad", tokens),
            {
                "fastrl": gradient(ours, x, y, z, mask),
                "eager": gradient(plain, x, y, z, mask),
                "compile": gradient(fast, x, y, z, mask),
            },
            gradient(ours, *exact, mask),
        )


def groups(device: str, scale: float) -> Iterator[Case]:
    samples = max(64, int(16384 * scale)) // 8 * 8
    scores = torch.randint(0, 2, (samples,), device=device).float() + torch.rand(samples, device=device)
    for order in ("neighbours", "shuffled"):
        ids = torch.arange(samples, device=device) // 8
        if order == "shuffled":
            ids = ids[torch.randperm(samples, device=device)]
        yield Case(
            f"group_normalize {samples} {order}",
            group_cost(samples),
            three(K.group_normalize, eager_groups, scores, ids, compile_too=False),
            lambda s=scores, i=ids: K.group_normalize(s.double(), i),
        )


def packing(device: str, scale: float) -> Iterator[Case]:
    hidden = max(64, int(4096 * scale))
    tensors = [torch.randn(hidden, hidden, device=device) for _ in range(16)]
    total = sum(t.numel() for t in tensors)
    bucket = torch.empty(total, dtype=torch.bfloat16, device=device)

    def ours() -> torch.Tensor:
        K.pack_weights(tensors, bucket, torch.bfloat16)
        return bucket

    def plain() -> torch.Tensor:
        return torch.cat([t.flatten().to(torch.bfloat16) for t in tensors])

    yield Case(f"pack_weights 16x{hidden}^2", pack_cost(total), {"fastrl": ours, "eager": plain}, plain, 0.0)


def cases(device: str, scale: float) -> Iterator[Case]:
    """Every case, built one at a time."""
    yield from scans(device, scale)
    yield from groups(device, scale)
    yield from elementwise(device, scale)
    yield from packing(device, scale)
