"""`fastrl rollouts RUN`: what the model wrote, as a person wants to read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from fastrl.errors import ConfigError
from fastrl.rollout.records import RolloutRecord, read_step

ORDERS = ("written", "best", "worst")


def show_rollouts(
    run: str | Path,
    *,
    step: int | None = None,
    limit: int = 8,
    sort: str = "written",
    split: str | None = None,
    console: Console | None = None,
) -> None:
    """Print samples of one step, one box each: prompt, response, and what was thought of it.

    Args:
        run: run folder.
        step: which step; None is the last one with samples.
        limit: most samples to show.
        sort: written, best or worst first (by score; unscorable ones last).
        split: train or validation only; None shows both.
        console: where to print; stdout by default.

    Raises:
        ConfigError: `sort` or `split` is unknown.
        DataError: there are no samples of that step.
    """
    if sort not in ORDERS:
        raise ConfigError(f"--sort {sort}: must be {', '.join(ORDERS[:-1])} or {ORDERS[-1]}")
    if split not in (None, "train", "validation"):
        raise ConfigError(f"--split {split}: must be train or validation")
    records = [record for record in read_step(run, step) if split is None or record.split == split]
    console = console or Console()
    for record in ordered(records, sort)[:limit]:
        console.print(box(record))
    shown = min(limit, len(records))
    number = records[0].step if records else step
    console.print(f"{shown} of {len(records)} samples of step {number}", highlight=False)


def ordered(records: Sequence[RolloutRecord], sort: str) -> list[RolloutRecord]:
    """The records in the order asked for; those without a score come last."""
    if sort == "written":
        return list(records)
    sign = -1.0 if sort == "best" else 1.0
    return sorted(records, key=lambda record: (record.score is None, sign * (record.score or 0.0)))


def box(record: RolloutRecord) -> RenderableType:
    """One sample: prompt dim, response plain (never read as markup), figures in the frame."""
    figures = [f"score {number(record.score)}"]
    if len(record.components) > 1:
        figures += [f"{name} {number(value)}" for name, value in record.components.items()]
    if record.advantage is not None:
        figures.append(f"advantage {record.advantage:+.3f}")
    figures += [f"{record.length} tokens", record.finish_reason]
    if record.answer is not None:
        figures.append(f"answer {record.answer}")
    place = f"step {record.step}  group {record.group_id}  sample {record.sample_id}"
    if record.split != "train":
        place += f"  {record.split}"
    body = Group(Text(record.prompt, style="dim"), Text(record.response))
    return Panel(body, title=Text(place), subtitle=Text("  ".join(figures)), title_align="left", subtitle_align="left")


def number(score: float | None) -> str:
    """A score in few digits; `unscorable` where there is none."""
    return "unscorable" if score is None else f"{score:.4g}"
