"""How large an engine's key/value space is, in tokens and bytes.

bytes per token = 2 * layers * key/value heads * head size * bytes per number
"""

from __future__ import annotations

import os
from typing import Any

BLOCK_TOKENS = 32  # the engine hands space out in blocks; the last block of a sample is half empty on average


def kv_bytes_per_token(config: Any, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of one token's keys and values on one process of the engine.

    Args:
        config: Hugging Face configuration of the text model.
        itemsize: bytes of one number.
        tensor_parallel_size: processes that share the heads; each holds at least one.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * max(1, kv_heads // tensor_parallel_size) * head_size * itemsize


def kv_bytes(tokens: int, config: Any, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of a space that holds `tokens` tokens: whole blocks, and one that the engine keeps for itself."""
    blocks = -(-tokens // BLOCK_TOKENS) + 1
    return blocks * BLOCK_TOKENS * kv_bytes_per_token(config, itemsize, tensor_parallel_size)


def wanted_kv_tokens(num_samples: int, max_running: int, max_sequence_tokens: int) -> int:
    """Tokens of space with which no sample of a batch ever waits: every running sample at its longest, in blocks."""
    per_sample = (-(-max_sequence_tokens // BLOCK_TOKENS)) * BLOCK_TOKENS
    return max(1, min(num_samples, max_running)) * per_sample


def free_memory() -> int:
    """Bytes of main memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next((line for line in lines if line.startswith("MemAvailable:")), None)
        if found is not None:
            return int(found.split()[1]) * 1024
    except OSError:
        pass  # no /proc: what the C library knows
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
