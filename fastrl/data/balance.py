"""Which rank trains on which sequences: equal work per rank, groups kept whole where that costs little.

A row at position p of its sequence costs `row + key (p + 1)`: the products with the weights and one attention score per
key it reads. Over the rows a .. b-1 of a sequence that is tokens x (c1 + c2 x length),

    cost(a, b) = (b - a) (row + key (a + b + 1) / 2)

A group on a rank costs its prompt once and then its responses (without their last tokens, which are no inputs), each
response token a head row besides. What the ranks wait for is the heaviest one:

    imbalance = max_r load_r / mean_r load_r - 1

Whole groups are placed by the largest differencing method of Karmarkar and Karp (for k parts), then refined by moves
and swaps. Only where the imbalance stays above a tolerance do sequences leave their group, and as few as needed: each
rank that then holds a part of the group pays for its prompt. Everything is a function of the arguments, so ranks that
know the same lengths make the same assignment without talking.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TOLERANCE = 0.05  # imbalance up to which groups stay whole
MOST_SWAPS = 200  # refinement steps of a placement; the differencing method leaves little to do


@dataclass(frozen=True)
class CostModel:
    """Work in any unit (FLOPs, say): per trunk row, per head row, per key that a row reads."""

    row: float = 1.0
    head_row: float = 0.0
    key: float = 0.0

    def rows(self, first: int, end: int) -> float:
        """Cost of the trunk rows at positions [first, end) of a sequence."""
        return (end - first) * (self.row + self.key * (first + end + 1) / 2) if end > first else 0.0

    def response(self, prompt: int, length: int) -> float:
        """Cost of a response of `length` tokens after a prompt that has been paid for."""
        return self.rows(prompt, prompt + length - 1) + self.head_row * length


@dataclass
class Balance:
    """An assignment of S sequences to R ranks."""

    rank: list[int]  # [S]
    loads: list[float]  # [R] cost per rank
    lower_bound: float  # no assignment has a smaller heaviest rank
    num_split_groups: int = 0

    @property
    def imbalance(self) -> float:
        """max load / mean load - 1; 0 without work."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean - 1.0 if mean > 0 else 0.0


def balance(
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    groups: Sequence[int],
    num_ranks: int,
    *,
    cost: CostModel | None = None,
    share_prompts: bool = True,
    whole_groups: bool = False,
    tolerance: float = TOLERANCE,
) -> Balance:
    """A rank for each sequence so that the heaviest rank is as light as can be found.

    Args:
        prompt_lengths: [S] tokens of each sequence's prompt, equal inside a group.
        lengths: [S] response tokens.
        groups: [S] group id.
        num_ranks: R, at least 1.
        cost: of rows, head rows and keys.
        share_prompts: a prompt is computed once per group and rank; False counts it for every sequence.
        whole_groups: never split a group (an estimator needs it whole).
        tolerance: imbalance above which sequences leave their groups.

    Returns:
        the assignment with its loads and the lower bound max(total / R, heaviest sequence or, if kept whole, group).
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks = {num_ranks}: at least 1 is needed")
    table = _Table.of(prompt_lengths, lengths, groups, cost or CostModel(), share_prompts)
    parts = refine(largest_differencing(table.group_costs, num_ranks), table.group_costs)
    placed = _Placement(table, parts)
    atoms = table.group_costs if whole_groups else table.lone_costs
    bound = max(sum(table.group_costs) / num_ranks, max(atoms, default=0.0))
    if not whole_groups:
        placed.spread(tolerance)
    return Balance(placed.ranks(), placed.loads, bound, placed.num_split_groups())


def largest_differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Items [n] -> `num_parts` lists of items with close sums, by the differencing method for k parts.

    Each item starts as a partial solution (itself in one part, the others empty). The two solutions with the largest
    spread are merged, heaviest part with lightest part, until one is left.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, c in enumerate(costs):
        heap.append((-float(c), i, [(float(c), [i]), *((0.0, []) for _ in range(num_parts - 1))]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def refine(parts: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Move an item from the heaviest part, or swap two, while that makes the heavier of the two parts lighter."""
    values = np.asarray(costs, dtype=np.float64)
    loads = [float(values[p].sum()) if p else 0.0 for p in parts]
    for _ in range(MOST_SWAPS):
        heavy = int(np.argmax(loads))
        best: tuple[float, int, int, int | None] | None = None  # (gain, part, item out, item in)
        for light in np.argsort(loads, kind="stable").tolist():
            gap = loads[heavy] - loads[light]
            if light == heavy or gap <= 0:
                continue
            for item_in in (None, *parts[light]):
                moved = values[parts[heavy]] - (0.0 if item_in is None else values[item_in])
                gains = np.minimum(moved, gap - moved)  # by how much the heavier of the two falls
                at = int(np.argmax(gains))
                if gains[at] > 1e-12 * loads[heavy] and (best is None or gains[at] > best[0]):
                    best = (float(gains[at]), light, parts[heavy][at], item_in)
            if best is not None:
                break  # the lightest part that helps
        if best is None:
            break
        _, light, out, item_in = best
        parts[heavy].remove(out)
        parts[light].append(out)
        if item_in is not None:
            parts[light].remove(item_in)
            parts[heavy].append(item_in)
        for p in (heavy, light):
            loads[p] = float(values[parts[p]].sum())
    return parts


@dataclass
class _Table:
    """Costs of the sequences and groups; groups are numbered in the order of their ids."""

    members: list[list[int]]  # sequences of each group
    group_of: list[int]  # [S]
    prompt_costs: list[float]  # [G] of a shared prompt, 0 for a group without response tokens
    costs: list[float]  # [S] of a sequence whose prompt is paid for
    group_costs: list[float] = field(init=False)
    lone_costs: list[float] = field(init=False)  # [S] of a sequence alone on a rank

    def __post_init__(self) -> None:
        self.group_costs = [
            p + sum(self.costs[s] for s in members) for p, members in zip(self.prompt_costs, self.members)
        ]
        self.lone_costs = [c + self.prompt_costs[g] if c > 0 else 0.0 for c, g in zip(self.costs, self.group_of)]

    @classmethod
    def of(
        cls, prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[int], cost: CostModel, share: bool
    ) -> _Table:
        ids = {g: i for i, g in enumerate(sorted(set(groups)))}
        members: list[list[int]] = [[] for _ in ids]
        prompt_costs, costs = [0.0] * len(ids), []
        for s, (p, n, g) in enumerate(zip(prompts, lengths, groups)):
            members[ids[g]].append(s)
            prompt = cost.rows(0, p) if n else 0.0
            costs.append(cost.response(p, n) + (0.0 if share else prompt) if n else 0.0)
            if share:
                prompt_costs[ids[g]] = max(prompt_costs[ids[g]], prompt)
        return cls(members, [ids[g] for g in groups], prompt_costs, costs)


class _Placement:
    """Sequences on ranks, with loads that pay each prompt once per rank that holds a part of its group."""

    def __init__(self, table: _Table, parts: list[list[int]]) -> None:
        self.table = table
        self.pieces: list[dict[int, list[int]]] = [{g: list(table.members[g]) for g in part} for part in parts]
        self.loads = [sum(table.group_costs[g] for g in part) for part in parts]

    def ranks(self) -> list[int]:
        owner = [0] * len(self.table.costs)
        for r, pieces in enumerate(self.pieces):
            for sequences in pieces.values():
                for s in sequences:
                    owner[s] = r
        return owner

    def num_split_groups(self) -> int:
        holders = Counter(g for pieces in self.pieces for g in pieces)
        return sum(count > 1 for count in holders.values())

    def spread(self, tolerance: float) -> None:
        """Move parts of groups from the heaviest to the lightest rank, or swap sequences of the heaviest and another,
        until the imbalance is within the tolerance or nothing helps."""
        for _ in range(4 * len(self.table.costs)):
            heavy = max(range(len(self.loads)), key=lambda r: self.loads[r])
            light = min(range(len(self.loads)), key=lambda r: self.loads[r])
            mean = sum(self.loads) / len(self.loads)
            if self.loads[heavy] <= (1 + tolerance) * mean:
                return
            enough = self.loads[heavy] * (1 - 1e-12)
            best = min((self._try(heavy, light, g) for g in sorted(self.pieces[heavy])), default=None)
            if best is not None and best[0] < enough:
                self._move(heavy, light, best[2], best[3])
                continue
            swap = min((self._try_swap(heavy, r) for r in range(len(self.loads)) if r != heavy), default=None)
            if swap is None or swap[0] >= enough:
                return
            _, other, out, back = swap
            self._move(heavy, other, self.table.group_of[out], [out])
            self._move(other, heavy, self.table.group_of[back], [back])

    def _try_swap(self, heavy: int, other: int) -> tuple[float, int, int, int]:
        """(heavier load of the two after it, other rank, sequence out, sequence in) for the best swap with a rank."""
        costs, group_of, prompts = self.table.costs, self.table.group_of, self.table.prompt_costs
        mine, theirs = self.pieces[heavy], self.pieces[other]
        best = (self.loads[heavy], other, -1, -1)
        for out in (s for piece in mine.values() for s in piece):
            g = group_of[out]
            freed = costs[out] + (prompts[g] if len(mine[g]) == 1 else 0.0)
            joined = costs[out] + (0.0 if g in theirs else prompts[g])
            for back in (s for piece in theirs.values() for s in piece):
                h = group_of[back]
                if h == g or costs[back] >= costs[out]:
                    continue
                heavy_after = self.loads[heavy] - freed + costs[back] + (0.0 if h in mine else prompts[h])
                leaves = costs[back] + (prompts[h] if len(theirs[h]) == 1 else 0.0)
                after = max(heavy_after, self.loads[other] + joined - leaves)
                best = min(best, (after, other, out, back))
        return best

    def _try(self, heavy: int, light: int, group: int) -> tuple[float, int, int, list[int]]:
        """(heavier load of the two after the move, sequences moved, group, which) for the best part of a group."""
        costs, prompt = self.table.costs, self.table.prompt_costs[group]
        piece = sorted(self.pieces[heavy][group], key=lambda s: (-costs[s], s))
        joins = 0.0 if group in self.pieces[light] else prompt
        room = (self.loads[heavy] - self.loads[light] - joins) / 2
        chosen, total = [], 0.0
        for s in piece:
            if total + costs[s] <= room:
                chosen.append(s)
                total += costs[s]
        if not chosen and piece:  # one that goes past the middle may still help
            chosen, total = [piece[-1]], costs[piece[-1]]
        leaves = prompt if len(chosen) == len(piece) else 0.0
        after = max(self.loads[heavy] - total - leaves, self.loads[light] + total + joins)
        return after, len(chosen), group, chosen

    def _move(self, heavy: int, light: int, group: int, chosen: list[int]) -> None:
        costs, prompt = self.table.costs, self.table.prompt_costs[group]
        total = sum(costs[s] for s in chosen)
        self.loads[light] += total + (0.0 if group in self.pieces[light] else prompt)
        self.pieces[light].setdefault(group, []).extend(chosen)
        gone = set(chosen)
        rest = [s for s in self.pieces[heavy][group] if s not in gone]
        self.loads[heavy] -= total + (0.0 if rest else prompt)
        if rest:
            self.pieces[heavy][group] = rest
        else:
            del self.pieces[heavy][group]


def keep_at_home(rank: Sequence[int], owner: Sequence[int], weight: Sequence[float], num_ranks: int) -> list[int]:
    """Rename the ranks of an assignment so that much of the weight stays with its owner.

    Args:
        rank: [S] assigned rank; owner: [S] rank that holds the sequence now; weight: [S] what it costs to move.

    Returns:
        [S] assigned ranks under new names; greedy, the largest overlaps first.
    """
    overlap = np.zeros((num_ranks, num_ranks))
    np.add.at(overlap, (np.asarray(rank, dtype=np.int64), np.asarray(owner, dtype=np.int64)), np.asarray(weight, float))
    name: dict[int, int] = {}
    taken: set[int] = set()
    for flat in np.argsort(-overlap, axis=None, kind="stable").tolist():
        part, home = divmod(flat, num_ranks)
        if part not in name and home not in taken:
            name[part] = home
            taken.add(home)
    return [name[r] for r in rank]
