"""vLLM's side of a weight update: its weight-transfer extension point, fed from an iterator in this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fastrl.rollout.vllm.direct import DirectLoad, Proof, plan_direct

WEIGHT_BACKEND = "fastrl"


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """The iterator is in this process: no address, no sizes."""


@dataclass
class Incoming(WeightTransferUpdateInfo):
    """One update."""

    weights: Iterable[tuple[str, Tensor]]


class IteratorTransfer(WeightTransferEngine[NothingToAgree, Incoming]):
    """vLLM's side of an update: checkpoint names out of an iterator, loaded layer by layer by vLLM, or by a plan."""

    init_info_cls = NothingToAgree
    update_info_cls = Incoming
    plan: DirectLoad | str | None = None  # None before the first update; a text says why there is none
    proof = Proof()

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Parameters become placeholders that remember how each is loaded, unless there is a plan."""
        if not isinstance(self.plan, DirectLoad):
            if self.device.type == "cpu":
                forget_packed_experts(self.model)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load everything that the iterator gives."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: Incoming) -> None:
        """Load everything that the iterator gives."""
        if isinstance(self.plan, DirectLoad):
            self.plan.load(update_info.weights)
            return
        self.proof = Proof(noting=self.plan is None)
        self.model.load_weights(self.proof.watched(update_info.weights))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Pack what is left into the layout of the kernels; make the plan for the updates to come."""
        if isinstance(self.plan, DirectLoad):
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.plan is None:
            self.plan = plan_direct(self.model, self.proof)

    def shutdown(self) -> None:
        """Nothing to release."""


def forget_packed_experts(model: nn.Module) -> None:
    """Experts on a CPU are packed when their kernel is made, and vLLM makes it once: make it anew."""
    for module in model.modules():
        if isinstance(module, UnquantizedFusedMoEMethod):
            module.moe_kernel = None


def register() -> None:
    """Make the transfer known to vLLM by its name, WEIGHT_BACKEND."""
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, IteratorTransfer)
