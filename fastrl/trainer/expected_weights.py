"""What an engine expects to be given, from the model's configuration alone: no weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fastrl.dist.weight_source import ModelSource
from fastrl.errors import WeightError


class ExpectedWeights:
    """The weights of a model as the trainer names them, and as its checkpoint does.

    The two differ where the library that trains keeps tensors of a checkpoint as one: all experts of a layer are
    `mlp.experts.gate_up_proj` [experts, 2 I, H] in the trainer, and `mlp.experts.7.gate_proj.weight` [I, H] in the
    checkpoint, which is what engines load.

    Args:
        path: folder or hub name of the model the engine was started with.
        dtype: type of the engine's float tensors.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
    """

    def __init__(
        self, path: str, dtype: torch.dtype, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> None:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        self.model.tie_weights()
        source = ModelSource(self.model, dtype, tied=True)
        self.specs = source.specs(source.entries())
        self.renamed = self._renamed()

    def checkpoint(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The trainer's tensors under the names, and in the pieces, of the model's checkpoint."""
        for name, tensor in weights:
            if name in self.renamed:
                yield from self._reverted({name: tensor}).items()
            else:
                yield name, tensor

    def _renamed(self) -> frozenset[str]:
        """Tensors whose checkpoint names are others.

        Raises:
            WeightError: a checkpoint tensor is put together from several, which cannot be done one by one.
        """
        own = {s.name: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self.specs}
        together = {name: tensor.shape for name, tensor in self._reverted(own).items()}
        single, changed = dict[str, Any](), set()
        for name, tensor in own.items():
            found = {n: t.shape for n, t in self._reverted({name: tensor}).items()}
            single |= found
            if found != {name: tensor.shape}:
                changed.add(name)
        if single != together:
            odd = min(together.items() ^ single.items(), key=str)[0]
            raise WeightError(
                f"{odd}: this tensor of the checkpoint is made of several of the trainer's, which an engine process "
                "cannot be given: use rollout.engine = native"
            )
        return frozenset(changed)

    def _reverted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self.model, state))
