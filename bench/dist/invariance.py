"""How far float32 runs on 2 and 4 ranks are from the run on one: tokens that differ, metrics, weights.

    python bench/dist/invariance.py [--config configs/grpo.yaml] [--steps 5] [--ranks 2 4] [--out FILE] [KEY=VALUE ...]

The same seed and configuration each time. Additions in another order change last digits, a sampled token changes where
its draw lies within them of the boundary between two tokens, and what follows it in its response is then another text.
A token differs when the id at its place in its sample does, or one of the two responses ends before it. `run.dtype` may
be given as float64 for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from context import context, show

METRICS = ("optim/grad_norm", "reward/mean", "policy/entropy")


def train(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Token ids of every sample, metrics of every step, and the weights at the end."""
    from fastrl.config.load import load_config
    from fastrl.dist.checkpoint import load_checkpoint
    from fastrl.models.load import load_tokenizer
    from fastrl.run import run_training

    loaded = load_config(
        [str(options.config)],
        [
            f"optim.total_steps={options.steps}",
            "run.dtype=float32",
            "run.device=cpu",
            "run.num_threads=1",
            "run.validation_every_steps=0",
            "logging.console=quiet",
            "logging.rollouts_max_samples=1000000",
            f"parallel.processes={ranks}",
            f"run.dir={folder}",
            f"run.name={ranks}",
            *options.overrides,
        ],
    )
    path = run_training(loaded)
    assert path is not None
    tokenizer = load_tokenizer(loaded.config.model.path)
    samples = {}
    for file in sorted((path / "rollouts").glob("*.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            if record["split"] == "train":
                ids = tokenizer.encode(record["response"], add_special_tokens=False)
                samples[record["step"], record["sample_id"]] = [*ids, record["finish_reason"]]
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {"samples": samples, "rows": {row["step"]: row for row in rows}, "weights": load_checkpoint(path)[0]["policy"]["model"]}


def differences(one: dict[str, Any], other: dict[str, Any], steps: int) -> dict[str, Any]:
    """Per step: fractions of samples and tokens that differ; relative differences of metrics; of the weights at the end."""
    result: dict[str, Any] = {"steps": []}
    assert one["samples"].keys() == other["samples"].keys()
    for step in range(1, steps + 1):
        keys = [key for key in one["samples"] if key[0] == step]
        pairs = [(one["samples"][key], other["samples"][key]) for key in keys]
        tokens = [(a, b) for left, right in pairs for a, b in zip_longest(left, right)]
        row, other_row = one["rows"][step], other["rows"][step]
        result["steps"].append(
            {
                "samples": len(pairs),
                "tokens": len(tokens),
                "samples_that_differ": sum(a != b for a, b in pairs),
                "tokens_that_differ": sum(a != b for a, b in tokens),
                "metrics": {name: relative(row[name], other_row[name]) for name in METRICS if name in row},
            }
        )
    whole = result["steps"]
    result["token_rate"] = sum(s["tokens_that_differ"] for s in whole) / sum(s["tokens"] for s in whole)
    squares = sum(float((other["weights"][n] - w).double().square().sum()) for n, w in one["weights"].items())
    result["weights"] = (squares / sum(float(w.double().square().sum()) for w in one["weights"].values())) ** 0.5
    return result


def relative(a: float, b: float) -> float:
    """|a - b| / |a|, 0 where they are equal."""
    return 0.0 if a == b else abs(a - b) / max(abs(a), 1e-30)


def main() -> None:
    """Train on one rank and on each of `--ranks`, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parents[2] / "configs" / "grpo.yaml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = train(options, 1, Path(folder))
        found = {ranks: differences(one, train(options, ranks, Path(folder)), options.steps) for ranks in options.ranks}
    command = " ".join(["python bench/dist/invariance.py", *sys.argv[1:]])
    show({"context": context(command), "ranks": found}, options)


if __name__ == "__main__":
    main()
