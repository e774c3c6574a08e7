"""Bytes that an op has to move and operations that it has to do, whoever computes it: the floor of a measurement.

    floor_s = max(bytes / bandwidth, flops / peak)        fraction of the floor = floor_s / measured_s

`batch_cost(op, ...)` counts the ops over tokens and samples (float32 values, one-byte masks). Sizes are elements.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT, MASK = 4, 1


@dataclass(frozen=True)
class Cost:
    """What one call has to do at least."""

    bytes: int
    flops: int

    def floor_s(self, bandwidth: float, peak_flops: float) -> float:
        """Seconds at a card's measured copy bandwidth (bytes/s) and matmul rate (flop/s)."""
        return max(self.bytes / bandwidth, self.flops / peak_flops)


# op -> (float32 values read per token, values written per token, operations per token), with a mask
_PER_TOKEN = {
    "gae": (2, 2, 8),
    "discounted_returns": (1, 1, 3),
    "whiten": (1, 1, 8),  # with given statistics; computing them reads x and the mask once more
    "masked_stats": (1, 0, 6),
    "clipped_policy_loss": (3, 0, 25),  # the loss alone; its gradient is one more value written
    "clipped_policy_loss+grad": (3, 1, 25),
    "clipped_value_loss": (3, 0, 12),
    "clipped_value_loss+grad": (3, 1, 12),
    "kl_divergence": (2, 1, 8),
    "aggregate": (1, 0, 3),
    "mismatch_stats": (2, 0, 25),
}
_WITHOUT_MASK = {"kl_divergence"}


def batch_cost(op: str, tokens: int) -> Cost:
    """Cost of a token-level op on `tokens` tokens."""
    read, written, operations = _PER_TOKEN[op]
    size = FLOAT * (read + written) + (0 if op in _WITHOUT_MASK else MASK)
    return Cost(size * tokens, operations * tokens)


def group_cost(samples: int) -> Cost:
    """group_normalize: a score and an id in, a value out. In practice bound by the launch."""
    return Cost((FLOAT + 8 + FLOAT) * samples, 10 * samples)


def pack_cost(values: int, source_bytes: int = 4, target_bytes: int = 2) -> Cost:
    """pack_weights: every value read and written once."""
    return Cost((source_bytes + target_bytes) * values, 0)


def head_cost(rows: int, hidden: int, vocabulary: int, products: int, value_bytes: int = 2) -> Cost:
    """`products` matrix products of [rows, hidden] x [hidden, vocabulary]: 1 forward, 3 with both gradients, 4 if the
    forward is done again."""
    size = value_bytes * (rows * hidden + hidden * vocabulary) + FLOAT * rows
    return Cost(size, 2 * products * rows * hidden * vocabulary)


def logits_cost(rows: int, vocabulary: int, passes: int, value_bytes: int = 2) -> Cost:
    """`passes` over logits [rows, vocabulary]: 1 to read them, 2 with the gradient written in their place."""
    return Cost(passes * value_bytes * rows * vocabulary, 5 * passes * rows * vocabulary)
