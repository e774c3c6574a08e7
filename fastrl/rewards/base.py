"""What a reward is made of: samples in, one outcome per function and sample, one score per sample out.

An outcome is a number, an abstention (None: "not mine to judge") or a failure. Scores are never invented: a sample
with a failed function, or one that nobody judged, is unscorable and leaves baselines and loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fastrl.errors import RewardError

MAX_SCORE = (
    1e15  # the square is still finite in float32: beyond it, group statistics would be infinite and teach nothing
)

if TYPE_CHECKING:
    from torch import Tensor

    from fastrl.data.prompts import Prompt


@dataclass(frozen=True)
class RewardSample:
    """One generated response. `response_text` holds sampled tokens only, without the end-of-sequence token."""

    prompt: Prompt
    response_text: str
    response_ids: tuple[int, ...]  # the sampled ids, end-of-sequence included: their number is the length
    finish_reason: str = "stop"  # stop | length | abort
    sample_id: int = 0  # unique among the samples collected together


@dataclass(frozen=True)
class Failure:
    """Why a function could not judge a sample: one line, and the traceback where there was an exception."""

    function: str
    message: str
    traceback: str = ""
    is_contract: bool = False  # the function broke its contract for the whole batch: the run stops

    def __str__(self) -> str:
        return f"{self.function}: {self.message}" + (f"\n{self.traceback.rstrip()}" if self.traceback else "")


Outcome = float | None | Failure


class Judge(Protocol):
    """A scorer in the trainer's process, e.g. a reward model."""

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[Outcome]:
        """One outcome per sample of a `collect`, which may have none: ranks call it equally often."""

    def take_tokens(self) -> int:
        """Tokens scored since the last call."""


@dataclass(frozen=True)
class RewardResult:
    """Scores of S samples in the order they were submitted (or asked for); every count is of samples."""

    sample_ids: list[int]  # [S]
    scores: Tensor  # [S] float32 after weights, overlong shaping and clipping; 0 where not valid
    valid: Tensor  # [S] bool, False = unscorable
    components: dict[str, Tensor]  # function name -> [S] float32 before weights, NaN = abstained or failed
    length_penalties: Tensor  # [S] float32, 0 or less: the overlong shaping in the scores
    num_failed: int  # samples for which a function raised, hung, or returned something that is no score
    num_abstained: int  # samples that every function abstained from
    num_clipped: int  # scores that met clip_min or clip_max
    errors: list[str] = field(default_factory=list)  # the first few failures, one text each


def check_score(function: str, value: Any) -> Outcome:
    """What one returned value means: a finite number, None (abstained), or a Failure that says what was wrong."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return Failure(function, f"returned the text {value[:40]!r} instead of a number")
    number = value
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)) and getattr(value, "size", 1) != 0:
        try:
            number = value.item()  # a NumPy scalar or a tensor of one element
        except (TypeError, ValueError, RuntimeError):
            number = value
    if not isinstance(number, int | float) or getattr(value, "shape", ()) != ():
        return Failure(function, f"returned a {type(value).__name__} ({str(value)[:40]}) instead of a number")
    if not math.isfinite(number) or abs(number) > MAX_SCORE:
        large = f", larger than a score may be ({MAX_SCORE:g})" if math.isfinite(number) else ""
        return Failure(function, f"returned {number:g}{large}")
    return float(number)


def check_batch_scores(function: str, values: Any, num_samples: int) -> list[Outcome]:
    """The outcomes of a function that judges a batch at once.

    Raises:
        RewardError: the value is no list of numbers, or has another length than the batch; names function and counts.
    """
    if hasattr(values, "tolist") and getattr(values, "shape", ()) != ():
        values = values.tolist()  # NumPy arrays and tensors
    if isinstance(values, str | bytes | dict) or not isinstance(values, Sequence):
        shown = f"a {type(values).__name__} ({str(values)[:40]})"
        raise RewardError(f"reward function {function} returned {shown} for {num_samples} responses instead of a list")
    if len(values) != num_samples:
        raise RewardError(f"reward function {function} returned {len(values)} scores for {num_samples} responses")
    outcomes = [check_score(function, value) for value in values]
    for value, outcome in zip(values, outcomes):
        if isinstance(outcome, Failure) and not isinstance(value, int | float):
            raise RewardError(f"reward function {function}: {outcome.message} for one of {num_samples} responses")
    return outcomes


def combine_outcomes(outcomes: Sequence[Outcome], weights: Sequence[float]) -> float | None:
    """sum_k w_k s_k over the functions that answered; None when one failed or none answered.

    Args:
        outcomes: one per function.
        weights: one per function.
    """
    if any(isinstance(outcome, Failure) for outcome in outcomes):
        return None
    answered = [w * s for w, s in zip(weights, outcomes) if s is not None and not isinstance(s, Failure)]
    return math.fsum(answered) if answered else None
