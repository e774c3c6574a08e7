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
    """Shared weights are the engine's: bf16, and on the device of both."""
    rollout, run = subject.config.rollout, subject.config.run
    if not rollout.zero_copy:
        return
    if run.dtype != "bfloat16":
        yield error(
            "rollout.zero_copy",
            "run.dtype",
            text=f"rollout.zero_copy shares bf16 weights with the engine, but run.dtype = {run.dtype}: "
            "set run.dtype = bfloat16 or rollout.zero_copy = false",
        )
    if rollout.weight_transport == "in_process":
        yield error(
            "rollout.zero_copy",
            "rollout.weight_transport",
            text="rollout.zero_copy shares memory between two processes, but rollout.weight_transport = in_process: "
            "use auto, or rollout.zero_copy = false",
        )


RULES: tuple[Rule, ...] = (delivery, zero_copy)
