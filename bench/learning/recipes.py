"""Train each recipe on the embedded task and tabulate what it learned.

    python bench/learning/recipes.py [--steps 60] [--seed 0] [--out docs/runs/recipes.md] [NAME ...]

Each recipe runs in a process of its own, one after another, one thread; the table has the held-out score (greedy)
before and after, the reward of the first and last five steps, and the seconds it took. With names, the rows of other
recipes stay as the page has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = (
    "ppo", "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "remax", "opo", "gspo", "cispo", "sapo", "gmpo",
    "clip_cov", "kl_cov",
)  # fmt: skip


def train(
    name: str, steps: int, seed: int, folder: str, *, recipe: str | None = None, changes: tuple[str, ...] = ()
) -> dict[str, float]:
    """One run; returns the figures of its row. `recipe` is a file of configs/, else `name` is; `changes` are keys."""
    overrides = [
        f"optim.total_steps={steps}", f"run.seed={seed}", f"run.dir={folder}", f"run.name={name}",
        "run.validation_every_steps=0", "run.checkpoint_every_steps=0", "logging.rollouts_every_steps=0",
        "logging.console=quiet", "run.num_threads=1", *changes,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [
        sys.executable,
        "-m",
        "fastrl",
        "train",
        str(REPOSITORY / "configs" / f"{recipe or name}.yaml"),
        *overrides,
    ]
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    held_out = [row["val/mean"] for row in rows if "val/mean" in row]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "first": sum(rewards[:5]) / len(rewards[:5]),
        "last": sum(rewards[-5:]) / len(rewards[-5:]),
        "seconds": time.perf_counter() - started,
    }


def table(rows: dict[str, dict[str, float]], steps: int, seed: int) -> str:
    """The page."""
    lines = [
        "# Recipes on the embedded task",
        "",
        f"`python bench/learning/recipes.py --steps {steps} --seed {seed}`: one thread. The held-out score is greedy;",
        "rewards are of sampled responses (means of the first and last five steps, with shaping where there is some);",
        "seconds are of the wall clock, whatever else the machine did.",
        "",
        "| recipe | held out before | after | reward first 5 | last 5 | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        figures = " | ".join(f"{r[key]:.3f}" for key in ("before", "after", "first", "last"))
        lines.append(f"| {name} | {figures} | {r['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def read(page: Path) -> dict[str, dict[str, float]]:
    """The rows that a page has."""
    keys = ("before", "after", "first", "last", "seconds")
    lines = page.read_text().splitlines() if page.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {name: dict(zip(keys, map(float, rest), strict=True)) for name, *rest in cells if name in NAMES}


def main() -> None:
    """Run the chosen recipes and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(REPOSITORY / "docs" / "runs" / "recipes.md"))
    args = parser.parse_args()
    page = Path(args.out)
    rows = read(page) if args.names else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or NAMES:
            rows[name] = train(name, args.steps, args.seed, folder)
            print(name, {k: round(v, 3) for k, v in rows[name].items()}, flush=True)
            ordered = {key: rows[key] for key in NAMES if key in rows}
            page.write_text(table(ordered, args.steps, args.seed))


if __name__ == "__main__":
    main()
