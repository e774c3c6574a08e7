"""Algorithms: small pure functions of tensors, chosen by name. See `registry` for how to add one."""

from fastrl.algorithms.registry import (
    check_options,
    get_advantage,
    get_correction,
    get_kl,
    get_policy_loss,
    list_advantages,
    list_corrections,
    list_kls,
    list_policy_losses,
    register_advantage,
    register_correction,
    register_kl,
    register_policy_loss,
)

__all__ = [
    "check_options",
    "get_advantage",
    "get_correction",
    "get_kl",
    "get_policy_loss",
    "list_advantages",
    "list_corrections",
    "list_kls",
    "list_policy_losses",
    "register_advantage",
    "register_correction",
    "register_kl",
    "register_policy_loss",
]
