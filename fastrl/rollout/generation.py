"""One call of generate as a state machine: queue, prefill, draw, part, compact, finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError
from fastrl.rollout import sampling
from fastrl.rollout.decode import DecodeLayout
from fastrl.rollout.engine import GenerationRequest, SamplingParams
from fastrl.rollout.kv_cache import KVCache
from fastrl.rollout.prefill import PackedPrompts, PrefillLayout
from fastrl.rollout.runner import Runner
from fastrl.rollout.seeds import uniforms

_LOGITS_ELEMENTS = 1 << 26  # rows of logits are made in chunks of so many numbers at most


@dataclass(eq=False)
class Running:
    """A sample that is being generated."""

    request_id: int
    sample_index: int
    seed: int
    temperature: float
    max_tokens: int
    group: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class CallStatistics:
    """What one call of generate computed."""

    passes: int = 0  # forward passes
    prompt_tokens: int = 0  # rows of prefill passes, common beginnings counted once
    decode_rows: int = 0  # rows of decode passes
    drawn_tokens: int = 0  # more than decode_rows by what samples shared, and by the first tokens


@dataclass(eq=False)
class Group:
    """A distinct prompt and its samples."""

    prompt: tuple[int, ...]
    waiting: deque[Running] = field(default_factory=deque)
    num_running: int = 0
    hidden: Tensor | None = None  # [1, H], the row that predicts the first token, while the prompt is resident


class Generation:
    """Generates the samples of one call. `step` does one round and returns what finished in it."""

    def __init__(
        self,
        runner: Runner,
        device: torch.device,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        *,
        stop_ids: frozenset[int],
        decode: Callable[[list[int]], str],
        vocabulary_size: int,
        kv_budget_tokens: int | None,
        max_prefill_tokens: int,
        share_prefixes: bool = True,
    ) -> None:
        self.runner, self.device, self.params = runner, device, params
        self.stop_ids = np.array(sorted(stop_ids), np.int64)
        self.decode = decode
        self.logits_rows = max(1, _LOGITS_ELEMENTS // vocabulary_size)
        self.budget, self.max_prefill_tokens = kv_budget_tokens, max_prefill_tokens
        self.share_prefixes = share_prefixes
        self.groups = _groups(requests, params)
        self._check_space()
        self.queue = deque(range(len(self.groups)))
        self.used = 0  # tokens of key/value space reserved
        self.cache = KVCache(longest=max((s.max_tokens for g in self.groups for s in g.waiting), default=1))
        self.layout = DecodeLayout(self.cache, device)
        self.active: list[Running] = []
        self.rows = np.zeros(0, np.int64)  # per active sample: its row
        self.seeds = np.zeros(0, np.int64)
        self.temperatures = np.zeros(0)
        self.counts = np.zeros(0, np.int64)  # per active sample: tokens drawn
        self.limits = np.zeros(0, np.int64)
        self.statistics = CallStatistics()
        self.pending = np.zeros(0, np.int64)  # per row: the token to feed next
        # Stop strings are looked for in the last tokens only: a token is at least one byte of text.
        self.stop_window = 8 + max((len(s.encode()) for s in params.stop), default=0)

    @property
    def done(self) -> bool:
        return not self.active and not self.queue

    @property
    def num_waiting(self) -> int:
        return sum(len(self.groups[g].waiting) for g in self.queue)

    def step(self) -> list[Running]:
        """Admit what fits, then one token for every running sample. Returns the finished samples."""
        finished = self._admit()
        assert self.active or finished or not self.queue, "space was reserved and never given back"
        if self.active:
            positions = self.layout.begin()
            hidden = self.runner.hidden(self.pending, positions, self.layout)
            self.statistics.passes += 1
            self.statistics.decode_rows += len(self.pending)
            self.layout.end()
            tokens, log_probs = self._draw(hidden, self.rows, self.active, self.seeds, self.counts, self.temperatures)
            finished += self._advance(tokens, log_probs)
        return finished

    def abort(self) -> list[Running]:
        """End every unfinished sample where it stands."""
        rest = self.active + [s for g in self.queue for s in self.groups[g].waiting]
        for sample in rest:
            sample.finish_reason = FinishReason.abort
        self.close()
        return rest

    def close(self) -> None:
        """Free all space."""
        self.active, self.queue, self.used = [], deque(), 0
        self.cache.clear()
        for group in self.groups:
            group.hidden = None

    # -- admission ------------------------------------------------------------------------------------------------

    def _check_space(self) -> None:
        if self.budget is None:
            return
        for group in self.groups:
            need = len(group.prompt) + max(s.max_tokens for s in group.waiting)
            if need > self.budget:
                raise EngineError(
                    f"a prompt of {len(group.prompt)} tokens and a response of up to {need - len(group.prompt)} need "
                    f"{need} tokens of key/value space, rollout.kv_budget_tokens is {self.budget}: raise it or lower "
                    "rollout.max_response_tokens"
                )

    def _fits(self, tokens: int) -> bool:
        return self.budget is None or self.used + tokens <= self.budget

    def _take(self) -> list[tuple[int, list[Running]]]:
        """Reserve space for waiting samples, in order, until one does not fit or the prefill is long enough."""
        taken: list[tuple[int, list[Running]]] = []
        prefill = 0
        while self.queue:
            number = self.queue[0]
            group = self.groups[number]
            fresh = len(group.prompt) if group.hidden is None else 0
            first = group.waiting[0]
            if not self._fits(fresh + first.max_tokens) or (prefill and prefill + fresh > self.max_prefill_tokens):
                break
            self.used += fresh
            prefill += fresh
            samples: list[Running] = []
            while group.waiting and self._fits(group.waiting[0].max_tokens):
                samples.append(group.waiting.popleft())
                self.used += samples[-1].max_tokens
            group.num_running += len(samples)
            taken.append((number, samples))
            if group.waiting:
                break
            self.queue.popleft()
        return taken

    def _admit(self) -> list[Running]:
        """Prefill new prompts and draw the first token of the samples that fit. Returns samples of one token."""
        finished: list[Running] = []
        while self.queue:
            taken = self._take()
            if not taken:
                break
            self._prefill([number for number, _ in taken if self.groups[number].hidden is None])
            hidden = torch.cat([self.groups[number].hidden for number, _ in taken])  # type: ignore[misc]
            samples = [s for _, members in taken for s in members]
            rows = np.repeat(np.arange(len(taken)), [len(members) for _, members in taken])
            seeds = np.array([s.seed for s in samples], np.int64)
            counts = np.zeros(len(samples), np.int64)
            temperatures = np.array([s.temperature for s in samples])
            tokens, log_probs = self._draw(hidden, rows, samples, seeds, counts, temperatures)
            start = len(self.active)
            self.active += samples
            self.rows = np.concatenate([self.rows, -1 - rows])  # negative: not in a row of the decode batch yet
            self.seeds = np.concatenate([self.seeds, seeds])
            self.temperatures = np.concatenate([self.temperatures, temperatures])
            self.counts = np.concatenate([self.counts, counts])
            self.limits = np.concatenate([self.limits, [s.max_tokens for s in samples]]).astype(np.int64)
            finished += self._advance(tokens, log_probs, start)
        return finished

    def _prefill(self, numbers: list[int]) -> None:
        if not numbers:
            return
        packed = PackedPrompts([self.groups[n].prompt for n in numbers])
        layout = PrefillLayout(packed, self.device)
        hidden = self.runner.hidden(packed.tokens, packed.positions, layout)
        self.statistics.passes += 1
        self.statistics.prompt_tokens += len(packed.tokens)
        last = hidden[torch.from_numpy(packed.last).to(self.device)]
        for i, number in enumerate(numbers):
            self.groups[number].hidden = last[i : i + 1]
        self.cache.add_prompts([layout.kv[i] for i in sorted(layout.kv)], packed.index, numbers)
        self.cache.merge_pools()

    # -- one token ------------------------------------------------------------------------------------------------

    def _draw(
        self,
        hidden: Tensor,
        rows: np.ndarray,
        samples: list[Running],
        seeds: np.ndarray,
        counts: np.ndarray,
        temperatures: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token and its log-prob for each sample [S] from hidden rows [R, H]; rows [S] says which."""
        self.statistics.drawn_tokens += len(samples)
        uniform = uniforms(seeds, counts)
        tokens = np.empty(len(samples), np.int64)
        log_probs = np.empty(len(samples), np.float64)
        for start in range(0, len(hidden), self.logits_rows):
            logits = self.runner.logits(hidden[start : start + self.logits_rows])
            inside = np.flatnonzero((rows >= start) & (rows < start + len(logits)))
            tokens[inside], log_probs[inside] = sampling.draw(
                logits, rows[inside] - start, temperatures[inside], uniform[inside], self.params
            )
        return tokens, log_probs

    def _advance(self, tokens: np.ndarray, log_probs: np.ndarray, start: int = 0) -> list[Running]:
        """Append one token to the active samples from `start` on; finish, part and compact.

        Samples before `start` keep the row they have.
        """
        moving = self.active[start:]
        for sample, token, log_prob in zip(moving, tokens.tolist(), log_probs.tolist()):
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
        self.counts[start:] += 1
        stopped = np.isin(tokens, self.stop_ids)
        if self.params.stop:
            self._find_stop_strings(moving, self.rows[start:] * (2 * tokens.max() + 2) + tokens, stopped)
        over = stopped | (self.counts[start:] >= self.limits[start:])
        finished = []
        for i in np.flatnonzero(over):
            moving[i].finish_reason = FinishReason.stop if stopped[i] else FinishReason.length
            finished.append(moving[i])
        keep = np.concatenate([np.ones(start, bool), ~over])
        next_token = np.concatenate([np.full(start, -1, np.int64), tokens])[keep]
        if over.any():
            self.active = [s for s, k in zip(self.active, keep) if k]
            for name in ("rows", "seeds", "temperatures", "counts", "limits"):
                setattr(self, name, getattr(self, name)[keep])
        self._assign_rows(next_token)
        self._release(finished)
        return finished

    def _find_stop_strings(self, samples: list[Running], keys: np.ndarray, stopped: np.ndarray) -> None:
        """Mark samples whose text now holds a stop string; samples of one row with one token share the answer."""
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        found = []
        for i in first:
            text = self.decode(samples[i].tokens[-self.stop_window :])
            found.append(any(stop in text for stop in self.params.stop))
        stopped |= np.array(found)[inverse]

    def _assign_rows(self, next_token: np.ndarray) -> None:
        """Give every active sample a row. next_token [S]: the token just drawn, -1 where the row does not change.

        Samples of one row that drew the same token stay together; the first set of a row keeps it, others get copies.
        """
        width = int(next_token.max(initial=0)) + 2
        key = (self.rows - self.rows.min(initial=0)) * width + next_token + 1
        if not self.share_prefixes:
            key = np.arange(len(key))
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        parent = self.rows[first]  # per new row: the old one, negative for a fresh prompt
        token = next_token[first]
        token = np.where(token >= 0, token, self.pending[np.maximum(parent, 0)] if len(self.pending) else -1)
        groups = np.array([self.active[i].group for i in first], np.int64)
        place = _places(parent)
        source = np.full(len(parent), -1, np.int64)
        source[place] = np.maximum(parent, -1)
        new_groups, self.pending = np.empty_like(groups), np.empty_like(token)
        new_groups[place], self.pending[place] = groups, token
        self.rows = place[inverse]
        unchanged = len(source) == self.cache.num_rows and bool((source == np.arange(len(source))).all())
        if not unchanged:
            self.cache.set_rows(source, new_groups, capacity=len(self.active))

    def _release(self, finished: list[Running]) -> None:
        """Give back the space of finished samples, and of prompts that nobody reads any more."""
        gone = set()
        for sample in finished:
            group = self.groups[sample.group]
            group.num_running -= 1
            self.used -= sample.max_tokens
            if not group.num_running and not group.waiting:
                self.used -= len(group.prompt)
                group.hidden = None
                gone.add(sample.group)
        if gone:
            self.cache.drop_prompts(gone)


def _places(parent: np.ndarray) -> np.ndarray:
    """Where each new row goes [K], a permutation: a row stays where its parent was if that place exists and is free."""
    count = len(parent)
    place = np.full(count, -1, np.int64)
    taken = np.zeros(count, bool)
    candidates = np.flatnonzero((parent >= 0) & (parent < count))
    _, first = np.unique(parent[candidates], return_index=True)
    staying = candidates[first]
    place[staying] = parent[staying]
    taken[parent[staying]] = True
    place[place < 0] = np.flatnonzero(~taken)
    return place


def _groups(requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Group]:
    """Distinct prompts in the order of their first request."""
    numbers: dict[tuple[int, ...], int] = {}
    groups: list[Group] = []
    for request in requests:
        prompt = tuple(int(i) for i in request.prompt_ids)
        number = numbers.setdefault(prompt, len(groups))
        if number == len(groups):
            groups.append(Group(prompt))
        temperature = params.temperature if request.temperature is None else request.temperature
        max_tokens = params.max_tokens if request.max_tokens is None else request.max_tokens
        for index, seed in enumerate(request.sample_seeds(params)):
            groups[number].waiting.append(Running(request.request_id, index, seed, temperature, max_tokens, number))
    return groups
