"""How vLLM is started, and in words why it could not be."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import EngineArgs, LLMEngine
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from fastrl.errors import EngineError, FastRLError
from fastrl.rollout.backend import BackendSettings
from fastrl.rollout.vllm.transfer import WEIGHT_BACKEND

TESTED_VERSION = "0.32"
BLOCK_TOKENS = 32  # of the key/value space on a CPU, where vLLM's own default of 128 shares few prompts


class OwnRendezvous(ExecutorWithExternalLauncher):
    """One of several processes of an engine that meet at a file: vLLM names shared memory after it."""

    address: str

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return self.address, rank, local_rank


def start(settings: BackendSettings) -> LLMEngine:
    """The engine of these settings. Raises EngineError in words for what vLLM cannot do."""
    given: dict[str, Any] = {
        "model": settings.model,
        "tokenizer": settings.tokenizer,
        "skip_tokenizer_init": settings.tokenizer is None,
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "load_format": "auto" if settings.load_weights else "dummy",
        "seed": settings.seed,
        "max_model_len": settings.max_sequence_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "max_num_seqs": settings.max_running,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",  # the model's own file must not change how samples are drawn
        "enforce_eager": settings.device == "cpu",  # compiling takes over a minute there
        "enable_sleep_mode": settings.sleep_mode,
        "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_BACKEND),
    }
    if settings.memory_fraction is not None:
        given["gpu_memory_utilization"] = settings.memory_fraction
    if settings.device == "cpu":
        given["block_size"] = BLOCK_TOKENS
    if settings.tensor_parallel_size > 1:
        given |= {
            "tensor_parallel_size": settings.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher",
        }
    try:
        config = EngineArgs(**(given | settings.options)).create_engine_config()
        executor: Any = Executor.get_class(config)
        if settings.tensor_parallel_size > 1:
            executor = type("OwnRendezvous", (OwnRendezvous,), {"address": settings.rendezvous})
        return LLMEngine(config, executor_class=executor, log_stats=False, multiprocess_mode=False)
    except FastRLError:
        raise
    except Exception as error:  # vLLM raises many kinds, among them pydantic's
        raise EngineError(explain(settings, error)) from error


def explain(settings: BackendSettings, error: Exception) -> str:
    """What vLLM said, and what to change."""
    text = " ".join(str(error).split())[:600] or type(error).__name__
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return f"rollout.vllm_options: vLLM {vllm.__version__} has no such option ({text})"
    if "are not supported" in text or "no vLLM implementation" in text or "Cannot find model module" in text:
        return (
            f"model.path = {settings.model}: vLLM does not know this architecture, use rollout.engine=native ({text})"
        )
    if "max_model_len" in text or "max_position_embeddings" in text:
        return (
            f"data.max_prompt_tokens + rollout.max_response_tokens = {settings.max_sequence_tokens} tokens are beyond "
            f"the context of {settings.model}: lower one of them ({text})"
        )
    if "KV cache" in text or "kv cache" in text:
        return f"the key/value space is too small or too large, change rollout.kv_budget_tokens ({text})"
    return f"vLLM {vllm.__version__} did not start with {settings.model}: {text}"


def version_warnings() -> list[str]:
    """A warning when this is not the version that fastrl is tested with."""
    if vllm.__version__.split("+")[0].startswith(f"{TESTED_VERSION}."):
        return []
    return [f"vLLM {vllm.__version__} is installed, fastrl is tested with {TESTED_VERSION}.x"]
