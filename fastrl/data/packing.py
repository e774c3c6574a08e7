"""Micro-batches of unique tokens: what several sequences have in common from their start is computed once.

A hidden row depends on the tokens up to its own and on nothing else, so the rows of a micro-batch are the nodes of the
prefix tree of its sequences: a prompt once per group, a system prompt once for all groups, responses that begin alike
once as far as they agree. One group, prompt [a b c], responses [x y w] and [x z], reads

    input_ids    a b c x y        the last token of a response is no input: nothing is predicted from it
    position_ids 0 1 2 3 4
    segments     [0 5)            the second response adds no row
    head_index   2 3 4 | 2 3      the rows that predict x, y, w | x, z
    labels       x y w | x z

so at most U = P + sum(R_i - 1) rows go through the trunk and N = sum(R_i) rows through the head. The gradient is the
same to rounding: a shared row's is the sum of its readers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastrl.data.batch import RolloutBatch
from fastrl.errors import DataError


class Segment(NamedTuple):
    """Rows [start, end) that read, causally, their own keys and before them all keys of the rows in `prefix`.

    `prefix` are ranges of earlier rows in the order of their positions, from position 0 on without gaps.
    """

    start: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass computes. U input rows, N response tokens, K sequences, B bootstrap rows."""

    input_ids: Tensor  # [U] int64
    position_ids: Tensor  # [U] int64, of the token in its sequence; a response continues at its prompt's length
    segments: tuple[Segment, ...]  # cover the U rows in order; no empty ones
    head_index: Tensor  # [N] int64, the row that predicts each response token
    labels: Tensor  # [N] int64, the response tokens
    token_index: Tensor  # [N] int64, where each of them lies in the batch's [T]
    sequences: Tensor  # [K] int64, the sequences of the batch that are in here; tokens stand in this order
    bootstrap_index: Tensor  # [B] int64, the row after the last token of each sequence below
    bootstrap_sequence: Tensor  # [B] int64, sequences of the batch

    @property
    def num_rows(self) -> int:
        """U, the number of rows the trunk computes."""
        return self.input_ids.numel()

    @property
    def num_keys(self) -> int:
        """Keys that all rows read together: a row at position p of its sequence reads p + 1."""
        total = 0
        for start, end, prefix in self.segments:
            rows, before = end - start, sum(b - a for a, b in prefix)
            total += rows * before + rows * (rows + 1) // 2
        return total

    @property
    def num_tokens(self) -> int:
        """N, the number of response tokens."""
        return self.labels.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The micro-batch with every tensor on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


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
        share_prompts: compute what sequences have in common from their start once; False repeats it for each.
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
    device = batch.response_ids.device
    bins = _bins(_pieces(table, chosen.tolist(), max_tokens, share_prompts), table, max_tokens, share_prompts)
    return [_micro_batch(table, members, share_prompts).to(device) for members in bins]


class _Table:
    """The batch as NumPy arrays, read from the device once."""

    def __init__(self, batch: RolloutBatch, extra_row: bool | Tensor) -> None:
        self.prompt_ids, self.response_ids = batch.prompt_ids.cpu().numpy(), batch.response_ids.cpu().numpy()
        self.prompt_start: list[int] = batch.prompt_cu_seqlens.tolist()
        self.start: list[int] = batch.cu_seqlens.tolist()
        self.group: list[int] = batch.group_index.tolist()
        count = len(self.group)
        self.extra: list[bool] = extra_row.tolist() if isinstance(extra_row, Tensor) else [extra_row] * count
        if len(self.extra) != count:
            raise ValueError(f"extra_row has {len(self.extra)} entries for {count} sequences")

    def prompt(self, group: int) -> np.ndarray:
        return self.prompt_ids[self.prompt_start[group] : self.prompt_start[group + 1]]

    def length(self, sequence: int) -> int:
        return self.start[sequence + 1] - self.start[sequence]

    def inputs(self, sequence: int) -> np.ndarray:
        """Prompt and response but for the last token, or with it where a row after the last is asked for."""
        end = self.start[sequence + 1] - (0 if self.extra[sequence] or not self.length(sequence) else 1)
        return np.concatenate([self.prompt(self.group[sequence]), self.response_ids[self.start[sequence] : end]])


@dataclass
class _Piece:
    """Sequences of one group, in the order of their tokens."""

    group: int
    sequences: list[int]
    num_rows: int


def _in_order(table: _Table, sequences: list[int]) -> list[tuple[int, np.ndarray]]:
    """(sequence, its inputs), sorted by their tokens, ties by sequence: what agrees at the start stands together."""
    found = [(s, table.inputs(s)) for s in sequences]
    return sorted(found, key=lambda item: (item[1].astype(">i8").tobytes(), item[0]))


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens that a and b have in common from the start."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def _pieces(table: _Table, sequences: list[int], max_tokens: int, share: bool) -> list[_Piece]:
    """Groups, cut where the rows of one pass the budget."""
    members: dict[int, list[int]] = {}
    for s in sequences:
        if table.length(s) or table.extra[s]:
            members.setdefault(table.group[s], []).append(s)
    pieces: list[_Piece] = []
    for group, group_sequences in members.items():
        if not len(table.prompt(group)):
            raise DataError(f"prompt {group} of the batch has no tokens: its response has no row to begin from")
        current: _Piece | None = None
        before = np.zeros(0, np.int64)
        for s, inputs in _in_order(table, group_sequences):
            new = len(inputs) - _common_length(before, inputs)
            if current is None or not share or current.num_rows + new > max_tokens:
                current, new = _Piece(group, [], 0), len(inputs)
                pieces.append(current)
            current.sequences.append(s)
            current.num_rows += new
            before = inputs
    return pieces


def _bins(pieces: list[_Piece], table: _Table, max_tokens: int, share: bool) -> list[list[int]]:
    """Sequences per micro-batch: first fit, largest piece first (ties in order), the same every time."""
    bins: list[list[_Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: -p.num_rows):
        prompt = table.prompt(piece.group)
        for i, free in enumerate(room):
            if piece.num_rows - (len(prompt) if share else 0) > free:
                continue
            shared = max((_common_length(table.prompt(p.group), prompt) for p in bins[i]), default=0) if share else 0
            if piece.num_rows - shared <= free:
                bins[i].append(piece)
                room[i] -= piece.num_rows - shared
                break
        else:
            bins.append([piece])
            room.append(max_tokens - piece.num_rows)
    return [[s for piece in members for s in piece.sequences] for members in bins]


def _micro_batch(table: _Table, sequences: list[int], share: bool) -> MicroBatch:
    tree = _PrefixTree(share)
    head, tokens, order, bootstrap = [], [], [], []
    for s, inputs in _in_order(table, sequences):
        rows = tree.add(inputs)
        prompt, length = len(table.prompt(table.group[s])), table.length(s)
        head.append(rows[prompt - 1 : prompt - 1 + length])
        tokens.append(np.arange(table.start[s], table.start[s] + length))
        order.append(s)
        if table.extra[s]:
            bootstrap.append((int(rows[-1]), s))
    token_index = np.concatenate(tokens)
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(tree.input_ids)),
        position_ids=torch.from_numpy(np.concatenate(tree.position_ids)),
        segments=tuple(tree.segments),
        head_index=torch.from_numpy(np.concatenate(head)),
        labels=torch.from_numpy(table.response_ids[token_index]),
        token_index=torch.from_numpy(token_index),
        sequences=torch.tensor(order, dtype=torch.int64),
        bootstrap_index=torch.tensor([row for row, _ in bootstrap], dtype=torch.int64),
        bootstrap_sequence=torch.tensor([s for _, s in bootstrap], dtype=torch.int64),
    )


class _PrefixTree:
    """Rows of sequences that come sorted: each adds what it does not share with the one before it."""

    def __init__(self, share: bool) -> None:
        self.share = share
        self.num_rows = 0
        self.segments: list[Segment] = []
        self.input_ids: list[np.ndarray] = []
        self.position_ids: list[np.ndarray] = []
        self._last = np.zeros(0, np.int64)
        self._path: list[tuple[int, int]] = []  # ranges of rows of the last sequence, in order

    def add(self, inputs: np.ndarray) -> np.ndarray:
        """The row of each token [len(inputs)]."""
        shared = _common_length(self._last, inputs) if self.share else 0
        path, left = [], shared
        for start, end in self._path:
            if left:
                path.append((start, min(end, start + left)))
                left -= path[-1][1] - start
        if new := len(inputs) - shared:
            first = self.num_rows
            self.num_rows += new
            self.segments.append(Segment(first, self.num_rows, tuple(path)))
            self.input_ids.append(inputs[shared:])
            self.position_ids.append(np.arange(shared, len(inputs)))
            if path and path[-1][1] == first:
                first = path.pop()[0]  # ranges stay as long as they can be
            path.append((first, self.num_rows))
        self._last, self._path = inputs, path
        return np.concatenate([np.arange(start, end) for start, end in path])


def empty_micro_batch(device: torch.device | str) -> MicroBatch:
    """A micro-batch of no rows: a rank with less to do takes it through the model while the others work."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=none,
        position_ids=none,
        segments=(),
        head_index=none,
        labels=none,
        token_index=none,
        sequences=none,
        bootstrap_index=none,
        bootstrap_sequence=none,
    )


def fill_up(micro_batches: list[MicroBatch], count: int, device: torch.device | str) -> list[MicroBatch]:
    """The micro-batches with empty ones behind them, `count` in all: ranks take the same number of passes."""
    return micro_batches + [empty_micro_batch(device) for _ in range(count - len(micro_batches))]


def keep_tokens(micro: MicroBatch, chosen: Tensor) -> MicroBatch | None:
    """The micro-batch of the head rows in `chosen` [N] bool and of the trunk rows that they read; None when none is.

    What a sequence outside shares with one inside stays; everything else of it is computed no more.
    """
    head_index = micro.head_index[chosen]
    if not head_index.numel() and not micro.bootstrap_index.numel():
        return None
    wanted = np.zeros(micro.num_rows, bool)
    wanted[torch.cat([head_index, micro.bootstrap_index]).cpu().numpy()] = True
    for segment in reversed(micro.segments):  # a wanted row wants those before it, in its segment and its prefix
        found = np.flatnonzero(wanted[segment.start : segment.end])
        if found.size:
            wanted[segment.start : segment.start + int(found[-1])] = True
            for first, end in segment.prefix:
                wanted[first:end] = True
    if wanted.all():
        return replace(micro, head_index=head_index, labels=micro.labels[chosen], token_index=micro.token_index[chosen])
    new_row = wanted.cumsum() - 1  # of each wanted row
    segments = []
    for start, end, prefix in micro.segments:
        if count := int(wanted[start:end].sum()):
            ranges = tuple((int(new_row[a]), int(new_row[b - 1]) + 1) for a, b in prefix)
            segments.append(Segment(int(new_row[start]), int(new_row[start]) + count, ranges))
    device = micro.input_ids.device
    rows, renumber = torch.from_numpy(np.flatnonzero(wanted)).to(device), torch.from_numpy(new_row).to(device)
    return replace(
        micro,
        input_ids=micro.input_ids[rows],
        position_ids=micro.position_ids[rows],
        segments=tuple(segments),
        head_index=renumber[head_index],
        labels=micro.labels[chosen],
        token_index=micro.token_index[chosen],
        bootstrap_index=renumber[micro.bootstrap_index],
    )


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
