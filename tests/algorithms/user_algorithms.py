"""A user's own module: one registered loss, plain functions that are not registered."""

import torch

from fastrl.algorithms import register_advantage, register_policy_loss
from fastrl.algorithms.losses.base import TokenLoss


@register_policy_loss(
    "squared_ratio", needs=("rollout_log_prob",), check=lambda *, power: "odd" if power == 13 else None
)
def squared_ratio(log_prob, old_log_prob, advantages, rollout_log_prob=None, *, power: int = 2):
    """Minus the advantage times a power of the ratio."""
    rho = (log_prob - old_log_prob).exp()
    return TokenLoss(-advantages * rho**power, {"ratio": rho.detach()})


@register_advantage("clipped_scores", level="sequence")
def clipped_scores(
    scores, group_id, *, limit: float = 1.0, names: list[str] | None = None, pair: tuple[int, int] = (1, 2)
):
    """Scores, clipped."""
    return scores.clamp(-limit, limit)


def centred(scores, valid=None):
    """Scores less their mean."""
    return scores - scores.mean()


def per_token(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards


def of_sequences(log_prob, advantages, cu_seqlens, loss_mask):
    return TokenLoss(-log_prob * advantages)


def picky(log_prob, selection):
    return TokenLoss(log_prob)


def reads_fog(log_prob, ratios):
    return TokenLoss(log_prob * ratios)


def of_nothing(*, scale: float = 1.0):
    return TokenLoss(torch.zeros(1))


NOT_A_FUNCTION = torch.zeros(1)
