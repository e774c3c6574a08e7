"""verl's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.utils import seqlen_balancing

from bench.kernels.head_variants import Data, Step, token_loss

Inputs = dict[str, torch.Tensor]


class Config:
    """What verl's loss reads of its configuration."""

    clip_ratio, clip_ratio_low, clip_ratio_high, global_batch_info = 0.2, 0.2, 0.2, {}

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def gae(d: Inputs, gamma: float, lam: float) -> Callable[[], Any]:
    """Whitened advantages and returns."""
    data = (d["rewards"], d["values"], d["mask"].float(), torch.tensor(gamma), torch.tensor(lam))
    return lambda: core_algos.compute_gae_advantage_return(*data)


def groups(d: Inputs, function: str = "compute_grpo_outcome_advantage") -> Callable[[], Any]:
    """Advantages [S, 1] of responses of one token, groups by name as verl has them."""
    index = np.array([f"prompt-{i}" for i in d["ids"].tolist()], dtype=object)
    rewards, mask = d["scores"][:, None], torch.ones(len(index), 1)
    return lambda: getattr(core_algos, function)(rewards, mask, index)[0].squeeze(1)


def policy_loss(d: Inputs, mode: str) -> Callable[[], Any]:
    """Loss and its gradient."""
    mask = d["mask"].float()

    def run() -> Any:
        x = d["log_prob"].detach().requires_grad_()
        loss = core_algos.compute_policy_loss_vanilla(d["old"], x, d["advantages"], mask, mode, Config())[0]
        loss.backward()
        return loss, x.grad

    return run


def value_loss(d: Inputs) -> Callable[[], Any]:
    """Loss and its gradient."""
    mask = d["mask"].float()

    def run() -> Any:
        x = d["log_prob"].detach().requires_grad_()
        loss = core_algos.compute_value_loss(x, d["advantages"], d["old"], mask, 0.5)[0]
        loss.backward()
        return loss, x.grad

    return run


def head_fused(d: Inputs) -> Callable[[], Any]:
    """The chunked head."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def loss(data: Data) -> torch.Tensor:
        return token_loss(data, FusedLinearForPPO()(data.hidden, data.weight, data.labels)[0].float()).sum()

    return Step(loss, d)


def head_logits(d: Inputs) -> Callable[[], Any]:
    """All logits, then verl's log-probs."""
    from verl.utils.torch_functional import logprobs_from_logits

    def loss(data: Data) -> torch.Tensor:
        logits = (data.hidden @ data.weight.t())[None]
        return token_loss(data, logprobs_from_logits(logits, data.labels[None])[0].float()).sum()

    return Step(loss, d)


def balance(d: Inputs, ranks: int) -> Callable[[], Any]:
    """The rank of each sequence, by total length."""
    lengths = (d["prompts"] + d["lengths"]).tolist()

    def run() -> torch.Tensor:
        parts = seqlen_balancing.get_seqlen_balanced_partitions(lengths, ranks, equal_size=False)
        owner = torch.empty(len(lengths), dtype=torch.int64)
        for rank, part in enumerate(parts):
            owner[part] = rank
        return owner

    return run


def micro_batches(d: Inputs, max_tokens: int) -> Callable[[], Any]:
    """The micro-batch of each sequence."""
    from tensordict import TensorDict

    total = d["prompts"] + d["lengths"]
    mask = (torch.arange(int(total.max()))[None] < total[:, None]).long()
    batch = TensorDict({"input_ids": torch.zeros_like(mask), "attention_mask": mask}, batch_size=[len(total)])

    def run() -> torch.Tensor:
        parts = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=max_tokens)[1]
        owner = torch.empty(len(total), dtype=torch.int64)
        for number, part in enumerate(parts):
            owner[part] = number
        return owner

    return run
