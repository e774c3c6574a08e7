"""The parts a run is made of, and which of them a configuration asks for.

A role that is not needed is never loaded. `roles_of(config)` is the whole decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from fastrl.algorithms.registry import Entry, get_advantage, get_policy_loss
from fastrl.config.schema import Config
from fastrl.trainer.engine_choice import choose_engine


class Role(Enum):
    """What a group of weights or a worker does in the loop."""

    Actor = "actor"  # the policy being trained
    Rollout = "rollout"  # the engine that samples from the policy
    ActorRollout = "actor_rollout"  # one module serves both (the embedded engine)
    Critic = "critic"  # value model
    RefPolicy = "ref_policy"  # frozen policy that the KL terms compare with
    RewardModel = "reward_model"  # learned scorer
    ActorRolloutRef = "actor_rollout_ref"  # one module serves all three (adapters that can be switched off)
    Env = "env"  # environment of a multi-turn rollout
    TeacherModel = "teacher_model"  # larger policy that is distilled


def inputs_of(entry: Entry, options: Mapping[str, Any] | None = None) -> frozenset[str]:
    """What an algorithm needs: what it was registered with, and what its parameters without a default name."""
    return entry.needs_with(options) | (frozenset(entry.data) - entry.optional_data)


def needs_critic(config: Config) -> bool:
    """True when the advantage estimator reads values."""
    return "values" in inputs_of(get_advantage(config.algorithm.advantage))


def needs_reference(config: Config) -> bool:
    """True when a KL term, in the reward or in the loss, has a weight, or the policy loss takes ref_log_prob."""
    a = config.algorithm
    return a.kl_loss_coef > 0 or a.kl_reward_coef > 0 or "ref_log_prob" in inputs_of(get_policy_loss(a.policy_loss))


def needs_reward_model(config: Config) -> bool:
    """True when a reward component is a learned scorer."""
    return any(name.startswith("model:") for name in config.reward.functions)


def needs_teacher(config: Config) -> bool:
    """True when the advantage or the loss compares with a teacher."""
    return "teacher" in inputs_of(get_advantage(config.algorithm.advantage))


def roles_of(config: Config) -> frozenset[Role]:
    """The roles that this configuration loads."""
    roles = {Role.ActorRollout} if choose_engine(config).name == "native" else {Role.Actor, Role.Rollout}
    for role, needed in (
        (Role.Critic, needs_critic(config)),
        (Role.RefPolicy, needs_reference(config)),
        (Role.RewardModel, needs_reward_model(config)),
        (Role.TeacherModel, needs_teacher(config)),
    ):
        if needed:
            roles.add(role)
    return frozenset(roles)
