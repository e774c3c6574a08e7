"""The reward pool: samples go in as generation finishes them, scores come out in order once all are judged.

`exact` and `regex` are computed where they are asked for, in microseconds. `math`, `reasoning_gym` and Python
functions run in processes that are killed when a call takes too long. Reward models are handed in as functions that
`collect` calls with all samples, while the processes work. Each function judges each sample once.
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from fastrl.errors import ConfigError, RewardError
from fastrl.rewards import builtin
from fastrl.rewards.base import Failure, Judge, Outcome, RewardResult, RewardSample, combine_outcomes
from fastrl.rewards.processes import ELSEWHERE, AsyncLane, Job, Setup, SyncLane
from fastrl.rewards.shaping import clip_score
from fastrl.rewards.shaping import overlong_penalty as overlong_penalty_of
from fastrl.rewards.signatures import Signature

NAMES = ("math", "exact", "regex", "reasoning_gym")
MODEL = "model:"  # and the folder or hub name of a reward model
INLINE_STEPS = 1e6  # backtracking steps (about 10 ms) that a pattern may take outside a killable process
MAX_ERRORS = 5


class _Pending:
    """A submitted sample and what is known of its outcomes."""

    def __init__(self, sample: RewardSample, num_functions: int) -> None:
        self.sample = sample
        self.payload = payload_of(sample)
        self.outcomes: list[Outcome] = [None] * num_functions
        self.num_open = 0  # jobs not yet delivered
        self.discarded = False


class RewardPool:
    """Scores responses with weighted functions.

    Args:
        functions: `math`, `exact`, `regex`, `reasoning_gym`, `python:package.module:function` or `model:PATH`.
        weights: one per function; None means 1 each.
        timeout_s: a call that takes longer is killed, its samples are unscorable; seconds.
        num_workers: processes for `math`, `reasoning_gym` and synchronous Python functions.
        max_failure_fraction: `collect` raises when more of the samples could not be scored.
        regex_pattern: of `regex`. answer_pattern: of `exact`; None takes the last number.
        max_response_tokens, overlong_buffer_tokens, overlong_penalty: see `shaping.overlong_penalty`.
        clip_min, clip_max: bounds of the final score; None is no bound.
        judges: what scores for each `model:PATH` among the functions, by that name.

    Raises:
        ConfigError: an unknown function or pattern, another number of weights than functions, or a model without judge.
        RewardError: a Python function cannot be loaded.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float = 10.0,
        num_workers: int = 1,
        max_failure_fraction: float = 0.1,
        regex_pattern: str | None = None,
        answer_pattern: str | None = None,
        max_response_tokens: int | None = None,
        overlong_buffer_tokens: int = 0,
        overlong_penalty: float = 1.0,
        clip_min: float | None = None,
        clip_max: float | None = None,
        judges: Mapping[str, Judge] | None = None,
    ) -> None:
        self.judges = judges or {}
        if missing := [f for f in functions if f.startswith(MODEL) and f not in self.judges]:
            raise ConfigError(f"reward.functions: {', '.join(missing)} needs a model that scores (judges)")
        self.paths = [_check_name(name).removeprefix("python:") for name in functions]
        self.names = component_names(functions)
        self.weights = [1.0] * len(self.names) if weights is None else [float(w) for w in weights]
        if len(self.weights) != len(self.names):
            raise ConfigError(f"reward.weights has {len(self.weights)} entries, reward.functions {len(self.names)}")
        if overlong_buffer_tokens and max_response_tokens is None:
            raise ConfigError("reward.overlong_buffer_tokens needs the response limit (max_response_tokens)")
        self.patterns = {
            "exact": _compile("answer_pattern", answer_pattern),
            "regex": _compile("regex_pattern", regex_pattern),
        }
        if "regex" in functions and regex_pattern is None:
            raise ConfigError("reward.functions has regex, but reward.regex_pattern is not set")
        self.timeout_s = timeout_s
        self.max_failure_fraction = max_failure_fraction
        self._length_penalty = partial(
            overlong_penalty_of,
            max_tokens=max_response_tokens,
            buffer_tokens=overlong_buffer_tokens,
            factor=overlong_penalty,
        )
        self.shapes_length = overlong_buffer_tokens > 0
        self.bounds = (clip_min, clip_max)
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()
        self._closed = False
        self._start_lanes(num_workers, {"answer_pattern": answer_pattern, "regex_pattern": regex_pattern})

    def _start_lanes(self, num_workers: int, settings: dict[str, Any]) -> None:
        """Threads for the reward processes; a process itself starts with its first job, Python functions at once."""
        paths = [ELSEWHERE if path.startswith(MODEL) else path for path in self.paths]
        setup = Setup(list(zip(self.names, paths)), settings, self.timeout_s)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._async_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        has_python = any(path not in (*NAMES, ELSEWHERE) for path in paths)
        self._lanes = [SyncLane(setup, self._jobs, eager=has_python and i == 0) for i in range(num_workers)]
        self._async_lanes: list[AsyncLane] = []
        self._signatures: list[Signature | None] = [None] * len(self.names)
        for lane in self._lanes:
            lane.start()
        if has_python:
            self._signatures = self._lanes[0].signatures()
        if any(signature and signature.is_async for signature in self._signatures):
            async_setup = Setup(setup.functions, settings, self.timeout_s, is_async=True)
            self._async_lanes = [AsyncLane(async_setup, self._async_jobs)]
            self._async_lanes[0].start()

    def submit(self, sample: RewardSample) -> None:
        """Judge a sample: cheap functions now, the others in the background. Returns at once."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        pending = _Pending(sample, len(self.names))
        self._pending.append(pending)
        for index in range(len(self.names)):
            signature = self._signatures[index]
            if self.paths[index] in self.judges or (signature and signature.is_batch):
                continue  # judged together, by collect
            settled, outcome = self._inline(index, sample)
            if settled:
                pending.outcomes[index] = outcome
            else:
                self._enqueue(index, [pending], pending.payload)

    def collect(self, sample_ids: Sequence[int] | None = None) -> RewardResult:
        """Wait until every submitted sample is judged; scores in submission order, or in that of `sample_ids`.

        Raises:
            RewardError: a function broke its contract, too many samples could not be scored, or none could.
        """
        taken, self._pending = self._pending, []
        try:
            taken = _in_order(taken, sample_ids)
            for index, signature in enumerate(self._signatures):
                if signature and signature.is_batch and taken:
                    self._enqueue(index, taken, [pending.payload for pending in taken])
            self._ask_judges(taken)
            with self._changed:
                while any(pending.num_open for pending in taken):
                    self._changed.wait(timeout=1.0)
        except BaseException:
            for pending in taken:
                pending.discarded = True
            raise
        return self._result(taken)

    def _ask_judges(self, taken: list[_Pending]) -> None:
        """Each model scores all samples at once, also none: on several ranks all of them call it."""
        for index, path in enumerate(self.paths):
            if path in self.judges:
                for pending, outcome in zip(taken, self.judges[path]([pending.sample for pending in taken])):
                    pending.outcomes[index] = outcome

    def discard(self) -> None:
        """Forget what was submitted and not collected, e.g. after generation was interrupted."""
        for pending in self._pending:
            pending.discarded = True
        self._pending = []

    def close(self) -> None:
        """End all reward processes, running calls included. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.discard()
        lanes: list[SyncLane | AsyncLane] = [*self._lanes, *self._async_lanes]
        for lane in lanes:
            lane.stop_worker()
            lane.jobs.put(None)
        for lane in lanes:
            lane.join(timeout=10.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _inline(self, index: int, sample: RewardSample) -> tuple[bool, Outcome]:
        """(True, outcome) where the function is cheap enough for this sample to be called here, else (False, None)."""
        path, text, answer = self.paths[index], sample.response_text, sample.prompt.answer
        if path == "math":
            settled = builtin.quick_math(text, answer)
            return settled is not None or answer is None, settled
        if path not in ("exact", "regex"):
            return False, None
        pattern = self.patterns[path]
        if pattern is not None:
            degree = builtin.backtracking_degree(pattern.pattern)
            if degree * math.log(len(text) + 1) > math.log(INLINE_STEPS):
                return False, None
        if path == "exact":
            return True, builtin.exact(text, answer, pattern=pattern)
        assert pattern is not None
        return True, builtin.regex(text, pattern=pattern)

    def _enqueue(self, index: int, pending: list[_Pending], payload: Any) -> None:
        """Hand a call to a process; its outcome(s) land in the pending samples."""

        def deliver(result: Any) -> None:
            outcomes = result if isinstance(result, list) else [result] * len(pending)
            with self._changed:
                for one, outcome in zip(pending, outcomes):
                    one.outcomes[index] = outcome
                    one.num_open -= 1
                self._changed.notify_all()

        with self._changed:
            for one in pending:
                one.num_open += 1
        signature = self._signatures[index]
        jobs = self._async_jobs if signature and signature.is_async else self._jobs
        jobs.put(Job(index, self.names[index], payload, deliver, lambda: pending[0].discarded))

    def _result(self, taken: list[_Pending]) -> RewardResult:
        import torch  # only here: reward processes import this package without it

        failures = [outcome for pending in taken for outcome in pending.outcomes if isinstance(outcome, Failure)]
        totals = [combine_outcomes(pending.outcomes, self.weights) for pending in taken]
        num_failed = sum(any(isinstance(o, Failure) for o in pending.outcomes) for pending in taken)
        self._check_failures(len(taken), num_failed, sum(total is None for total in totals), failures)
        penalties = [self._length_penalty(len(pending.sample.response_ids)) for pending in taken]
        shaped = [None if total is None else total + penalty for total, penalty in zip(totals, penalties)]
        scores = [0.0 if score is None else clip_score(score, *self.bounds) for score in shaped]
        components = {
            name: torch.tensor([_component(pending.outcomes[k]) for pending in taken], dtype=torch.float32)
            for k, name in enumerate(self.names)
        }
        return RewardResult(
            sample_ids=[pending.sample.sample_id for pending in taken],
            scores=torch.tensor(scores, dtype=torch.float32),
            valid=torch.tensor([score is not None for score in shaped], dtype=torch.bool),
            components=components,
            length_penalties=torch.tensor(penalties, dtype=torch.float32),
            num_failed=num_failed,
            num_abstained=sum(all(outcome is None for outcome in pending.outcomes) for pending in taken),
            num_clipped=sum(score is not None and score != kept for score, kept in zip(shaped, scores)),
            errors=[str(failure) for failure in failures[:MAX_ERRORS]],
        )

    def _check_failures(self, num_samples: int, num_failed: int, num_invalid: int, failures: list[Failure]) -> None:
        for failure in failures:
            if failure.is_contract:
                raise RewardError(failure.message)
        none_left = num_samples > 0 and num_invalid == num_samples
        if num_failed > self.max_failure_fraction * num_samples or (none_left and failures):
            raise RewardError(
                f"{num_failed} of {num_samples} samples could not be scored (reward.max_failure_fraction = "
                f"{self.max_failure_fraction:g}); the first: {failures[0]}"
            )
        if none_left:
            raise RewardError(
                f"none of {num_samples} samples got a score: {', '.join(self.names)} abstained from all of them "
                "(is data.answer_column right?)"
            )


def payload_of(sample: RewardSample) -> dict[str, Any]:
    """The sample as the plain values that reward processes get (see `signatures.FIELDS`)."""
    prompt = sample.prompt
    return {
        "prompt": prompt.text,
        "messages": prompt.messages,
        "response": sample.response_text,
        "answer": prompt.answer,
        "data_source": prompt.data_source,
        "finish_reason": sample.finish_reason,
        "response_ids": list(sample.response_ids),
        "num_tokens": len(sample.response_ids),
        "prompt_id": prompt.prompt_id,
        "sample_id": sample.sample_id,
        "extra": prompt.extra,
    }


def _component(outcome: Outcome) -> float:
    return math.nan if outcome is None or isinstance(outcome, Failure) else outcome


def _check_name(name: str) -> str:
    if (
        name in NAMES
        or (name.startswith("python:") and name.count(":") >= 2)
        or name.removeprefix(MODEL) not in ("", name)
    ):
        return name
    close = get_close_matches(name, NAMES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = f"{', '.join(NAMES)}, python:package.module:function or model:PATH"
    raise ConfigError(f"reward.functions: unknown reward {name!r}{hint} (known: {known})")


def component_names(functions: Sequence[str]) -> list[str]:
    """What `reward.functions` are called as components: a Python function by its own name, a model by the last part of
    its path, repeats numbered."""
    names: list[str] = []
    for function in functions:
        is_model = function.startswith(MODEL)
        base = function.rstrip("/").rsplit("/", 1)[-1].removeprefix(MODEL) if is_model else function.rsplit(":", 1)[-1]
        taken = sum(name == base or name.rsplit("_", 1)[0] == base for name in names)
        names.append(f"{base}_{taken + 1}" if taken else base)
    return names


def _compile(key: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else builtin.compile_pattern(pattern)
    except re.error as error:
        raise ConfigError(f"reward.{key} = {pattern!r}: not a regular expression ({error})") from None


def _in_order(taken: list[_Pending], sample_ids: Sequence[int] | None) -> list[_Pending]:
    by_id = {pending.sample.sample_id: pending for pending in taken}
    if len(by_id) != len(taken):
        raise RewardError("two submitted samples have the same sample_id")
    if sample_ids is None:
        return taken
    if sorted(sample_ids) != sorted(by_id):
        raise RewardError(f"collect: {len(sample_ids)} sample ids asked for, {len(by_id)} other samples submitted")
    return [by_id[i] for i in sample_ids]
