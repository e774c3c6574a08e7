"""fastrl trains language models with reinforcement learning: PPO, GRPO and their families."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrl.config import Config, dump_config, load_config
    from fastrl.errors import FastRLError

__version__ = "0.1.0"
__all__ = ["Config", "FastRLError", "__version__", "dump_config", "load_config"]

_HOMES = {
    "Config": "fastrl.config",
    "FastRLError": "fastrl.errors",
    "dump_config": "fastrl.config",
    "load_config": "fastrl.config",
}


def __getattr__(name: str) -> object:
    """Public names are imported when first asked for, so that `import fastrl` costs nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fastrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
