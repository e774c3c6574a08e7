"""The training pass of one rollout, idea by idea: each rung is the one before it and one thing more.

    padded          one right-padded batch, head on every position, all logits, an old-log-prob pass before the update
    ragged          no padding: the sequences one after another, prompts repeated
    response rows   the head only on the rows that predict a response token
    in forward      the head's gradient made in the forward, in chunks: no logits are kept
    shared prompts  what sequences have in common is computed once
    no old pass     one update per rollout needs no old log-probs: the ratio is 1

Loss and every parameter's gradient must stay what they are in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.models.packed_forward import packed_rows
from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import MicroBatch, pack
from fastrl.kernels import linear_log_prob, linear_token_loss
from fastrl.models.forward import hidden_rows, trunk_rows
from fastrl.models.head import head_of, trunk
from fastrl.trainer.precision import autocast


def token_loss(value: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """max(-A r, -A clip(r, 0.8, 1.2)) / T for the tokens of a batch of T."""
    ratio = (value - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


@dataclass
class Padded:
    """A right-padded batch: ids and mask [S, L], and where the response tokens' predictions are."""

    ids: Tensor
    mask: Tensor
    rows: Tensor  # [T] positions in the flattened [S, L]
    labels: Tensor  # [T]

    @staticmethod
    def of(batch: RolloutBatch) -> Padded:
        """From a rollout, on its device."""
        device = batch.response_ids.device
        batch = batch.to("cpu")
        prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
        responses = batch.response_ids.split(batch.lengths.tolist())
        sequences = [torch.cat([prompts[g], r]) for g, r in zip(batch.group_index.tolist(), responses)]
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths = torch.tensor([len(s) for s in sequences])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        rows = [
            i * ids.shape[1] + torch.arange(len(s) - len(r) - 1, len(s) - 1)
            for i, (s, r) in enumerate(zip(sequences, responses))
        ]
        return Padded(*(x.to(device) for x in (ids, mask, torch.cat(rows), batch.response_ids)))

    def log_prob(self, model: PreTrainedModel) -> Tensor:
        """[T], all logits made."""
        hidden = trunk(model)(input_ids=self.ids, attention_mask=self.mask, use_cache=False).last_hidden_state
        return all_logits(model, hidden.flatten(0, 1), self.rows, self.labels)


def all_logits(model: PreTrainedModel, hidden: Tensor, rows: Tensor | None, labels: Tensor) -> Tensor:
    """Log-probs [T] of labels out of the logits of every hidden row."""
    table = torch.log_softmax(hidden @ head_of(model).weight.t(), -1)
    return table[torch.arange(len(labels), device=labels.device) if rows is None else rows, labels]


def ragged_log_prob(model: PreTrainedModel, micro: MicroBatch, response_rows: bool) -> Tensor:
    """[T] in the batch's order, logits of all rows or of those that predict a response token."""
    if response_rows:
        rows = packed_rows(model, micro)  # in the batch's order
        labels = torch.empty_like(micro.labels).index_copy(0, micro.token_index, micro.labels)
        return all_logits(model, rows, None, labels)
    value = all_logits(model, trunk_rows(model, micro), micro.head_index, micro.labels)
    return torch.empty_like(value).index_copy(0, micro.token_index, value)


class Rungs:
    """The training pass on one rollout in each of the ways; a call gives the loss and all gradients.

    Args:
        plain: the model as transformers runs it; model: the same weights with fastrl's attention.
        advantages: [T], in the batch's order.
        dtype: bfloat16 computes under autocast.
    """

    def __init__(
        self,
        plain: PreTrainedModel,
        model: PreTrainedModel,
        batch: RolloutBatch,
        advantages: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plain, self.model, self.batch, self.advantages = plain, model, batch, advantages
        self.cast = partial(autocast, dtype, advantages.device)
        self.padded = Padded.of(batch)
        self.repeated = pack(batch, max_tokens=10**9, share_prompts=False)[0]
        self.shared = pack(batch, max_tokens=10**9)[0]

    def with_old_pass(self, owner: PreTrainedModel, log_prob: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        """Old log-probs without gradient, then the update's forward and backward."""

        def run() -> list[Tensor]:
            owner.zero_grad()
            with torch.no_grad(), self.cast():
                old = log_prob()
            with self.cast():
                value = log_prob()
            loss = token_loss(value, old, self.advantages).sum() / old.numel()
            loss.backward()
            return gradients(owner, loss)

        return run

    def in_forward(self, micro: MicroBatch, old_pass: bool) -> Callable[[], list[Tensor]]:
        """The head's gradient made in the forward; without an old pass the log-probs are their own old ones."""
        weight = head_of(self.model).weight
        advantages = self.advantages[micro.token_index]

        def run() -> list[Tensor]:
            self.model.zero_grad()
            old = None
            if old_pass:
                with torch.no_grad():
                    old = linear_log_prob(self.rows(micro), weight, micro.labels).log_prob

            def loss_of(value: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
                before = value.detach() if old is None else old[rows]
                return token_loss(value, before, advantages[rows]) / micro.num_tokens

            loss = linear_token_loss(self.rows(micro), weight, micro.labels, loss_of)[0]
            loss.backward()
            return gradients(self.model, loss)

        return run

    def rows(self, micro: MicroBatch) -> Tensor:
        """Hidden rows in the micro-batch's order."""
        with self.cast():
            return hidden_rows(self.model, micro)

    def all(self) -> dict[str, tuple[Callable[[], list[Tensor]], int, int]]:
        """name -> (call, rows of the trunk, rows of the head), both passes counted."""
        padded, tokens = self.padded.ids.numel(), self.batch.num_tokens
        repeated, shared = self.repeated.num_rows, self.shared.num_rows
        return {
            "padded": (
                self.with_old_pass(self.plain, lambda: self.padded.log_prob(self.plain)), 2 * padded, 2 * padded,
            ),
            "+ ragged": (
                self.with_old_pass(self.model, lambda: ragged_log_prob(self.model, self.repeated, False)),
                2 * repeated, 2 * repeated,
            ),
            "+ response rows": (
                self.with_old_pass(self.model, lambda: ragged_log_prob(self.model, self.repeated, True)),
                2 * repeated, 2 * tokens,
            ),
            "+ in forward": (self.in_forward(self.repeated, True), 2 * repeated, 2 * tokens),
            "+ shared prompts": (self.in_forward(self.shared, True), 2 * shared, 2 * tokens),
            "fastrl: + no old pass": (self.in_forward(self.shared, False), shared, tokens),
        }  # fmt: skip


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    """The loss and the gradient of every parameter, by name."""
    named = sorted(model.named_parameters(), key=lambda item: item[0])
    return [loss.detach(), *(p.grad for _, p in named if p.grad is not None)]
