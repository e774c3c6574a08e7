"""One parseable line a step: two spaces between fields, `name value` inside a field, units in the value."""

from __future__ import annotations

import math
from collections.abc import Mapping

Values = Mapping[str, float]

TRAIN_PHASES = ("old_log_prob", "reference", "teacher", "values", "advantage", "update_critic", "update_actor")
GENERATE_PHASES = ("generate", "reward")


def short(value: float) -> str:
    """Three significant digits: 0.614, 12.3, 1.2e-3, 18400 -> 18.4k."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'T': 1e12, 'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    return f"{value:.3g}" if size < 999.5 else f"{value:.0f}"


def percent(fraction: float) -> str:
    """0.0213 -> 2.1%, 0.37 -> 37%."""
    size = 100 * fraction
    return f"{size:.1f}%" if 0 < size < 9.95 else f"{size:.0f}%"


def duration(seconds: float) -> str:
    """42s, 3m05s, 2h07m, 3d04h."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def first(values: Values, *names: str) -> float | None:
    """The first of the metrics that is there."""
    for name in names:
        if name in values:
            return values[name]
    return None


def cells(values: Values) -> dict[str, str]:
    """Label -> text of what a line and a table show of a step; what was not measured is left out."""
    found: dict[str, str] = {}

    def put(label: str, number: float | None, form=short) -> None:  # type: ignore[no-untyped-def]
        if number is not None:
            found[label] = form(number)

    put("reward", first(values, "reward/mean"), lambda x: f"{x:.3f}")
    put("val", first(values, "val/mean"), lambda x: f"{x:.3f}")
    # With one update per batch the policy is the old one, and its distance of 0 says nothing.
    put("kl", first(values, "kl/reference", "kl/reward") or values.get("kl/old_k3") or None)
    put("entropy", first(values, "policy/entropy"))
    put("value loss", first(values, "value/loss"))
    low, high = values.get("policy/clip_fraction/low"), values.get("policy/clip_fraction/high")
    if low is not None and high is not None:
        found["clip"] = f"{percent(low)}/{percent(high)}"
    else:
        put("clip", first(values, "policy/clip_fraction"), percent)
    put("len", first(values, "rollout/length/mean"), lambda x: f"{x:.0f}" if x >= 100 else f"{x:.3g}")
    put("cut", first(values, "rollout/truncated_fraction"), percent)
    put("mismatch", first(values, "mismatch/abs/mean", "mismatch/k3/mean"))
    put("tok/s", first(values, "perf/tokens_per_s"))
    found.update(_memory(values))
    return found


def _memory(values: Values) -> dict[str, str]:
    total = values.get("memory/device_total_gib")
    if total:
        return {"mem": f"{values.get('memory/device_peak_gib', 0.0):.1f}/{total:.0f} GiB"}
    resident = first(values, "memory/rss_gib", "memory/peak_rss_gib")
    return {} if resident is None else {"mem": f"{resident:.2f} GiB"}


def time_split(values: Values) -> dict[str, float]:
    """Seconds of the step by what they were spent on; what is not in a phase is `other`."""
    parts = {
        "gen": sum(values.get(f"time/{phase}_s", 0.0) for phase in GENERATE_PHASES),
        "train": sum(values.get(f"time/{phase}_s", 0.0) for phase in TRAIN_PHASES),
        "sync": values.get("time/sync_weights_s", 0.0),
        "val": values.get("time/validate_s", 0.0),
        "save": values.get("time/checkpoint_s", 0.0),
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def step_line(step: int, total: int, values: Values, *, change: float | None = None, eta_s: float | None = None) -> str:
    """The line of a step.

    Args:
        step, total: training steps.
        values: the step's metrics.
        change: reward minus the mean of the steps before, reward units.
        eta_s: seconds left.
    """
    shown = cells(values)
    fields = [f"step {step:>{len(str(total))}}/{total}"]
    for label, text in shown.items():
        if label == "reward" and change is not None:
            text += f" ({change:+.3f})"
        if label == "len" and "cut" in shown:
            text += f" ({shown['cut']} cut)"
        if label == "tok/s":
            fields.append(f"{text} tok/s")
        elif label != "cut":
            fields.append(f"{label} {text}")
    split = time_split(values)
    if split:
        times = [f"{name} {seconds:.1f}" for name, seconds in split.items()]
        times[0] += "s"
        fields.append(f"[{' | '.join(times)}]")
    if eta_s is not None:
        fields.append(f"eta {duration(eta_s)}")
    return "  ".join(fields)
