"""Which implementation runs: Triton for GPU tensors, the torch reference for the rest; and how an op is registered.

`FASTRL_KERNELS=reference|triton` forces one. Forcing Triton on CPU tensors needs `TRITON_INTERPRET=1`. Tensors in
float64 always take the reference: the kernels accumulate in float32, and a float64 caller wants float64.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

CHOICES = ("auto", "reference", "triton")


@functools.cache
def has_triton() -> bool:
    """True when Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True when Triton kernels run in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def forced() -> str | None:
    """`reference` or `triton` where `FASTRL_KERNELS` says so."""
    choice = os.environ.get("FASTRL_KERNELS") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"FASTRL_KERNELS = {choice!r}: use one of {', '.join(CHOICES)}")
    return None if choice == "auto" else choice


def use_triton(tensors: Iterable[torch.Tensor | None]) -> bool:
    """True when the Triton kernel is to run on these tensors.

    Raises:
        ValueError: `FASTRL_KERNELS` is no known choice.
        RuntimeError: Triton is forced where it cannot run.
    """
    choice = forced()
    if choice == "reference":
        return False
    given = [t for t in tensors if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return False
    on_gpu = any(t.device.type == "cuda" for t in given)
    if choice is None:
        return on_gpu and has_triton()
    if not has_triton():
        raise RuntimeError("FASTRL_KERNELS = 'triton', but Triton is not installed: pip install triton, or unset it")
    if not on_gpu and not interpreting():
        raise RuntimeError(
            "FASTRL_KERNELS = 'triton' on CPU tensors needs TRITON_INTERPRET=1 (set before Python starts)"
        )
    return True


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


@functools.cache
def _resolve(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


class Op:
    """A custom op that is called directly where torch need not know that it is one.

    Torch's way into a custom op costs about 15 microseconds, more than small calls take. On plain CPU tensors, with
    nothing to differentiate and nobody tracing, the implementation is called itself.
    """

    def __init__(self, registered: Any, run: Callable[..., Any], on_cpu: Callable[..., Any]) -> None:
        self._registered, self._run, self._on_cpu = registered, run, on_cpu

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain(args):
            return self._registered(*args)
        return self._on_cpu(*args) if forced() is None else self._run(*args)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """As of `torch.library.custom_op`."""
        self._registered.register_autograd(backward, setup_context=setup_context)


def _is_plain(args: Sequence[Any]) -> bool:
    """True for CPU tensors that are no subclass and need no gradient, outside modes, transforms and tracing."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    grad = torch.is_grad_enabled()
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if type(arg) not in _PLAIN or not arg.is_cpu or (grad and arg.requires_grad):
                return False
        elif isinstance(arg, (list, tuple)) and not _is_plain(arg):
            return False
    return True


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def define_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    kernel: str,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    mutates_args: Sequence[str] = (),
) -> Op:
    """Register the custom op `fastrl::name`, which picks its implementation each time it is called.

    Args:
        name: op name.
        schema: argument and result types, `"(Tensor x, float y) -> Tensor"`; all arguments positional.
        reference: the torch implementation, on any device.
        cpu: a faster one for CPU tensors, if there is one; `FASTRL_KERNELS=reference` passes it by.
        kernel: `"package.module:function"` of the Triton wrapper with the same arguments, imported at first use.
        fake: gives empty results of the right shapes (fake tensors, `torch.compile`).
        mutates_args: names of arguments that are written.

    Returns:
        the op, callable, with `register_autograd`.
    """

    def run(*args: Any) -> Any:
        tensors = list(_tensors(args))
        if use_triton(tensors):
            return _resolve(kernel)(*args)
        if cpu is not None and forced() is None and all(t.is_cpu for t in tensors):
            return cpu(*args)
        return reference(*args)

    run.__name__ = name
    registered = torch.library.custom_op(f"fastrl::{name}", run, mutates_args=mutates_args, schema=schema)
    registered.register_fake(fake)
    return Op(registered, run, cpu or reference)


def refuse_double_backward(op: Any, public_name: str) -> None:
    """Make a second derivative through `op` (a backward op) an error that says so, never a wrong number."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{public_name}: the second derivative is not available; call backward without create_graph")

    op.register_autograd(backward)


@contextlib.contextmanager
def on_device_of(tensor: torch.Tensor) -> Iterator[None]:
    """Make the tensor's GPU current (Triton launches on the current one); nothing on a CPU."""
    if tensor.device.type == "cuda":
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield


def accumulate_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 when a tensor is float64, else float32: the dtype of sums and results."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
