"""vLLM's weights are written by a plan from the second update on, experts by its own loader; both give HF's tokens."""

import importlib.util

import pytest
from test_vllm_engine import run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", "tied"), ("qwen2", "untied"), ("mixtral", "untied"), ("qwen3_moe", "tied")]
)
def test_direct_load(tmp_path, kind, tied):
    assert "direct load: fine" in run("vllm_direct_load.py", str(tmp_path), kind, tied)
