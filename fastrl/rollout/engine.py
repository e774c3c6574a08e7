"""The protocol between the trainer and whatever generates: requests in, finished samples out, new weights in between.

An engine is an object with the methods of `Engine`; it need not inherit from anything here. The life of one:

    engine = make_engine(...)
    engine.update_weights(model, version=1)          # after every optimizer step
    for sample in engine.generate(requests, params):  # samples arrive as they finish
        ...
    engine.sleep(1); ...; engine.wake(("weights", "kv"))
    engine.close()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from fastrl.data.batch import FinishReason
from fastrl.errors import EngineError
from fastrl.rollout.seeds import sample_seeds

WakePart = Literal["weights", "kv"]


@dataclass(frozen=True)
class SamplingParams:
    """How every sample of a call is drawn.

    The order is temperature, top_k, top_p, min_p. Each of the last three keeps the tokens at or above a threshold (ties
    at the threshold stay), and what is kept is renormalised. `log_probs` of a sample belong to that final distribution.
    """

    temperature: float = 1.0  # 0 is greedy; its log-probs are those of temperature 1
    top_p: float = 1.0  # nucleus mass in (0, 1], of what top_k kept
    top_k: int = 0  # number of tokens kept; 0 is off
    min_p: float = 0.0  # fraction of the largest probability in [0, 1); 0 is off
    max_tokens: int = 256  # response tokens per sample
    stop: tuple[str, ...] = ()  # strings that end a response and stay in it
    stop_token_ids: tuple[int, ...] = ()  # ids that end a response and stay in it, besides the engine's own
    ignore_eos: bool = False  # keep going after the engine's own end-of-sequence ids (benchmarks)
    seed: int = 0  # seeds the samples of requests that bring no seeds

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (off) or more"),
            (0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)"),
            (self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more"),
            (all(self.stop), "stop", self.stop, "strings that are not empty"),
        )
        for good, name, value, expected in checks:
            if not good:
                raise EngineError(f"{name} = {value!r}: expected {expected}")

    @property
    def truncated(self) -> bool:
        """Whether some tokens are cut from the distribution (then importance ratios are off by the kept mass)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how many samples it gets. Requests with equal prompts share its keys and values."""

    request_id: int  # comes back on every sample; unique within a call
    prompt_ids: Sequence[int]  # rendered prompt, at least one token
    num_samples: int = 1
    seeds: Sequence[int] | None = None  # one per sample, 0 <= seed < 2**63; None derives them from SamplingParams.seed
    temperature: float | None = None  # replaces SamplingParams.temperature, e.g. 0 for a greedy baseline
    max_tokens: int | None = None  # replaces SamplingParams.max_tokens, e.g. what is left of a conversation

    def sample_seeds(self, params: SamplingParams) -> tuple[int, ...]:
        """The seed of each sample."""
        if self.seeds is None:
            return tuple(sample_seeds(params.seed, 0, self.request_id, self.num_samples))
        if len(self.seeds) != self.num_samples:
            raise EngineError(
                f"request {self.request_id} has {len(self.seeds)} seeds for {self.num_samples} samples: give one each"
            )
        return tuple(int(seed) for seed in self.seeds)


@dataclass(frozen=True)
class Sample:
    """One finished response of L tokens. On the CPU whatever the engine runs on."""

    request_id: int
    sample_index: int  # 0 .. num_samples - 1 within its request
    token_ids: Tensor  # [L] int64, the id that ended it included
    log_probs: Tensor  # [L] float32, of each token under the distribution it was drawn from
    finish_reason: FinishReason
    policy_version: int  # `version` of the last update_weights before the sample was drawn


@dataclass(frozen=True)
class EngineHealth:
    """What an engine says about itself; cheap, callable at any time."""

    alive: bool
    policy_version: int  # of the weights it holds
    sleeping: bool
    num_running: int  # samples being generated now
    num_waiting: int  # samples queued for lack of key/value space
    kv_tokens_used: int  # tokens of key/value space reserved now
    kv_tokens_budget: int | None  # None: as much as the batch needs
    detail: str = ""  # the reason when alive is False
    restarts: int = 0  # times it died and was started again


@runtime_checkable
class Engine(Protocol):
    """What the trainer calls. One call at a time, except abort() and health(), which any thread may call.

    An engine that cannot give log-probs (its samples' are NaN) says so with an attribute `gives_log_probs = False`.
    """

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Iterator[Sample]:
        """Yield each sample as it finishes, in any order; exactly num_samples per request.

        A sample is a function of (weights, prompt, params, its seed) and never of what else is in the call. Closing the
        iterator early drops the rest and frees their space.

        Raises:
            EngineError: a prompt is empty, a single sample exceeds the key/value space or the context of the model,
                or the engine died.
        """
        ...

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Generate from the weights of `model` from now on; stale prefix caches are dropped with it."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Free memory until wake: level 1 the key/value space and copies of weights, level 2 every weight it owns."""
        ...

    def wake(self, what: Sequence[WakePart] = ("weights", "kv")) -> None:
        """Take memory back, all at once or in stages (weights, update, key/value space)."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        ...

    def abort(self) -> None:
        """End the running generate soon: it yields what it has of every unfinished sample with FinishReason.abort."""
        ...

    def health(self) -> EngineHealth:
        """State of the engine, without touching the device."""
        ...

    def close(self) -> None:
        """Free everything; later calls raise EngineError. Closing twice is fine."""
        ...


def check_requests(requests: Sequence[GenerationRequest], vocabulary_size: int) -> None:
    """Refuse what no engine can do, naming the request: empty prompts, repeated ids, ids outside the vocabulary."""
    seen: set[int] = set()
    for request in requests:
        name = f"request {request.request_id}"
        if request.request_id in seen:
            raise EngineError(f"{name} appears twice in one call: request_id must be unique")
        seen.add(request.request_id)
        if len(request.prompt_ids) == 0:
            raise EngineError(f"{name} has an empty prompt: give at least one token (a beginning-of-sequence id does)")
        if request.num_samples < 1:
            raise EngineError(f"{name} asks for {request.num_samples} samples: expected 1 or more")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise EngineError(f"{name} has max_tokens = {request.max_tokens}: expected 1 or more")
        if request.temperature is not None and request.temperature < 0:
            raise EngineError(f"{name} has temperature = {request.temperature}: expected 0 (greedy) or more")
        wrong = [i for i in (min(request.prompt_ids), max(request.prompt_ids)) if not 0 <= i < vocabulary_size]
        if wrong:
            raise EngineError(f"{name} has the prompt id {wrong[0]}, the model has {vocabulary_size}: other tokenizer?")
