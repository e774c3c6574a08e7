"""Learning curves over several seeds, with TRL on the same prompts for as many samples.

    python bench/learning/curves.py [--task embedded] [--trl-python PATH] [--seeds 3] [--steps 60] [NAME ...]
    python bench/learning/curves.py --task chain_sum --model DIR --steps 20 ...

NAME is one of the task's runs (`curve_tasks.py`) or `trl_grpo`. Each run is a process of its own with one thread; its
curve is appended to OUT/data.jsonl as soon as it ends, and runs that are there already are not made again. Then
OUT/curves.png (mean and range over the seeds, reward against samples and against CPU seconds) and OUT/README.md are
drawn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.harness.machine import commit, versions  # noqa: E402
from bench.learning.curve_tasks import TASKS, CurveTask  # noqa: E402
from bench.learning.recipes import train  # noqa: E402

TRL_NOTE = [
    "TRL has the same start, prompts in the same order, reward, clipping, learning rate and number of samples as",
    "fastrl's grpo.",
]
WINDOW = 5  # steps that a plotted point is the mean of


def ours(task: CurveTask, model: str | None, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One of the task's runs."""
    recipe, changes = task.runs[name]
    changes += (f"model.path={model}",) if model else ()
    with tempfile.TemporaryDirectory() as folder:
        summary = train(name, steps, seed, folder, recipe=recipe, changes=changes)
        lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
    return {
        "samples": [task.prompts * task.samples * (i + 1) for i in range(len(rows))],
        "seconds": [round(s, 3) for s in itertools.accumulate(row["time/step_s"] for row in rows)],
        "reward": [row["reward/mean"] for row in rows],
        "held_out": [summary["before"], summary["after"]],
    }


def trl(task: CurveTask, model: str | None, python: str, seed: int, steps: int) -> dict[str, Any]:
    """TRL's GRPOTrainer with the GRPO run's settings."""
    path = model or task.model
    settings = {
        "model": path or str(ROOT / "fastrl/assets/tiny"), "rows": task.problems(path or "builtin:tiny", seed, steps),
        "prompts": task.prompts, "samples": task.samples, "tokens": task.tokens,
        "lr": task.lr, "warmup": task.warmup, "steps": steps, "seed": seed,
    }  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings | {"folder": folder}))
        command = [python, str(Path(__file__).with_name("trl_curve.py")), str(file)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "curve.json").read_text())
    return found | {"samples": [task.prompts * task.samples * (i + 1) for i in range(len(found["reward"]))]}


def cpu_seconds() -> float:
    """CPU time of the processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_axis(run: dict[str, Any]) -> list[float]:
    """CPU seconds after each step: the run's, start and validation included, spread as its steps took them.

    What else the machine does stretches a run's clock, but not this.
    """
    return [s * run["cpu_s"] / run["seconds"][-1] for s in run["seconds"]]


def load(path: Path) -> list[dict[str, Any]]:
    """The runs there are."""
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [run | {"cpu_axis": cpu_axis(run)} for run in runs if "cpu_s" in run]


def smooth(values: list[float]) -> list[float]:
    """Means over the last WINDOW values."""
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def mean_curve(runs: list[dict[str, Any]], axis: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """(x, mean, least, largest) over seeds, step by step."""
    rewards = list(zip(*(smooth(run["reward"]) for run in runs)))
    x = [statistics.fmean(values) for values in zip(*(run[axis] for run in runs))]
    return x, [statistics.fmean(r) for r in rewards], [min(r) for r in rewards], [max(r) for r in rewards]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Two panels: against samples and against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name in sorted({run["name"] for run in runs}):
        mine = [run for run in runs if run["name"] == name]
        for axis, key in zip(axes, ("samples", "cpu_axis")):
            x, mean, low, high = mean_curve(mine, key)
            (line,) = axis.plot(x, mean, label=f"{label(name)} ({len(mine)} seeds)")
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    axes[0].set(xlabel="samples", ylabel=f"mean reward, last {WINDOW} steps", ylim=(0, 1))
    axes[1].set(xlabel="CPU seconds, one thread")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def label(name: str) -> str:
    """A run's name in the legend."""
    return "TRL GRPO" if name == "trl_grpo" else f"fastrl {name}"


def page(task: CurveTask, runs: list[dict[str, Any]], command: str) -> str:
    """The table: mean and range over seeds."""

    def spread(values: list[float], digits: int = 3) -> str:
        return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    lines = [
        f"# Learning curves on {task.title}",
        "",
        f"`{command}`: {task.prompts * task.samples} samples a step, one thread each; mean",
        "(and range) over seeds. The reward is of sampled training responses, last ten steps; held-out problems are",
        "answered greedily; CPU seconds are of the whole run, start and validation included (TRL's has no validation).",
        *(TRL_NOTE if any(run["name"] == "trl_grpo" for run in runs) else ["TRL has not been run here yet."]),
        "Data: `data.jsonl` (with wall-clock seconds of the steps, on a busy machine).",
        "",
        "![curves](curves.png)",
        "",
        "| run | seeds | reward at the end | held out after | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    for name in sorted({run["name"] for run in runs}):
        mine = [run for run in runs if run["name"] == name]
        held = [run["held_out"][1] for run in mine if run.get("held_out")]
        reward = spread([statistics.fmean(run["reward"][-10:]) for run in mine])
        seconds = spread([run["cpu_s"] for run in mine], 0)
        lines.append(f"| {label(name)} | {len(mine)} | {reward} | {spread(held) if held else 'not run'} | {seconds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the missing runs, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--task", choices=TASKS, default="embedded")
    parser.add_argument("--model", help="folder with the task's model, where the hub is out of reach")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trl-python", default=os.environ.get("FASTRL_BENCH_TRL_PYTHON"))
    parser.add_argument("--out", type=Path, help="where data, picture and page go; docs/runs/... unless given")
    options = parser.parse_args()
    task: CurveTask = TASKS[options.task]
    out = options.out or ROOT / "docs" / "runs" / task.folder
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data.jsonl"
    for seed, name in itertools.product(range(options.seeds), options.names or (*task.runs, "trl_grpo")):
        if any((run["name"], run["seed"]) == (name, seed) for run in load(data)):
            continue
        if name == "trl_grpo" and not options.trl_python:
            print("trl_grpo: no interpreter with TRL (--trl-python PATH)")
            continue
        before = cpu_seconds()
        if name == "trl_grpo":
            curve = trl(task, options.model, options.trl_python, seed, options.steps)
        else:
            curve = ours(task, options.model, name, seed, options.steps)
        curve["cpu_s"] = round(cpu_seconds() - before, 1)
        context = {"name": name, "seed": seed, "steps": options.steps, "commit": commit(), "versions": versions()}
        with data.open("a") as file:
            file.write(json.dumps(context | curve) + "\n")
        print(f"{name} seed {seed}: reward {curve['reward'][-1]:.3f} in {curve['seconds'][-1]:.0f} s", flush=True)
    runs = load(data)
    command = f"python bench/learning/curves.py --task {options.task} --steps {options.steps} --seeds {options.seeds}"
    draw(runs, out / "curves.png")
    (out / "README.md").write_text(page(task, runs, command))


if __name__ == "__main__":
    main()
