"""Training curves of one or several runs as one picture: `fastrl plot RUN...`."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.errors import ConfigError, DataError
from fastrl.report.metrics_file import read_metrics
from fastrl.report.text import short, time_split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]

# Told apart also by people who see fewer colours (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A6D3B")
LINES = ("-", "--", ":", "-.")
INK, FAINT = "#333333", "#d9d9d9"
COLUMNS = 3
PANEL_INCHES = (4.6, 2.9)
FORMATS = (".png", ".svg", ".pdf")
SMOOTH_FROM = 30  # shorter curves are drawn as they are


@dataclass(frozen=True)
class Panel:
    """One small diagram: which metrics, and how its axis reads."""

    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()  # of the metrics, where there are several
    unit: str = ""
    scale: str = "linear"  # linear, log, percent
    band: str = ""  # metric of the spread drawn around the first one
    exact: bool = False  # drawn as it is, without smoothing


PANELS = (
    Panel("reward", ("reward/mean",), band="reward/std"),
    Panel("held-out score", ("val/mean",)),
    Panel("response length", ("rollout/length/mean",), unit="tokens", band="rollout/length/std"),
    Panel("entropy", ("policy/entropy",), unit="nats per token"),
    Panel("KL", ("kl/reference", "kl/reward", "kl/old_k3"), ("reference", "in reward", "inside the step"), unit="nats"),
    Panel(
        "clipped tokens",
        ("policy/clip_fraction/high", "policy/clip_fraction/low", "policy/clip_fraction/dual"),
        ("high", "low", "dual"),
        scale="percent",
    ),
    Panel("gradient norm", ("optim/grad_norm", "optim/critic_grad_norm"), ("policy", "critic"), scale="log"),
    Panel("learning rate", ("optim/lr", "optim/critic_lr"), ("policy", "critic"), exact=True),
    Panel("groups with equal rewards", ("reward/zero_variance_fraction",), scale="percent"),
    Panel("responses cut at the limit", ("rollout/truncated_fraction",), scale="percent"),
    Panel("trainer against engine", ("mismatch/k3/mean",), unit="k3, nats", scale="log"),
    Panel("critic: explained variance", ("value/explained_variance",)),
    Panel("critic: loss", ("value/loss",)),
    Panel("throughput", ("perf/tokens_per_s",), unit="response tokens/s"),
)


def plot_runs(
    runs: Sequence[str | Path], out: str | Path, metrics: Sequence[str] | None = None, *, names: Sequence[str] = ()
) -> Path:
    """Draws the curves of some runs over training steps, overlaid, and where the time went.

    Args:
        runs: run folders (or metrics.jsonl files).
        out: picture to write: .png, .svg or .pdf.
        metrics: names or patterns (`reward/*`) to draw instead of the usual panels, one panel each.
        names: what the runs are called; the folder names by default.

    Returns:
        the picture's path.

    Raises:
        ConfigError: matplotlib is not installed, or the format is unknown.
        DataError: a run has no metrics, or no metric fits (near names are listed).
    """
    out = Path(out)
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"{out}: pictures are written as {', '.join(FORMATS)}")
    figure = make_figure(runs, metrics, names=names)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130, facecolor="white")
    return out


def make_figure(
    runs: Sequence[str | Path], metrics: Sequence[str] | None = None, *, names: Sequence[str] = ()
) -> Figure:
    """The picture of `plot_runs` as a matplotlib Figure; same arguments and errors."""
    figure_class = _matplotlib()
    tables = [read_metrics(run) for run in runs]
    for run, rows in zip(runs, tables):
        if not rows:
            raise DataError(f"{run}: no step has been logged yet")
    titles = list(names) or _distinct_names([Path(run) for run in runs])
    panels = _chosen(metrics, tables) if metrics else [p for p in PANELS if _has_data(p, tables)]
    with_times = not metrics and any(time_split(row) for rows in tables for row in rows)
    if not panels and not with_times:
        raise DataError(f"{', '.join(map(str, runs))}: nothing to draw yet")
    return _draw(figure_class, panels, tables, titles, with_times)


def _matplotlib() -> Any:
    """The Figure class; it draws without a display and without pyplot's global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install 'fastrl[plot]'") from None

    def make(width: float, height: float) -> Figure:
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure

    return make


def _draw(make: Any, panels: list[Panel], tables: list[Rows], titles: list[str], with_times: bool) -> Figure:
    count = len(panels) + with_times
    columns = min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure: Figure = make(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.5)
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for ax, panel in zip(axes, panels):
        _curves(ax, panel, tables)
    if with_times:
        _times(axes[len(panels)], tables, titles)
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes[max(0, count - columns) : len(panels)]:
        ax.set_xlabel("training step", color=INK, fontsize=9)
    if len(titles) == 1:
        figure.suptitle(titles[0], fontsize=12, color=INK)
    else:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=_colour(i), linewidth=2.5) for i in range(len(titles))]
        figure.legend(handles, titles, loc="outside upper center", ncols=min(len(titles), 4), frameon=False)
    return figure


def _curves(ax: Axes, panel: Panel, tables: list[Rows]) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn = [m for m in panel.metrics if any(m in row for rows in tables for row in rows)]
    factor = 100.0 if panel.scale == "percent" else 1.0
    positive = True
    for i, rows in enumerate(tables):
        for j, metric in enumerate(drawn):
            steps = [row["step"] for row in rows if metric in row]
            values = [factor * float(row[metric]) for row in rows if metric in row]
            if not steps:
                continue
            positive = positive and min(values) > 0
            colour = _colour(i if len(tables) > 1 or len(drawn) == 1 else j)
            label = panel.labels[panel.metrics.index(metric)] if panel.labels and i == 0 else None
            style = LINES[j % len(LINES)] if len(tables) > 1 else "-"
            few = len(steps) < SMOOTH_FROM or panel.exact
            if not few:
                ax.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
            shown = values if few else _smooth(values)
            marker = "o" if len(steps) <= 12 or 2 * len(steps) < len(rows) else None
            ax.plot(steps, shown, style, color=colour, linewidth=1.7, label=label, marker=marker, markersize=3.5)
            if j == 0 and panel.band and len(tables) == 1:
                _band(ax, rows, metric, panel.band, colour)
    _dress(ax, panel.title, panel.unit if panel.scale != "percent" else "%")
    if panel.scale == "log" and positive:
        ax.set_yscale("log")
    else:
        ax.yaxis.set_major_formatter(lambda value, place: short(value))
    steps = [row["step"] for rows in tables for row in rows]
    ax.set_xlim(min(steps) - 0.3, max(steps) + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if panel.scale == "percent":
        ax.set_ylim(bottom=0)
    if len(drawn) > 1:
        ax.legend(fontsize=8, frameon=False)


def _band(ax: Axes, rows: Rows, metric: str, spread: str, colour: str) -> None:
    """One standard deviation around a curve, within the smallest and largest value there was."""
    both = [row for row in rows if metric in row and spread in row]
    middle = _smooth([row[metric] for row in both]) if len(both) >= SMOOTH_FROM else [row[metric] for row in both]
    name = metric.removesuffix("/mean")
    low = [max(m - row[spread], row.get(f"{name}/min", -math.inf)) for m, row in zip(middle, both)]
    high = [min(m + row[spread], row.get(f"{name}/max", math.inf)) for m, row in zip(middle, both)]
    ax.fill_between([row["step"] for row in both], low, high, color=colour, alpha=0.10, linewidth=0)


def _times(ax: Axes, tables: list[Rows], titles: list[str]) -> None:
    """Mean seconds of a step by what they were spent on, one bar per run."""
    splits = []
    for rows in tables:
        trained = [time_split(row) for row in rows if row["step"] > 0 and time_split(row)]
        splits.append({part: sum(s.get(part, 0.0) for s in trained) / max(len(trained), 1) for part in _PARTS})
    places = list(range(len(tables)))[::-1]
    left = [0.0] * len(tables)
    for part, colour in _PARTS.items():
        widths = [split[part] for split in splits]
        if max(widths) > 0:
            ax.barh(places, widths, left=left, color=colour, label=_PART_WORDS[part], height=0.55)
            left = [a + b for a, b in zip(left, widths)]
    ax.set_yticks(places, [_shorten(title) for title in titles] if len(titles) > 1 else [""] * len(titles), fontsize=8)
    ax.set_ylim(-0.8, len(tables) - 0.2 + 0.5 * len(tables))
    ax.legend(fontsize=8, frameon=False, ncols=3, loc="upper right")
    _dress(ax, "time of a step", "")
    ax.set_xlabel("seconds, mean over steps", color=INK, fontsize=9)
    ax.grid(axis="y", visible=False)


_PARTS = {"gen": "#0072B2", "train": "#E69F00", "sync": "#009E73", "val": "#CC79A7", "save": "#999999"}
_PART_WORDS = {"gen": "generate", "train": "train", "sync": "sync", "val": "validate", "save": "save"}


def _dress(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, fontsize=10.5, color=INK, loc="left")
    ax.set_ylabel(unit, fontsize=9, color=INK)
    ax.grid(color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", labelsize=8, colors=INK, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#999999")
    ax.margins(x=0.02)


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of about a twentieth of the curve; no lag, the ends use what is there."""
    half = max(len(values) // 40, 2)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    smooth = []
    for i in range(len(values)):
        first, last = max(i - half, 0), min(i + half, len(values) - 1)
        smooth.append((sums[last + 1] - sums[first]) / (last + 1 - first))
    return smooth


def _has_data(panel: Panel, tables: list[Rows]) -> bool:
    values = [row[m] for rows in tables for row in rows for m in panel.metrics if m in row]
    # A curve that is 0 in every step (clipping with one update per batch) says nothing.
    return any(value != 0 for value in values)


def _chosen(metrics: Sequence[str], tables: list[Rows]) -> list[Panel]:
    known = sorted({name for rows in tables for row in rows for name in row} - {"step", "time"})
    panels = []
    for wanted in metrics:
        found = [name for name in known if fnmatch.fnmatchcase(name, wanted)]
        if not found:
            import difflib

            near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
            raise DataError(f"{wanted}: no such metric in these runs" + (f"; near: {', '.join(near)}" if near else ""))
        panels += [Panel(name, (name,)) for name in found]
    return panels


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _shorten(text: str) -> str:
    return text if len(text) <= 18 else text[:8] + "…" + text[-9:]


def _distinct_names(paths: list[Path]) -> list[str]:
    """The folder names, with their parents where two are the same."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    return names
