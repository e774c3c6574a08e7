"""Rules about how new weights reach the engine."""

from __future__ import annotations

from collections.abc import Iterator

from fastrl.config.findings import Finding, Rule, Subject, error, no_effect

KEYS = ("bucket_gib", "weight_transport", "verify_weights", "zero_copy")


def delivery(subject: Subject) -> Iterator[Finding]:
    """The embedded engine uses the trainer's own weights: nothing is delivered to it."""
    if subject.config.rollout.engine == "native":
        for key in KEYS:
            if f"rollout.{key}" in subject.set_keys:
                yield no_effect(f"rollout.{key}", "rollout.engine = native uses the trainer's own weights")


def zero_copy(subject: Subject) -> Iterator[Finding]:
    """Shared weights are the engine's: of one of its types, and never moved or dropped."""
    rollout, run = subject.config.rollout, subject.config.run
    if not rollout.zero_copy or rollout.engine == "native":
        return
    if run.dtype == "float64":
        yield error(
            "rollout.zero_copy",
            "run.dtype",
            text="rollout.zero_copy shares the engine's weights, but run.dtype = float64 is none of its types: "
            "set run.dtype = bfloat16 or rollout.zero_copy = false",
        )
    if rollout.offload == "all":
        yield error(
            "rollout.zero_copy",
            "rollout.offload",
            text="rollout.offload = all moves weights away with which, by rollout.zero_copy, the engine computes: "
            "set rollout.offload = optimizer or rollout.zero_copy = false",
        )
    if rollout.sleep_level:
        yield error(
            "rollout.zero_copy",
            "rollout.sleep_level",
            text=f"rollout.sleep_level = {rollout.sleep_level} lets the engine drop its weights, which by "
            "rollout.zero_copy are the trainer's: set rollout.sleep_level = 0",
        )


RULES: tuple[Rule, ...] = (delivery, zero_copy)
