"""What happens to a score after the functions have spoken: soft length penalty, bounds."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_tokens: int | None, buffer_tokens: int, factor: float = 1.0) -> float:
    """Soft penalty for responses that end close to the limit (DAPO, https://arxiv.org/abs/2503.14476).

        penalty = -factor * clamp((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)

    Args:
        length: sampled tokens of the response.
        max_tokens: the length limit; not needed when the zone is off.
        buffer_tokens: length of the zone before the limit, in tokens; 0 is off.
        factor: penalty at the limit and beyond, in reward units.
    """
    if buffer_tokens <= 0:
        return 0.0
    if max_tokens is None:
        raise ValueError("max_tokens is needed when buffer_tokens > 0")
    inside = (length - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * min(max(inside, 0.0), 1.0)


def clip_score(score: float, low: float | None, high: float | None) -> float:
    """The score within [low, high]; None is no bound."""
    if low is not None:
        score = max(score, low)
    return min(score, high) if high is not None else score
