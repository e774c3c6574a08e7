"""vLLM in this process, one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip

import torch
from vllm import LLM, SamplingParams


class Generate:
    """Samples of some prompts; `check` gives their greedy tokens."""

    def __init__(self, d: dict[str, torch.Tensor], model: str, samples: int, tokens: int, greedy: int) -> None:
        ids, lengths = d["prompts"], d["lengths"].tolist()
        self.prompts = [{"prompt_token_ids": row[:n].tolist()} for row, n in zip(ids, lengths)]
        self.samples, self.tokens, self.greedy, self.seed = samples, tokens, greedy, 0
        self.engine = LLM(
            model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=2 << 30, enforce_eager=True,
            enable_prefix_caching=True, max_num_seqs=64,
        )  # fmt: skip

    def __call__(self) -> Any:
        self.seed += 1
        self.engine.reset_prefix_cache()  # as after an update of the weights
        params = SamplingParams(
            n=self.samples, temperature=1.0, max_tokens=self.tokens, ignore_eos=True, seed=self.seed
        )  # fmt: skip
        self.engine.generate(self.prompts, params, use_tqdm=False)

    def check(self) -> torch.Tensor:
        params = SamplingParams(temperature=0.0, max_tokens=self.greedy, ignore_eos=True)
        done = self.engine.generate(self.prompts, params, use_tqdm=False)
        return torch.tensor([list(request.outputs[0].token_ids) for request in done])


def generate(d: dict[str, torch.Tensor], **options: Any) -> Callable[[], Any]:
    """See `Generate`."""
    return Generate(d, **options)
