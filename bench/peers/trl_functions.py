"""TRL's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from trl.trainer import utils

from bench.kernels.head_variants import Data, Step, token_loss

Inputs = dict[str, torch.Tensor]


def log_prob(d: Inputs, entropy: bool = False) -> Callable[[], Any]:
    """Log-probs of labels (and entropies) from logits."""
    function = utils.selective_log_softmax_and_entropy if entropy else utils.selective_log_softmax
    return lambda: function(d["logits"], d["labels"])


def head(d: Inputs) -> Callable[[], Any]:
    """All logits in the weight's dtype, then the selective log-softmax."""

    def loss(data: Data) -> torch.Tensor:
        logits = data.hidden @ data.weight.t()
        return token_loss(data, utils.selective_log_softmax(logits, data.labels).float()).sum()

    return Step(loss, d)
