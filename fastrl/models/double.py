"""float64 models stay float64: library layers that go through float32 on the way (norms, softmax) are kept from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAXES = (nn.functional.softmax, torch.softmax, Tensor.softmax)


class KeepDouble(TorchFunctionMode):
    """Inside, casting a float64 tensor to float32 gives it back as it is, and a softmax of one is float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is Tensor.to and args[0].dtype == torch.float64 and torch.float32 in (*args[1:], kwargs.get("dtype")):
            args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        if func in _SOFTMAXES and args[0].dtype == torch.float64 and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def keep_double(model: nn.Module) -> AbstractContextManager[Any]:
    """The mode for a model whose parameters are float64; nothing for others."""
    first = next(model.parameters(), None)
    return KeepDouble() if first is not None and first.dtype == torch.float64 else contextlib.nullcontext()
