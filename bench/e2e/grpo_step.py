"""A whole GRPO step of a small chat model, fastrl against TRL's GRPOTrainer: same model, prompts, sampling, rate.

    python bench/e2e/grpo_step.py --model DIR [--trl-python PATH] [--case sums|long] [--steps 5] [--out FILE]
    PYTHON_WITH_VLLM bench/e2e/grpo_step.py --engine vllm --trl-python PYTHON_WITH_TRL_AND_VLLM --model DIR ...

`--engine vllm` generates with vLLM on both sides: in a child process here, colocated in TRL. Both trainers run in
processes of their own, one thread each, one step in turn. Where TRL is absent or ends at its first step only ours is
timed, and the result says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tasks import FILLER, order, sums

HERE = Path(__file__).resolve().parent


class WorkerEnded(SystemExit):
    """A trainer's process is gone."""


class Worker:
    """One trainer in a process of its own."""

    def __init__(self, python: str, script: str, settings: dict) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(HERE.parents[1]), "VLLM_CPU_KVCACHE_SPACE": "1",
        }  # fmt: skip
        command = [python, str(HERE / script), json.dumps(settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self.read()

    def read(self) -> dict:
        """The next line the worker writes."""
        line = self.process.stdout.readline()
        if not line:
            raise WorkerEnded(f"a worker ended early with code {self.process.wait()}; its reason is above")
        return json.loads(line)

    def step(self) -> dict:
        """One training step."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()


def settings_of(args: argparse.Namespace, folder: str) -> dict:
    """The case as numbers: rows in the order of the steps, sampling, sizes."""
    rows, plan = sums(held_out=False), order(64, 4, args.steps + args.warmup, args.seed)
    long = args.case == "long"
    return {
        "model": args.model,
        "folder": folder,
        "rows": [rows[i % len(rows)] for step in plan for i in step],
        "system": [{"role": "system", "content": FILLER}] if long else [],
        "prompts": 4,
        "samples": 8,
        "tokens": 48 if long else 12,
        "lr": 1e-5,
        "steps": args.steps + args.warmup,
        "seed": args.seed,
        "ignore_eos": long,
        "generation_kwargs": {"min_new_tokens": 48} if long else None,
        "engine": args.engine,
        "overrides": [f"rollout.engine={args.engine}", *(["algorithm.correction=none"] if args.no_correction else [])],
    }


def summary(rows: list[dict]) -> dict:
    """Medians of one trainer's steps."""
    keys = ("wall_s", "cpu_s", "mean_length", "reward")
    out = {key: statistics.median(row[key] for row in rows) for key in keys}
    return out | {"min_wall_s": min(r["wall_s"] for r in rows), "peak_rss_gib": rows[-1]["peak_rss_gib"]}


def trl_found(python: str | None) -> bool:
    """True when the interpreter can import TRL."""
    return python is not None and subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0


def alternate(workers: dict[str, Worker], steps: int, warmup: int) -> dict[str, list[dict]]:
    """Steps of each worker in turn, without the first `warmup`. TRL may end at its first step: then it has no rows."""
    rows: dict[str, list[dict]] = {name: [] for name in workers}
    for number in range(steps + warmup):
        for name, worker in workers.items():
            if name not in rows:
                continue
            try:
                row = worker.step()
            except WorkerEnded as error:
                if number or name == "fastrl":
                    raise
                print(f"{name}: {error}. Only fastrl is timed.")
                del rows[name]
                continue
            shown = f"reward {row['reward']:.3f}  length {row['mean_length']:.1f}"
            print(f"{number:3d} {name:7s} {row['wall_s']:7.2f} s  {shown}", flush=True)
            if number >= warmup:
                rows[name].append(row)
    return rows


def context(about: dict) -> dict:
    """What the numbers were measured with."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    fixed = {"trl": about.get("trl"), "threads": 1}
    return {"python": platform.python_version(), **versions, "commit": commit.strip(), **fixed}


def main() -> None:
    """Alternate steps of both trainers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--case", choices=["sums", "long"], default="sums")
    parser.add_argument("--engine", choices=["native", "vllm"], default="native")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-correction", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args, folder)
        workers = {"fastrl": Worker(sys.executable, "ours_worker.py", settings)}
        if trl_found(args.trl_python):
            workers["trl"] = Worker(args.trl_python, "trl_worker.py", settings)
        else:
            print("TRL is not installed for this interpreter: only fastrl is timed (--trl-python PATH names another)")
        rows = alternate(workers, args.steps, args.warmup)
        about = workers["trl"].about if "trl" in workers else {}
        for worker in workers.values():
            worker.close()
    result = {
        "case": args.case,
        "engine": args.engine,
        **context(about),
        "steps": rows,
        "median": {n: summary(r) for n, r in rows.items()},
    }
    for name, f in result["median"].items():
        print(f"{name:7s} median {f['wall_s']:.2f} s  cpu {f['cpu_s']:.2f} s  peak {f['peak_rss_gib']:.2f} GiB")
    if len(rows) == 2:
        pairs = [b["wall_s"] / a["wall_s"] for a, b in zip(rows["fastrl"], rows["trl"])]
        result["ratio"] = statistics.median(pairs)
        print(f"TRL / fastrl, step by step: median {result['ratio']:.2f}, from {min(pairs):.2f} to {max(pairs):.2f}")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
