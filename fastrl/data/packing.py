"""Micro-batches of unique tokens: each prompt once, then its responses.

A micro-batch of one group, prompt [a b c], responses [x y] and [z], reads

    input_ids    a b c x          the last token of a response is no input: nothing is predicted from it
    position_ids 0 1 2 3
    segments     (0 3 | none) (3 4 | 0 3)
    head_index   2 3 | 2          the rows that predict x, y | z
    labels       x y | z

so U = P + sum(R_i - 1) rows go through the trunk and N = sum(R_i) rows through the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.data.batch import RolloutBatch
from fastrl.errors import DataError


class Segment(NamedTuple):
    """Rows [start, end) that read all keys of rows [prefix_start, prefix_end) and, causally, their own."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass computes. U input rows, N response tokens, K sequences, B bootstrap rows."""

    input_ids: Tensor  # [U] int64
    position_ids: Tensor  # [U] int64, restarts at each prompt; a response continues at its prompt's length
    segments: tuple[Segment, ...]  # cover the U rows in order; no empty ones
    head_index: Tensor  # [N] int64, the row that predicts each response token
    labels: Tensor  # [N] int64, the response tokens
    token_index: Tensor  # [N] int64, where each of them lies in the batch's [T]
    sequences: Tensor  # [K] int64, the sequences of the batch that are in here, in the order of their tokens
    bootstrap_index: Tensor  # [B] int64, the row after the last token of each sequence below
    bootstrap_sequence: Tensor  # [B] int64, sequences of the batch

    @property
    def num_rows(self) -> int:
        """U, the number of rows the trunk computes."""
        return self.input_ids.numel()

    @property
    def num_tokens(self) -> int:
        """N, the number of response tokens."""
        return self.labels.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The micro-batch with every tensor on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass
class _Piece:
    """Sequences of one group that share one copy of the prompt."""

    group: int
    sequences: list[int]
    num_rows: int


def pack(
    batch: RolloutBatch,
    sequences: Tensor | Sequence[int] | None = None,
    *,
    max_tokens: int,
    share_prompts: bool = True,
    extra_row: bool | Tensor = False,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` rows that cover each response token of the given sequences once.

    Groups stay whole when they fit and are split, with the prompt repeated in each piece, when they do not; a single
    sequence above the budget gets a micro-batch of its own. The result is a pure function of the arguments.

    Args:
        batch: the rollout; every prompt has at least one token.
        sequences: [K] indices into the batch, None takes all.
        max_tokens: budget of input rows U per micro-batch.
        share_prompts: compute each prompt once per group; False repeats it for each sequence.
        extra_row: ask for the row after the last token: of every given sequence (True) or of those marked in a
            bool tensor [S]. Their last token becomes an input, and `bootstrap_index` points at its row.

    Returns:
        micro-batches; sequences without tokens and without an extra row appear in none.

    Raises:
        DataError: a prompt without tokens.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: at least 1 row is needed")
    chosen = torch.arange(batch.num_sequences) if sequences is None else torch.as_tensor(sequences, dtype=torch.int64)
    table = _Table(batch, extra_row)
    pieces = _pieces(table, chosen.tolist(), max_tokens, share_prompts)
    device = batch.response_ids.device
    return [
        _micro_batch(batch, table, pieces_of_bin, share_prompts).to(device)
        for pieces_of_bin in _bins(pieces, max_tokens)
    ]


class _Table:
    """The batch's borders as Python integers, read from the device once."""

    def __init__(self, batch: RolloutBatch, extra_row: bool | Tensor) -> None:
        self.prompt_start: list[int] = batch.prompt_cu_seqlens.tolist()
        self.start: list[int] = batch.cu_seqlens.tolist()
        self.group: list[int] = batch.group_index.tolist()
        count = len(self.group)
        self.extra: list[bool] = extra_row.tolist() if isinstance(extra_row, Tensor) else [extra_row] * count
        if len(self.extra) != count:
            raise ValueError(f"extra_row has {len(self.extra)} entries for {count} sequences")

    def prompt_length(self, group: int) -> int:
        return self.prompt_start[group + 1] - self.prompt_start[group]

    def length(self, sequence: int) -> int:
        return self.start[sequence + 1] - self.start[sequence]

    def num_inputs(self, sequence: int) -> int:
        """Response tokens that are inputs: all but the last, or all where a row after the last is asked for."""
        return self.length(sequence) if self.extra[sequence] else max(self.length(sequence) - 1, 0)


def _pieces(table: _Table, sequences: list[int], max_tokens: int, share_prompts: bool) -> list[_Piece]:
    members: dict[int, list[int]] = {}
    for s in sequences:
        if table.length(s) or table.extra[s]:
            members.setdefault(table.group[s], []).append(s)
    pieces: list[_Piece] = []
    for group, group_sequences in members.items():
        prompt = table.prompt_length(group)
        if prompt == 0:
            raise DataError(
                f"prompt {group} of the batch has no tokens: its first response token has no row to come from"
            )
        current: _Piece | None = None
        for s in group_sequences:
            rows = table.num_inputs(s)
            if current is None or not share_prompts or current.num_rows + rows > max_tokens:
                current = _Piece(group, [], prompt)
                pieces.append(current)
            current.sequences.append(s)
            current.num_rows += rows
    return pieces


def _bins(pieces: list[_Piece], max_tokens: int) -> list[list[_Piece]]:
    """First fit, largest piece first (ties in order): few micro-batches, the same ones every time."""
    bins: list[list[_Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: -p.num_rows):
        for i, free in enumerate(room):
            if piece.num_rows <= free:
                bins[i].append(piece)
                room[i] -= piece.num_rows
                break
        else:
            bins.append([piece])
            room.append(max_tokens - piece.num_rows)
    return bins


def _micro_batch(batch: RolloutBatch, table: _Table, pieces: list[_Piece], share_prompts: bool) -> MicroBatch:
    num_prompt_ids = table.prompt_start[-1]
    source = _Runs()  # into [prompt_ids; response_ids]
    position, head, token = _Runs(), _Runs(), _Runs()
    segments: list[Segment] = []
    bootstrap: list[tuple[int, int]] = []
    row = 0
    for piece in pieces:
        prompt = table.prompt_length(piece.group)
        source.add(table.prompt_start[piece.group], prompt)
        position.add(0, prompt)
        prefix, row = row, row + prompt
        if share_prompts:
            segments.append(Segment(prefix, row))
        for s in piece.sequences:
            rows, length = table.num_inputs(s), table.length(s)
            source.add(num_prompt_ids + table.start[s], rows)
            position.add(prompt, rows)
            if not share_prompts:
                segments.append(Segment(prefix, row + rows))
            elif rows:
                segments.append(Segment(row, row + rows, prefix, prefix + prompt))
            if length:
                head.add(prefix + prompt - 1, 1)
                head.add(row, length - 1)
                token.add(table.start[s], length)
            if table.extra[s]:
                bootstrap.append((row + rows - 1 if length else prefix + prompt - 1, s))
            row += rows
    token_index = token.indices()
    response_ids = batch.response_ids.cpu()
    return MicroBatch(
        input_ids=torch.cat([batch.prompt_ids.cpu(), response_ids])[source.indices()],
        position_ids=position.indices(),
        segments=tuple(segments),
        head_index=head.indices(),
        labels=response_ids[token_index],
        token_index=token_index,
        sequences=torch.tensor([s for piece in pieces for s in piece.sequences], dtype=torch.int64),
        bootstrap_index=torch.tensor([r for r, _ in bootstrap], dtype=torch.int64),
        bootstrap_sequence=torch.tensor([s for _, s in bootstrap], dtype=torch.int64),
    )


class _Runs:
    """Runs of consecutive integers, expanded in one go."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def add(self, start: int, length: int) -> None:
        self.starts.append(start)
        self.lengths.append(length)

    def indices(self) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        offsets = torch.tensor(self.starts, dtype=torch.int64) - (lengths.cumsum(0) - lengths)
        return torch.repeat_interleave(offsets, lengths) + torch.arange(sum(self.lengths))


def plan_optimizer_batches(
    group_id: Tensor, *, num_updates: int, seed: int, all_group_id: Tensor | None = None
) -> list[Tensor]:
    """Split a rollout into optimizer batches by whole prompts, in a seeded order.

    Which batch a prompt falls in depends on (seed, the ids of all prompts) only, so every number of ranks makes the
    same batches. Sizes differ by at most one prompt.

    Args:
        group_id: [S] int64, prompt occurrence of each sequence of this rank.
        num_updates: optimizer batches wanted; more than there are prompts gives one per prompt.
        seed: order of the prompts, e.g. mixed from (run seed, step, epoch).
        all_group_id: ids [any] of the whole rollout, all ranks; None when `group_id` holds all of them.

    Returns:
        per optimizer batch the indices [K] int64 of this rank's sequences in it, ascending (empty where it has none).
    """
    if num_updates < 1:
        raise ValueError(f"num_updates = {num_updates}: at least 1 is needed")
    device = group_id.device
    prompts = torch.unique(group_id if all_group_id is None else all_group_id).cpu()
    generator = torch.Generator().manual_seed(seed)
    order = prompts[torch.randperm(prompts.numel(), generator=generator)]
    parts = torch.tensor_split(order, max(min(num_updates, order.numel()), 1))
    return [torch.isin(group_id, part.to(device)).nonzero().squeeze(1) for part in parts]
