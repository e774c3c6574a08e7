"""vLLM on a CPU against the embedded engine and `model.generate`, and what an update of its weights costs.

    python bench/rollout/vllm_vs_native.py --model DIR [--rounds 3] [--out FILE]

Two cases: `sums`, 4 prompts x 8 samples, at most 32 tokens, samples stop at their end of sequence; `full`, 8 prompts x
8 samples x 64 tokens, nobody stops early. vLLM runs in this process, so that `time.thread_time` of one thread counts
all three alike; as in training, every call comes after an update. Nothing is timed before all give the same greedy
tokens. Then an engine process is given the weights five times, timed by the clock on the wall beside one copy of the
same bytes: bring a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from native_vs_generate import HERE, Generate, Native, compare, greedy_gate, prompts_of

from fastrl.config.load import load_config
from fastrl.dist.weight_timeline import parts
from fastrl.models.cpu import keep_heap
from fastrl.models.load import load_model, load_tokenizer, stop_token_ids
from fastrl.trainer.engines import make_engine


def external(path: str, model: Any, stop_ids: list[int], *, in_process: bool) -> Any:
    """vLLM as a run with `rollout.engine=vllm` makes it."""
    overrides = [
        f"model.path={path}", "data.train=task:one_digit_sums", "reward.functions=[exact]", "optim.total_steps=1",
        "rollout.engine=vllm", "data.max_prompt_tokens=64", "rollout.max_response_tokens=64",
        "rollout.num_prompts_per_step=8", "rollout.num_samples_per_prompt=8",
        f"rollout.vllm_in_process={str(in_process).lower()}",
    ]  # fmt: skip
    return make_engine(load_config([], overrides).config, model, load_tokenizer(path), frozenset(stop_ids))


class VLLM(Native):
    """vLLM with the call of the others."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.version = engine, 0


def update_times(engine: Any, model: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of an update and of one copy of the same bytes, in turn; of the parts, those of time on a core."""
    tensors = {p.data_ptr(): p.detach() for p in model.parameters()}.values()
    size = sum(t.numel() * t.element_size() for t in tensors)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times: dict[str, list[float]] = {"update": [], "copy": [], "trainer_cpu": [], "copy_cpu": []}
    core: dict[str, list[float]] = {}
    for version in (-1, 0):  # the first update goes through vLLM's own loader
        engine.update_weights(model, version)
    for version in range(1, rounds + 1):
        start, cpu = time.perf_counter(), time.process_time()
        engine.update_weights(model, version)
        middle, cpu_middle = time.perf_counter(), time.process_time()
        target.copy_(source)
        times["copy_cpu"].append(1e3 * (time.process_time() - cpu_middle))
        times["copy"].append(1e3 * (time.perf_counter() - middle))
        times["trainer_cpu"].append(1e3 * (cpu_middle - cpu))
        times["update"].append(1e3 * (middle - start))
        delivery = engine.link.sender.last
        for side, spans in (("trainer", delivery.sent), ("engine", delivery.received)):
            for part, (_, seconds) in parts(spans).items():
                core.setdefault(f"{side} {part}", []).append(1e3 * seconds)
    return {
        "bytes": size,
        **{f"{name}_ms": round(statistics.median(values), 1) for name, values in times.items()},
        "least_update_ms": round(min(times["update"]), 1),
        "parts_cpu_ms": {name: round(statistics.median(values), 1) for name, values in core.items()},
    }


def main() -> None:
    """Gate, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["sums", "full", "update"], choices=["sums", "full", "update"])
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    stop_ids = sorted(stop_token_ids(model, tokenizer))
    prompts = prompts_of(tokenizer, 8, seed=0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    result: dict[str, Any] = {
        "command": f"python bench/rollout/vllm_vs_native.py --model DIR --rounds {args.rounds}",
        "commit": commit.strip(), "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
    }  # fmt: skip
    if "update" in args.cases:
        child = external(args.model, model, stop_ids, in_process=False)
        result["update"] = update_times(child, model, max(5, args.rounds))
        child.close()
        print(result["update"], flush=True)
    if {"sums", "full"} & set(args.cases):
        engine = external(args.model, model, stop_ids, in_process=True)
        generators = {
            "generate": Generate(args.model, stop_ids), "native": Native(model, stop_ids), "vllm": VLLM(engine),
        }  # fmt: skip
        result["vllm"] = engine.ready().name
        greedy_gate(generators, prompts, 64)
        if "sums" in args.cases:
            result["sums"] = compare(generators, prompts[:4], 32, True, args.rounds)
        if "full" in args.cases:
            result["full"] = compare(generators, prompts, 64, False, args.rounds)
        engine.close()
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
