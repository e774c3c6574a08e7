"""The ragged batch: S sequences, T response tokens, G groups (prompt occurrences). Nothing is padded.

Index t of every `[T]` field is the token that was *sampled* at t. Stages add fields with `with_`; asking for one
that no stage has made yet is an error at the line that forgot it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class FinishReason(IntEnum):
    """Why generation of a sample ended; stored as int8."""

    stop = 0  # an end-of-sequence id or a stop string
    length = 1  # the token limit
    abort = 2  # given up by the engine


@dataclass(frozen=True)
class RolloutBatch:
    """What one rank holds of a step's rollout. Shapes: S sequences, T response tokens, G groups, P prompt tokens.

    Example of one group of two samples, prompt [7 8 9], responses [1 2] and [3]:
    prompt_ids [7 8 9], prompt_cu_seqlens [0 3], response_ids [1 2 3], cu_seqlens [0 2 3], group_index [0 0].
    """

    prompt_ids: Tensor  # [P] int64, the prompts of all groups, one after another
    prompt_cu_seqlens: Tensor  # [G+1] int64
    response_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64, borders of the responses
    group_index: Tensor  # [S] int64, which local prompt (0..G-1) a sequence answers
    group_id: Tensor  # [S] int64, one per prompt occurrence, unique over the whole rollout batch, all ranks
    sample_id: Tensor  # [S] int64, unique over the whole rollout batch: group_id * samples per prompt + index
    finish_reason: Tensor  # [S] int8, FinishReason
    policy_version: Tensor  # [S] int64, weight updates the engine had seen
    response_mask: Tensor  # [T] bool, True = sampled by the policy
    rollout_log_prob: Tensor | None = None  # [T] float, log-prob under the distribution that was sampled from
    scores: Tensor | None = None  # [S] float, the outcome reward after weights and shaping
    valid: Tensor | None = None  # [S] bool, False = unscorable: leaves baselines and loss
    components: dict[str, Tensor] | None = None  # name -> [S] float, NaN = abstained
    loss_mask: Tensor | None = None  # [T] bool, subset of response_mask after rejections and filters
    token_level_scores: Tensor | None = (
        None  # [T] float, rewards of single tokens; with the score on the last sampled one
    )
    token_level_rewards: Tensor | None = None  # [T] float, scores minus KL in reward
    old_log_prob: Tensor | None = None  # [T] float, trainer before the first update on this batch
    old_entropy: Tensor | None = None  # [T] float
    sum_sq: Tensor | None = None  # [T] float, sum of squared probabilities under the old policy
    ref_log_prob: Tensor | None = None  # [T] float, reference model
    ref_kl: Tensor | None = None  # [T] float, KL of the old policy to the reference over the vocabulary
    values: Tensor | None = None  # [T] float, critic before its update (old_values of the value loss)
    bootstrap_values: Tensor | None = None  # [S] float, value of the state after the last token
    greedy_scores: Tensor | None = None  # [S] float, score of the greedy sample of the same prompt
    advantages: Tensor | None = None  # [T] float
    returns: Tensor | None = None  # [T] float
    rollout_weight: Tensor | None = None  # [T] float, detached correction weight

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.response_ids.numel()

    @property
    def num_groups(self) -> int:
        return self.prompt_cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Response lengths [S] in tokens."""
        return self.cu_seqlens.diff()

    @property
    def prompt_lengths(self) -> Tensor:
        """Prompt lengths [G] in tokens."""
        return self.prompt_cu_seqlens.diff()

    @property
    def sequence_index(self) -> Tensor:
        """For each token [T], the sequence (0..S-1) it belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.cu_seqlens.device), self.lengths)

    def need(self, name: str) -> Tensor:
        """The field `name`; raises AttributeError that says which stage is missing when it is None."""
        value = getattr(self, name)
        if value is None:
            raise AttributeError(f"batch.{name} has not been computed: the stage that makes it did not run")
        return value

    def with_(self, **new: Any) -> RolloutBatch:
        """A copy with more fields filled in."""
        return replace(self, **new)

    def select(self, sequences: Tensor) -> RolloutBatch:
        """The batch of the given sequences [K] int64, in that order; all fields follow, unused prompts are left out."""
        groups, group_index = torch.unique(self.group_index[sequences], return_inverse=True)
        token_index = ragged_index(self.cu_seqlens, sequences)
        prompt_index = ragged_index(self.prompt_cu_seqlens, groups)
        new: dict[str, Any] = {
            "group_index": group_index,
            "cu_seqlens": cu_seqlens_of(self.lengths[sequences]),
            "prompt_cu_seqlens": cu_seqlens_of(self.prompt_lengths[groups]),
            "prompt_ids": self.prompt_ids[prompt_index],
        }
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in new or value is None:
                continue
            if f.name == "components":
                new[f.name] = {k: v[sequences] for k, v in value.items()}
            else:
                new[f.name] = value[sequences] if f.name in SEQUENCE_FIELDS else value[token_index]
        return replace(self, **new)

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The batch with every tensor on `device`."""

        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: v.to(device) for k, v in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(self, **{f.name: move(getattr(self, f.name)) for f in fields(self)})


SEQUENCE_FIELDS = frozenset(
    ["group_id", "sample_id", "finish_reason", "policy_version", "scores", "valid", "bootstrap_values", "greedy_scores"]
)  # the [S] fields; all others but the prompts are [T]


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """One batch of all sequences, batch after batch; the same fields in each, and each keeps its own prompts."""
    first = batches[0]
    new: dict[str, Any] = {
        "cu_seqlens": cu_seqlens_of(torch.cat([b.lengths for b in batches])),
        "prompt_cu_seqlens": cu_seqlens_of(torch.cat([b.prompt_lengths for b in batches])),
    }
    for f in fields(first):
        value = getattr(first, f.name)
        if f.name in (*new, "group_index") or value is None:
            continue
        if isinstance(value, dict):
            new[f.name] = {k: torch.cat([getattr(b, f.name)[k] for b in batches]) for k in value}
        else:
            new[f.name] = torch.cat([getattr(b, f.name) for b in batches])
    before = 0
    shifted = []
    for b in batches:
        shifted.append(b.group_index + before)
        before += b.num_groups
    return replace(first, **new, group_index=torch.cat(shifted))


def cu_seqlens_of(lengths: Tensor) -> Tensor:
    """Lengths [S] -> borders [S+1] int64: 0 and the cumulative sum."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def ragged_index(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """Positions of the tokens of `rows` [K], row after row, in the flat layout described by `cu_seqlens`."""
    starts, lengths = cu_seqlens[:-1][rows], cu_seqlens.diff()[rows]
    total = int(lengths.sum())
    shift = torch.repeat_interleave(starts - cu_seqlens_of(lengths)[:-1], lengths, output_size=total)
    return shift + torch.arange(total, device=cu_seqlens.device)
