"""vLLM as a rollout backend: token ids in and out, seeds per sample, log-probs of the distribution drawn from.

The only package that imports vllm. It holds one engine in the process it runs in, which is a child of the trainer
unless `rollout.vllm_in_process` is set. Weights come through vLLM's own weight-transfer extension point, as an iterator
(`transfer.py`), or are the trainer's memory (`shared.py`).
"""

from __future__ import annotations

import os

# Before vllm is imported: the engine's core stays in this process, and nothing is reported to anybody.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from fastrl.rollout.vllm.backend import VLLMBackend

__all__ = ["VLLMBackend"]
