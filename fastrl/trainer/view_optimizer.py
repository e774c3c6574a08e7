"""Training of parameters that are bf16 views of memory shared with the engine, from float32 masters.

gradient of micro-batch (bf16) -> added to the master's gradient (fp32)
AdamW on the masters -> masters rounded to nearest into the views
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.trainer.optim import Optimizer, Schedule, parameter_groups


class MasterAdamW(torch.optim.AdamW):
    """AdamW on masters that writes the views after each step."""

    def __init__(self, groups: list[dict[str, Any]], pairs: list[tuple[nn.Parameter, nn.Parameter]], **options: Any):
        super().__init__(groups, **options)
        self.pairs = pairs  # (view, master)

    def step(self, closure: Any = None) -> Any:
        """One update of the masters, rounded into the views."""
        result = super().step(closure)
        self.write_views()
        return result

    @torch.no_grad()
    def write_views(self) -> None:
        """views = masters in the views' type, rounded to nearest."""
        torch._foreach_copy_([view for view, _ in self.pairs], [master for _, master in self.pairs])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of masters and views."""
        super().zero_grad(set_to_none)
        for view, _ in self.pairs:
            view.grad = None


class ViewOptimizer(Optimizer):
    """`Optimizer` for a module whose parameters are views. What it saves is what a module of masters would save.

    Args:
        module: its trained parameters are bf16 (or fp16) views of shared memory.
        schedule: of the learning rate.
        masters: float32 values to start from, by parameter name.
        options: those of `Optimizer`.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        *,
        masters: Mapping[str, Tensor],
        name: str,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_skipped: int = 3,
        offload_moments: bool = False,
    ) -> None:
        views = {n: p for n, p in module.named_parameters() if p.requires_grad}
        held = nn.ParameterList(nn.Parameter(masters[n].detach().to(torch.float32)) for n in views)
        pairs = list(zip(views.values(), held))
        inner = MasterAdamW(
            parameter_groups(held, weight_decay), pairs, lr=schedule.peak, betas=betas, eps=eps, fused=True
        )
        super().__init__(
            held,
            schedule,
            name=name,
            max_grad_norm=max_grad_norm,
            max_skipped=max_skipped,
            torch_optimizer=inner,
            offload_moments=offload_moments,
        )
        self.inner, self.module = inner, module
        for view, master in pairs:
            view.register_post_accumulate_grad_hook(_collector(master))

    def with_masters(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the module with the masters in the place of their views, under each name of them."""
        master_of = {id(view): master for view, master in self.inner.pairs}
        named = self.module.named_parameters(remove_duplicate=False)
        return weights | {n: master_of[id(p)].detach() for n, p in named if id(p) in master_of and n in weights}

    @torch.no_grad()
    def take_masters(self, weights: Mapping[str, Tensor]) -> None:
        """Masters from a state dict with them, and the views anew."""
        for name, master in self.with_masters(dict(weights)).items():
            if master is not weights[name]:
                master.copy_(weights[name])
        self.inner.write_views()


def _collector(master: nn.Parameter) -> Any:
    """Adds a view's gradient to its master's in float32, so that micro-batches do not add up in bf16."""

    def collect(view: Tensor) -> None:
        assert view.grad is not None
        gradient = view.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        view.grad = None

    return collect
