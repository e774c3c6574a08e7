"""Strong scaling of a whole GRPO step: the same step on one rank and on two, a core each, gloo between them.

    python bench/dist/scaling.py --model DIR [--steps 2] [--cores 0 1] [--out FILE]

8 sums in the chat template x 8 samples x 32 tokens, the same tokens in both cases (seeds are per sample; the mean reward
must agree). Ranks are processes pinned to one core each. efficiency = t(1) / (2 t(2)), of the step and of its phases;
medians over the steps after a warm-up. `whole` keeps the model on both ranks and sums gradients, `sharded` splits it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from context import context, show

PHASES = ("step", "generate", "exchange", "update_actor", "sync_weights")


def overrides(options: argparse.Namespace, data: str, shard: int | None) -> list[str]:
    """The run as keys of the configuration."""
    lines = [
        f"model.path={options.model}",
        f"data.train={data}",
        "data.shuffle=false",
        "reward.functions=[exact]",
        "rollout.num_prompts_per_step=8",
        "rollout.num_samples_per_prompt=8",
        "rollout.max_response_tokens=32",
        "algorithm.advantage=grpo",
        "optim.lr=1e-5",
        f"optim.total_steps={options.steps + 1}",
        "run.num_threads=1",
        "run.device=cpu",
        "run.max_tokens_per_microbatch=1024",
    ]
    return lines + ([] if shard is None else [f"parallel.shard={shard}"])


def rank_main(options: argparse.Namespace) -> None:
    """One rank: `steps` + 1 training steps, a JSON line each from rank 0."""
    os.sched_setaffinity(0, {options.cores[int(os.environ["RANK"])]})
    from dataclasses import replace

    import torch

    from fastrl.config.load import load_config
    from fastrl.dist.collectives import rank
    from fastrl.dist.mesh import process_group
    from fastrl.trainer.loop import Trainer
    from fastrl.trainer.reporter import Silent
    from fastrl.trainer.setup import build

    config = load_config([], overrides(options, options.data, options.shard)).config
    with process_group(torch.device("cpu"), 600.0):
        parts = build(config)
        parts.generator.params = replace(parts.generator.params, ignore_eos=True, stop_token_ids=())
        trainer = Trainer(parts, Silent(), None, lambda score: None)
        for _ in range(options.steps + 1):
            _, values = trainer.step()
            if rank() == 0:
                print("STEP" + json.dumps(values), flush=True)
        parts.generator.rewards.close()


def run_ranks(options: argparse.Namespace, data: str, size: int, shard: int | None) -> list[dict[str, float]]:
    """The metrics of each step after the first, on `size` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--child", "--model", options.model, "--steps", str(options.steps)]
    command += ["--data", data, "--cores", *map(str, options.cores)]
    command += [] if shard is None else ["--shard", str(shard)]
    children = []
    for rank in range(size):
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    shown = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"ranks ended with {[child.returncode for child in children]}")
    return [json.loads(line[4:]) for line in shown[0].splitlines() if line.startswith("STEP")][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a chat model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cores", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sums.jsonl"
        rows = [{"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
                for a in range(1, 10) for b in range(1, 10)]  # fmt: skip
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found: dict[str, list[dict[str, float]]] = {
            "one": run_ranks(options, str(data), 1, None),
            "two, whole": run_ranks(options, str(data), 2, 1),
            "two, sharded": run_ranks(options, str(data), 2, 2),
        }
    rewards = {name: [round(row["reward/mean"], 6) for row in rows] for name, rows in found.items()}
    result: dict[str, Any] = {
        "context": context(f"python bench/dist/scaling.py --model {Path(options.model).name} --steps {options.steps}"),
        "reward": rewards,
        "seconds": {n: {p: _median(rows, f"time/{p}_s") for p in PHASES} for n, rows in found.items()},
    }
    one = result["seconds"]["one"]
    result["efficiency"] = {
        name: {p: round(one[p] / (2 * seconds[p]), 3) for p in ("step", "generate", "update_actor")}
        for name, seconds in result["seconds"].items()
        if name != "one"
    }
    for name, rows in found.items():
        if name != "one":
            result[f"work, {name}"] = {m: _median(rows, m) for m in ("perf/imbalance", "perf/imbalance/generated")}
    show(result, options)


def _median(rows: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(row.get(name, 0.0) for row in rows), 4)


if __name__ == "__main__":
    main()
