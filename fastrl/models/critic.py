"""A value model: the trunk of a causal LM with a scalar head that starts at zero."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastrl.models.head import trunk
from fastrl.models.load import load_model


class ValueModel(nn.Module):
    """V_t = value_head(h_{t-1}), with h the trunk's last hidden rows. The head has no bias; all values start at 0."""

    base_model_prefix = "backbone"  # where `fastrl.models.head.trunk` looks

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        first = next(backbone.parameters())
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=first.dtype, device=first.device)
        nn.init.zeros_(self.value_head.weight)


def load_critic(path: str, **options: Any) -> ValueModel:
    """The trunk of the causal LM at `path` (options as for `load_model`) under a zero value head."""
    model = load_model(path, **options)
    backbone = trunk(model)
    hidden_size = int(model.config.get_text_config().hidden_size)
    critic = ValueModel(backbone, hidden_size)
    return critic.train(model.training)
