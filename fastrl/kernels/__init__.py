"""The kernel layer: token-level RL arithmetic as custom ops, Triton on a GPU and vectorised torch on a CPU.

Importable alone (torch and Triton only). Every function lives in the folder of its name and is loaded at first use::

    from fastrl.kernels import gae, group_normalize, linear_token_loss

`FASTRL_KERNELS=reference|triton` forces one implementation; by default the device of the tensors decides.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aggregation import aggregate, aggregation_scale
    from .clipped_policy_loss import PolicyLoss, clipped_policy_loss
    from .clipped_value_loss import ValueLoss, clipped_value_loss
    from .discounted_returns import discounted_returns
    from .gae import gae
    from .group_normalize import group_normalize
    from .kl_divergence import kl_divergence
    from .linear_log_prob import linear_log_prob
    from .linear_token_loss import linear_token_loss
    from .log_prob import LogProbs, log_prob
    from .logits_token_loss import logits_token_loss
    from .masked_stats import MaskedStats, masked_stats
    from .mismatch_stats import MismatchStats, mismatch_stats
    from .pack_weights import pack_weights
    from .whiten import whiten

# public name -> the folder that defines it
_FOLDER = {
    "LogProbs": "log_prob",
    "MaskedStats": "masked_stats",
    "MismatchStats": "mismatch_stats",
    "PolicyLoss": "clipped_policy_loss",
    "ValueLoss": "clipped_value_loss",
    "aggregate": "aggregation",
    "aggregation_scale": "aggregation",
    "clipped_policy_loss": "clipped_policy_loss",
    "clipped_value_loss": "clipped_value_loss",
    "discounted_returns": "discounted_returns",
    "gae": "gae",
    "group_normalize": "group_normalize",
    "kl_divergence": "kl_divergence",
    "linear_log_prob": "linear_log_prob",
    "linear_token_loss": "linear_token_loss",
    "log_prob": "log_prob",
    "logits_token_loss": "logits_token_loss",
    "masked_stats": "masked_stats",
    "mismatch_stats": "mismatch_stats",
    "pack_weights": "pack_weights",
    "whiten": "whiten",
}

__all__ = [
    "LogProbs",
    "MaskedStats",
    "MismatchStats",
    "PolicyLoss",
    "ValueLoss",
    "aggregate",
    "aggregation_scale",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discounted_returns",
    "gae",
    "group_normalize",
    "kl_divergence",
    "linear_log_prob",
    "linear_token_loss",
    "log_prob",
    "logits_token_loss",
    "masked_stats",
    "mismatch_stats",
    "pack_weights",
    "whiten",
]


class _Package(types.ModuleType):
    """A package whose attribute `gae` is the function, although a folder of that name is imported into it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _FOLDER.get(name) == name:
            value = getattr(value, name)  # the import system binds the folder here; its function is what users want
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    folder = _FOLDER.get(name)
    if folder is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{folder}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


sys.modules[__name__].__class__ = _Package
