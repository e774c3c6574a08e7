"""Which engine a run generates with, decided from the configuration and what is installed, without importing it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from fastrl.config.schema import Config

BUILTIN = "builtin:"


@dataclass(frozen=True)
class EngineChoice:
    """The engine and, in words, why."""

    name: str  # native or vllm
    reason: str


def choose_engine(config: Config) -> EngineChoice:
    """`rollout.engine`, with `auto` resolved: vLLM where it is installed and can do what the run asks for."""
    rollout = config.rollout
    if rollout.engine != "auto":
        return EngineChoice(rollout.engine, "as configured")
    if importlib.util.find_spec("vllm") is None:
        return EngineChoice("native", "vLLM is not installed")
    if config.run.dtype == "float64":
        return EngineChoice("native", "vLLM has no float64")
    if config.model.path.startswith(BUILTIN):
        return EngineChoice("native", f"{config.model.path} takes longer to load into vLLM than to train a step")
    return EngineChoice("vllm", "vLLM is installed")
