"""Rewards: functions that judge responses, and the pool that calls them.

The names below are loaded when asked for, so that reward processes start without importing torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastrl.rewards.base import RewardResult, RewardSample
    from fastrl.rewards.pool import RewardPool

__all__ = ["RewardPool", "RewardResult", "RewardSample"]


def __getattr__(name: str) -> Any:
    if name == "RewardPool":
        from fastrl.rewards.pool import RewardPool

        return RewardPool
    if name in ("RewardResult", "RewardSample"):
        from fastrl.rewards import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
