"""Losses and estimators that tests name in configurations."""

from __future__ import annotations

import math

from fastrl.algorithms.losses.base import TokenLoss


def mean_loss(log_prob, advantages):
    """A loss that takes the mean itself, which broadcasting would hide."""
    return TokenLoss((-log_prob * advantages).mean())


def no_token_loss(log_prob, advantages):
    """The bare tensor."""
    return -log_prob * advantages


def not_a_number(log_prob, advantages):
    """NaN in every token."""
    return TokenLoss(log_prob * math.nan)


def far_from_reference(log_prob, advantages, ref_log_prob):
    """Policy gradient that reports the distance to the reference."""
    return TokenLoss(-log_prob * advantages, {"distance": (log_prob - ref_log_prob).detach()})


def mean_advantage(scores, group_id):
    """One number for the whole batch."""
    return scores.mean()


def one_of_two(token_level_rewards, response_mask):
    """Advantages without returns."""
    return token_level_rewards
