"""The embedded engine: generates with the trainer's own module, in the trainer's process.

Each distinct prompt is computed once, samples share its keys and values and everything they have drawn in common,
finished samples leave the batch at once, and a sample depends on nothing but weights, prompt, parameters and its seed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.errors import EngineError, ModelError
from fastrl.models.double import keep_double
from fastrl.models.head import head_of
from fastrl.rollout.engine import EngineHealth, GenerationRequest, Sample, SamplingParams, WakePart, check_requests
from fastrl.rollout.generation import CallStatistics, Generation, Running
from fastrl.rollout.plain_decoder import PlainDecoder, is_sharded, largest_difference, why_not_plain
from fastrl.rollout.runner import ModuleRunner, Runner, uses_layouts

# How far the fast forward pass may be from the model's own, relative to the largest logit.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class NativeEngine:
    """See `Engine` for the methods.

    Args:
        model: a causal LM loaded by `fastrl.models.load.load_model`; the engine reads its parameters in place.
        stop_token_ids: ids that end a response (`fastrl.models.load.stop_token_ids`).
        tokenizer: needed for stop strings only.
        kv_budget_tokens: key/value space in tokens, prompts once per group and max_tokens per sample; None is no limit.
        autocast_dtype: compute type of matrix products (torch.bfloat16), or None for the parameters' own.
        max_prefill_tokens: prompt tokens per prefill pass; a longer prompt goes alone.
        share_prefixes: samples of a prompt that have drawn the same tokens so far are computed once.
        fast_path: None uses PlainDecoder on a CPU where the model is plain and a probe agrees with the model's own
            forward pass; True asks for it on any device, False always takes the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Iterable[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_budget_tokens: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        max_prefill_tokens: int = 8192,
        share_prefixes: bool = True,
        fast_path: bool | None = None,
    ) -> None:
        if not uses_layouts(model):
            raise ModelError(f"{type(model).__name__}: the attention is not fastrl's, load it with fastrl.models.load")
        self.model = model
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(int(i) for i in stop_token_ids)
        self.kv_budget_tokens = kv_budget_tokens
        self.autocast_dtype = autocast_dtype
        self.max_prefill_tokens = max_prefill_tokens
        self.share_prefixes = share_prefixes
        self.policy_version = 0
        self.device = next(model.parameters()).device
        self.vocabulary_size = int(head_of(model).weight.shape[0])
        self._runner: Runner = ModuleRunner(model, self.device)
        self.general_because = self._choose_runner(fast_path)
        self._current: Generation | None = None
        self._abort = threading.Event()
        self._asleep = False
        self._closed = False
        self.last_call = CallStatistics()  # what the generate before cost

    def _choose_runner(self, fast_path: bool | None) -> str | None:
        """Take the fast forward pass if it is wanted and right; otherwise the reason why not."""
        sharded = is_sharded(self.model)
        if not sharded and (fast_path is False or (fast_path is None and self.device.type != "cpu")):
            return "not asked for"
        reason = why_not_plain(self.model)
        if reason is not None and sharded:
            raise ModelError(
                f"the embedded engine cannot generate from sharded parameters here, {reason}: ranks take different "
                "numbers of decoding steps, and each would gather them; set parallel.shard = 1 to keep whole models"
            )
        if reason is not None:
            return reason
        fast = PlainDecoder(self.model, self.device, autocast_dtype=self.autocast_dtype)
        if sharded:  # the trunk alone cannot run to be compared with
            self._runner = fast
            return None
        with self._modes():
            difference = largest_difference(self._runner, fast, self.device, self.vocabulary_size)
        fast.release()
        if not difference <= _TOLERANCES[fast.dtype]:
            reason = f"its logits differ from the model's own by {difference:.1e} of the largest"
            warnings.warn(f"{type(self.model).__name__}: fast forward pass not used, {reason}", stacklevel=3)
            return reason
        self._runner = fast
        return None

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Inference mode, autocast where asked for, float64 kept, and the model in evaluation mode."""
        training = self.model.training
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(keep_double(self.model))
            if self.autocast_dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.autocast_dtype))
            if training:
                self.model.eval()
                stack.callback(self.model.train)
            yield

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Iterator[Sample]:
        """Yield each sample as it finishes; see Engine.generate."""
        self._require_open()
        if self._asleep:
            raise EngineError("generate on a sleeping engine: call wake() first")
        if self._current is not None:
            raise EngineError("generate while another generate is running: exhaust or close its iterator first")
        check_requests(requests, self.vocabulary_size)
        self._check_context(requests, params)
        if params.stop and self.tokenizer is None:
            raise EngineError("stop strings need a tokenizer: pass one to NativeEngine, or use stop_token_ids")
        own: frozenset[int] = frozenset() if params.ignore_eos else self.stop_token_ids
        generation = Generation(
            self._runner,
            self.device,
            requests,
            params,
            stop_ids=own | frozenset(params.stop_token_ids),
            decode=self._decode,
            vocabulary_size=self.vocabulary_size,
            kv_budget_tokens=self.kv_budget_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            share_prefixes=self.share_prefixes,
        )
        return self._stream(generation)

    def _stream(self, generation: Generation) -> Iterator[Sample]:
        if self._current is not None:
            raise EngineError("generate while another generate is running: exhaust or close its iterator first")
        self._abort.clear()
        self._current = generation
        self._runner.expect(generation.params.max_tokens)  # the same on every rank, and whatever was generated before
        self._runner.prepare()
        try:
            while not generation.done:
                with self._modes():  # for one step only: a generator would leak them to its consumer
                    finished = generation.abort() if self._abort.is_set() else generation.step()
                for sample in finished:
                    yield self._sample(sample)
        finally:
            generation.close()
            self._current = None
            self.last_call = generation.statistics

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(tokens))

    def _sample(self, running: Running) -> Sample:
        assert running.finish_reason is not None
        return Sample(
            request_id=running.request_id,
            sample_index=running.sample_index,
            token_ids=torch.tensor(running.tokens, dtype=torch.int64),
            log_probs=torch.tensor(running.log_probs, dtype=torch.float32),
            finish_reason=running.finish_reason,
            policy_version=self.policy_version,
        )

    def _check_context(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for request in requests:
            limit = params.max_tokens if request.max_tokens is None else request.max_tokens
            need = len(request.prompt_ids) + limit - 1  # the last token is not fed
            if context is not None and need > context:
                raise EngineError(
                    f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens and a response of up "
                    f"to {limit} exceed the model's context of {context} tokens: lower rollout.max_response_tokens or "
                    "data.max_prompt_tokens"
                )

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Count the update; the parameters themselves are shared. Copies of parameters are renewed."""
        self._require_open()
        if self._current is not None:
            raise EngineError("update_weights while samples are being generated: abort() or finish them first")
        if model is not self.model:
            raise EngineError("the embedded engine generates with the module it was made with: pass that one")
        self.policy_version = version
        self._runner.refresh()

    def sleep(self, level: int = 1) -> None:
        """Free copies of parameters (key/value space never outlives a generate); the parameters are the trainer's."""
        self._require_open()
        if self._current is not None:
            raise EngineError("sleep while samples are being generated: abort() or finish them first")
        self._runner.release()
        self._asleep = True

    def wake(self, what: Sequence[WakePart] = ("weights", "kv")) -> None:
        """Ready again once the key/value space is asked for."""
        self._require_open()
        if "kv" in what:
            self._asleep = False

    def reset_prefix_cache(self) -> None:
        """Nothing to forget: keys and values live no longer than one generate."""
        self._require_open()

    def abort(self) -> None:
        """End the running generate at its next step."""
        self._abort.set()

    def health(self) -> EngineHealth:
        """State of the engine."""
        current = self._current
        return EngineHealth(
            alive=not self._closed,
            policy_version=self.policy_version,
            sleeping=self._asleep,
            num_running=0 if current is None else len(current.active),
            num_waiting=0 if current is None else current.num_waiting,
            kv_tokens_used=0 if current is None else current.used,
            kv_tokens_budget=self.kv_budget_tokens,
            detail="closed" if self._closed else "",
        )

    def close(self) -> None:
        """Free copies of parameters and refuse further calls."""
        if not self._closed:
            self._runner.release()
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
