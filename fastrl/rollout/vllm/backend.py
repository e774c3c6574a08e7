"""The backend: samples in, samples out, one step at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as torch_dist
import vllm
from torch import Tensor
from vllm.sampling_params import RequestOutputKind

from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendInfo, BackendSettings, Draw, Drawn, Load, SharedTensors
from fastrl.rollout.engine import SamplingParams, WakePart
from fastrl.rollout.vllm.shared import in_place
from fastrl.rollout.vllm.start import start, version_warnings
from fastrl.rollout.vllm.transfer import register

PARTS = {"weights": "weights", "kv": "kv_cache"}


class VLLMBackend:
    """See `Backend` for the methods."""

    def __init__(self, settings: BackendSettings, shared: SharedTensors | None = None) -> None:
        self.settings = settings
        self.group: torch_dist.ProcessGroup | None = None
        if settings.tensor_parallel_size > 1:
            self._join(settings)
        register()
        self.engine = start(
            settings if shared is None else replace(settings, options=in_place(settings.options, shared))
        )
        if settings.tensor_parallel_size > 1:
            self.group = torch_dist.new_group(backend="gloo")
        config = self.engine.vllm_config
        cache = config.cache_config
        self.info = BackendInfo(
            name=f"vLLM {vllm.__version__}",
            context=int(config.model_config.max_model_len),
            kv_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            warnings=tuple(version_warnings()),
        )
        self.names: dict[str, int] = {}  # unfinished samples: vLLM's request id -> key

    def _join(self, settings: BackendSettings) -> None:
        """The processes of this engine meet at a file of their own, apart from the trainer's group."""
        size, rank = settings.tensor_parallel_size, settings.tensor_parallel_rank
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ.setdefault("LOCAL_RANK", str(rank))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, but the group exists already
        backend = "nccl" if settings.device == "cuda" else "gloo"
        if settings.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch_dist.init_process_group(backend, init_method=settings.rendezvous, rank=rank, world_size=size)

    def add(self, draws: Sequence[Draw], params: SamplingParams) -> None:
        """Queue samples; see Backend.add."""
        if params.stop and self.settings.tokenizer is None:
            raise EngineError("stop strings need a tokenizer: start the engine with one, or use stop_token_ids")
        for draw in draws:
            name = str(draw.key)
            self.names[name] = draw.key
            prompt: Any = {"prompt_token_ids": list(draw.prompt_ids)}
            self.engine.add_request(name, prompt, sampling(draw, params))

    def step(self) -> list[Drawn]:
        """One token for every running sample; see Backend.step."""
        finished = []
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                finished.append(
                    Drawn(
                        key=self.names.pop(output.request_id),
                        token_ids=list(completion.token_ids),
                        log_probs=sampled_log_probs(completion.logprobs),
                        finish_reason=reason_of(completion.finish_reason),
                    )
                )
        return finished

    def busy(self) -> bool:
        """Whether samples are unfinished."""
        return bool(self.names)

    def abort(self) -> list[Drawn]:
        """End every unfinished sample where it stands; see Backend.abort."""
        processor = self.engine.output_processor
        stopped = []
        for state in list(processor.request_states.values()):
            key = self.names.get(state.external_req_id)
            if key is None or state.detokenizer is None or state.logprobs_processor is None:
                continue
            log_probs = sampled_log_probs(state.logprobs_processor.logprobs)
            token_ids = list(state.detokenizer.output_token_ids)[: len(log_probs)]
            stopped.append(Drawn(key, token_ids, log_probs[: len(token_ids)], "abort"))
        found = {drawn.key for drawn in stopped}
        stopped += [Drawn(key, [], [], "abort") for key in self.names.values() if key not in found]
        self.engine.abort_request(list(self.names))
        self.names.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return stopped

    def load(self) -> Load:
        """How busy it is."""
        core: Any = getattr(self.engine.engine_core, "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if scheduler is None:
            return Load(running=len(self.names))
        running, waiting = scheduler.get_request_counts()
        return Load(running, waiting, round(scheduler.kv_cache_manager.usage * self.info.kv_tokens))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights and forget cached prefixes; see Backend.load_weights."""
        if self.names:
            raise EngineError("update_weights while samples are being generated: abort() or finish them first")
        self.engine.collective_rpc("start_weight_update")
        self.engine.collective_rpc("update_weights", kwargs={"update_info": {"weights": weights}})
        self.engine.collective_rpc("finish_weight_update")
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        if not self.engine.reset_prefix_cache():
            raise EngineError("vLLM kept cached prefixes: some samples still hold blocks")

    def sleep(self, level: int) -> None:
        """Give memory back; see Backend.sleep."""
        self.engine.sleep(level=level)
        if level == 0 and self.settings.sleep_mode:
            self.engine.release_kv_cache_memory()

    def wake(self, what: Sequence[WakePart]) -> None:
        """Take memory again."""
        asleep: set[str] = set(getattr(self._executor(), "sleeping_tags", ()))
        tags = [PARTS[part] for part in what if PARTS[part] in asleep]
        if tags or "kv" in what:
            self.engine.wake_up([*tags, *(["scheduling"] if "kv" in what else [])])

    def _executor(self) -> Any:
        core: Any = getattr(self.engine.engine_core, "engine_core", None)
        return getattr(core, "model_executor", None)

    def agree(self, flag: bool) -> bool:
        """True when `flag` is set on a process of this tensor-parallel engine."""
        if self.group is None:
            return flag
        total = torch.tensor([int(flag)])
        torch_dist.all_reduce(total, op=torch_dist.ReduceOp.MAX, group=self.group)
        return bool(total.item())

    def close(self) -> None:
        """Free everything."""
        self.engine.engine_core.shutdown()


def sampling(draw: Draw, params: SamplingParams) -> vllm.SamplingParams:
    """vLLM's parameters of one sample."""
    return vllm.SamplingParams(
        n=1,
        seed=draw.seed,
        temperature=draw.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=draw.max_tokens,
        stop=list(params.stop) or None,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # the ids that end a response are all in stop_token_ids
        detokenize=bool(params.stop),
        include_stop_str_in_output=True,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def sampled_log_probs(given: Any) -> list[float]:
    """The log-prob of each sampled token: the first entry of its position."""
    if given is None:
        return []
    starts = getattr(given, "start_indices", None)
    if starts is not None:
        return [float(given.logprobs[i]) for i in starts]
    return [float(next(iter(position.values())).logprob) for position in given]


def reason_of(finish_reason: str | None) -> str:
    """stop, length or abort; anything else is no finished sample."""
    if finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM ended a sample with finish_reason = {finish_reason}")
    return finish_reason
