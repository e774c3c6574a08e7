"""An engine that is not the trainer's own module: any `Backend`, reached through a `Link`.

What is the same for all of them is here: samples to draw from requests, weights before the first sample, one restart
after a death, and the agreement of several ranks about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendInfo, BackendSettings, Draw, Drawn
from fastrl.rollout.engine import EngineHealth, GenerationRequest, Sample, SamplingParams, WakePart, check_requests
from fastrl.rollout.link import EngineDied, Link

PlainDraw = tuple[list[int], int, float, int]  # prompt, seed, temperature, max_tokens


class ExternalEngine:
    """See `Engine` for the methods.

    Args:
        link: reaches the backend.
        model: the policy; its weights are delivered before the first sample.
        vocabulary_size: ids below it may stand in prompts.
        context: longest prompt with its response the model allows, in tokens; None is no limit.
        stop_token_ids: ids that end a response.
        any_rank: whether a flag is set on any rank that trains together with this one; called by all of them alike.
        gather: the value of each process of this tensor-parallel engine, in rank order; None without one.
        engine_rank: number of this process among them.
        before_restart: called with the number of the restart before a dead engine is started again.
        on_close: called after the engine is closed.
        instead: another way to a backend where the first one refuses to start, given its words.
    """

    def __init__(
        self,
        link: Link,
        model: nn.Module,
        *,
        vocabulary_size: int,
        context: int | None = None,
        stop_token_ids: Iterable[int] = (),
        any_rank: Callable[[bool], bool] = bool,
        gather: Callable[[Any], list[Any]] | None = None,
        engine_rank: int = 0,
        before_restart: Callable[[int], None] = lambda number: None,
        on_close: Callable[[], None] | None = None,
        instead: Callable[[EngineError], Link] | None = None,
    ) -> None:
        self.link, self.model = link, model
        self.vocabulary_size, self.context = vocabulary_size, context
        self.stop_token_ids = frozenset(int(i) for i in stop_token_ids)
        self.any_rank, self.gather, self.engine_rank = any_rank, gather, engine_rank
        self.before_restart, self.on_close, self.instead = before_restart, on_close, instead
        self.policy_version = 0
        self.restarts = 0
        self._delivered = False  # whether the engine holds weights of the trainer
        self._died_since_sample = False  # one restart per finished generate
        self._asleep: set[str] = set()  # what of weights and kv is asleep
        self._sleep_level = 0
        self._running = False
        self._closed = False
        self._started = False
        self.around_delivery: Callable[[], AbstractContextManager[None]] = nullcontext  # makes the weights readable

    def start(self) -> None:
        """Begin to start the backend, which takes its time elsewhere; otherwise the first use does."""
        if not self._started:
            self._started = True
            self.link.start()

    def _deliver(self) -> None:
        if self.instead is not None:
            self.ready()
        with self.around_delivery():
            self.link.update(self.model, self.policy_version)
        self._delivered = True

    # -- samples ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Iterator[Sample]:
        """Yield each sample as it finishes; see Engine.generate."""
        self._require_open()
        if self._asleep:
            raise EngineError("generate on a sleeping engine: call wake() first")
        if self._running:
            raise EngineError("generate while another generate is running: exhaust or close its iterator first")
        check_requests(requests, self.vocabulary_size)
        self._check_context(requests, params)
        own: frozenset[int] = frozenset() if params.ignore_eos else self.stop_token_ids
        return self._stream(requests, replace(params, stop_token_ids=tuple(sorted(own | set(params.stop_token_ids)))))

    def _stream(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Iterator[Sample]:
        if self._running:
            raise EngineError("generate while another generate is running: exhaust or close its iterator first")
        self._running = True
        try:
            owners, remaining = self._draws(requests, params)
            while True:
                died: EngineDied | None = None
                try:
                    if self.any_rank(not self._delivered):
                        self._delivered = False
                        self._deliver()
                    if remaining:
                        for drawn in self.link.generate(list(remaining.values()), params):
                            del remaining[drawn.key]
                            if drawn.key in owners:
                                yield self._sample(drawn, *owners[drawn.key])
                except EngineDied as error:
                    died = error
                if not self._revive(died):
                    self._died_since_sample = False
                    return
        finally:
            self._running = False

    def _draws(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> tuple[dict[int, tuple[int, int]], dict[int, Draw]]:
        """Every sample that this engine draws, and which of them are this rank's: key -> (request_id, index)."""
        plain: list[PlainDraw] = []
        names: list[tuple[int, int]] = []
        for request in requests:
            temperature = params.temperature if request.temperature is None else request.temperature
            limit = params.max_tokens if request.max_tokens is None else request.max_tokens
            for index, seed in enumerate(request.sample_seeds(params)):
                plain.append((list(request.prompt_ids), seed, temperature, limit))
                names.append((request.request_id, index))
        # the processes of one engine must be given the same samples in the same order
        everyone = [plain] if self.gather is None else self.gather(plain)
        first = sum(len(rows) for rows in everyone[: self.engine_rank])
        draws = {key: Draw(key, *row) for key, row in enumerate(row for rows in everyone for row in rows)}
        return {first + i: name for i, name in enumerate(names)}, draws

    def _sample(self, drawn: Drawn, request_id: int, sample_index: int) -> Sample:
        return Sample(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=torch.tensor(drawn.token_ids, dtype=torch.int64),
            log_probs=torch.tensor(drawn.log_probs, dtype=torch.float32),
            finish_reason=FinishReason[drawn.finish_reason],
            policy_version=self.policy_version,
        )

    def _check_context(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        for request in requests:
            limit = params.max_tokens if request.max_tokens is None else request.max_tokens
            need = len(request.prompt_ids) + limit
            if self.context is not None and need > self.context:
                raise EngineError(
                    f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens and a response of up "
                    f"to {limit} exceed the engine's context of {self.context} tokens: lower "
                    "rollout.max_response_tokens or data.max_prompt_tokens"
                )

    # -- death -----------------------------------------------------------------------------------------------------

    def _revive(self, died: EngineDied | None) -> bool:
        """After a death on any rank: restart this one's engine if it died, weights again on all; False if all live.

        Raises EngineError when an engine dies again before a call of generate was finished.
        """
        if not self.any_rank(died is not None):
            return False
        again = died is not None and self._died_since_sample
        if self.any_rank(again):
            reason = (
                f"the engine died again after a restart: {died}" if again else "the engine of another rank died again"
            )
            raise EngineError(reason) from died
        self._died_since_sample = self._died_since_sample or died is not None
        self._delivered = False  # gathering sharded weights takes every rank, so every engine gets them again
        if died is not None:
            self._restart()
        return True

    def _restart(self) -> None:
        """A new engine, as awake as the old one was."""
        self.restarts += 1
        self.before_restart(self.restarts)
        self.link.restart()
        if self._asleep:
            self.link.sleep(self._sleep_level)
            awake: list[WakePart] = [] if "weights" in self._asleep or self._sleep_level == 0 else ["weights"]
            if awake:
                self.link.wake(awake)

    # -- weights and memory ----------------------------------------------------------------------------------------

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Deliver the weights of `model`; cached prefixes of the old ones are dropped with it."""
        self._require_open()
        if self._running:
            raise EngineError("update_weights while samples are being generated: abort() or finish them first")
        if "weights" in self._asleep:
            raise EngineError("update_weights on sleeping weights: call wake(('weights',)) first")
        self.model, self.policy_version, self._delivered = model, version, False
        while not self._delivered:
            died: EngineDied | None = None
            try:
                self._deliver()
            except EngineDied as error:
                died = error
            self._revive(died)

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 0 keys and values, 1 weights too (kept elsewhere), 2 weights too (lost)."""
        self._require_open()
        if self._running:
            raise EngineError("sleep while samples are being generated: abort() or finish them first")
        self._call(lambda: self.link.sleep(level))
        self._asleep, self._sleep_level = {"kv"} if level == 0 else {"weights", "kv"}, level
        if level >= 2:
            self._delivered = False

    def wake(self, what: Sequence[WakePart] = ("weights", "kv")) -> None:
        """Take memory again; weights that were lost are delivered before the next sample if nobody does it earlier."""
        self._require_open()
        parts: list[WakePart] = [part for part in what if part in self._asleep]
        if parts:
            self._call(lambda: self.link.wake(parts))
            self._asleep -= set(parts)

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        self._require_open()
        self._call(self.link.reset_prefix_cache)

    def _call(self, action: Callable[[], None]) -> None:
        """A call that a dead engine cannot answer and a new one need not: what died is started again on next use."""
        if self.instead is not None:
            self.ready()
        try:
            action()
        except EngineDied:
            if self._died_since_sample:
                raise
            self._died_since_sample, self._delivered = True, False
            self._restart()
            action()

    # -- the rest --------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> BackendSettings:
        """What the backend is started with."""
        return self.link.settings

    def ready(self) -> BackendInfo:
        """Wait until the backend is ready; what it says of itself. Raises EngineError when it cannot start."""
        self.start()
        try:
            return self.link.wait_ready()
        except EngineDied:
            raise
        except EngineError as refusal:
            if self.instead is None:
                raise
            self.link.close()
            self.link, self.instead, self._delivered = self.instead(refusal), None, False
            return self.link.wait_ready()

    def abort(self) -> None:
        """End the running generate soon."""
        self.link.abort()

    def health(self) -> EngineHealth:
        """State of the engine as it last reported it."""
        load = self.link.load()
        problem = "closed" if self._closed else self.link.alive()
        return EngineHealth(
            alive=not problem,
            policy_version=self.policy_version,
            sleeping=bool(self._asleep),
            num_running=load.running,
            num_waiting=load.waiting,
            kv_tokens_used=load.kv_tokens,
            kv_tokens_budget=None,
            detail=problem,
            restarts=self.restarts,
        )

    def close(self) -> None:
        """Free everything; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.link.close()
            if self.on_close is not None:
                self.on_close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        self.start()
