"""The embedded engine against transformers' `model.generate`: same model, prompts and number of tokens, in turn.

    python bench/rollout/native_vs_generate.py --model DIR [--rounds 3] [--out FILE]

Three cases: `full`, 8 prompts x 8 samples x 64 tokens, nobody stops early; `sums`, 4 prompts x 8 samples, at most 32
tokens, samples stop at their end of sequence; `step`, one decode step of 32 rows taken apart. Nothing is timed before
all give the same greedy tokens. One thread, `time.thread_time`, medians over rounds; as in training, the heap is kept
and the engine's weights are new at every call.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fastrl.models.cpu import keep_heap
from fastrl.models.load import load_model, load_tokenizer, stop_token_ids
from fastrl.rollout import sampling
from fastrl.rollout.engine import GenerationRequest, SamplingParams
from fastrl.rollout.native import NativeEngine

HERE = Path(__file__).resolve().parent
ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "native, every sample its own row": {"share_prefixes": False},
    "native, the model's own forward": {"fast_path": False},
    "native, bfloat16 products": {"autocast_dtype": torch.bfloat16},
}


def prompts_of(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """One-digit sums in the model's chat template."""
    rng = random.Random(seed)
    sums = rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], count)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}],
            tokenize=True, add_generation_prompt=True, return_dict=False,
        )
        for a, b in sums
    ]  # fmt: skip


class Generate:
    """`model.generate` with left padding."""

    def __init__(self, path: str, stop_ids: list[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.stop_ids = stop_ids

    @torch.inference_mode()
    def __call__(
        self, prompts: list[list[int]], samples: int, tokens: int, *, greedy: bool, stop: bool, seed: int
    ) -> list[list[int]]:
        """Responses, cut after their end of sequence."""
        torch.manual_seed(seed)
        longest, padding = max(map(len, prompts)), self.stop_ids[0]
        ids = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        more: dict[str, Any] = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=not greedy, num_return_sequences=samples,
            eos_token_id=self.stop_ids if stop else None, pad_token_id=padding, **more,
        )[:, longest:].tolist()  # fmt: skip
        return [self.cut(row) if stop else row for row in out]

    def cut(self, row: list[int]) -> list[int]:
        """Up to and with the first stop id."""
        ends = [i for i, token in enumerate(row) if token in self.stop_ids]
        return row[: ends[0] + 1] if ends else row


class Native:
    """The embedded engine with the same call."""

    def __init__(self, model: Any, stop_ids: list[int], **options: Any) -> None:
        self.engine = NativeEngine(model, stop_token_ids=stop_ids, **options)
        self.version = 0

    def __call__(
        self, prompts: list[list[int]], samples: int, tokens: int, *, greedy: bool, stop: bool, seed: int
    ) -> list[list[int]]:
        """Responses in the order of the prompts."""
        self.version += 1
        self.engine.update_weights(self.engine.model, self.version)
        requests = [GenerationRequest(i, p, samples) for i, p in enumerate(prompts)]
        params = SamplingParams(temperature=float(not greedy), max_tokens=tokens, ignore_eos=not stop, seed=seed)
        done = sorted(self.engine.generate(requests, params), key=lambda s: (s.request_id, s.sample_index))
        return [s.token_ids.tolist() for s in done]


def greedy_gate(generators: dict[str, Any], prompts: list[list[int]], tokens: int) -> None:
    """Stop unless every float32 generator gives the same greedy tokens."""
    results = {
        name: g(prompts, 1, tokens, greedy=True, stop=False, seed=0)
        for name, g in generators.items()
        if "bf" not in name
    }
    reference = results["generate"]
    for name, rows in results.items():
        if rows != reference:
            wrong = sum(a != b for a, b in zip(rows, reference))
            raise SystemExit(
                f"{name}: {wrong} of {len(prompts)} greedy responses differ from model.generate: not timed"
            )
    print(f"greedy gate: {len(prompts)} x {tokens} tokens equal in {', '.join(results)}")


def timed(call: Callable[[], list[list[int]]]) -> tuple[float, int]:
    """(CPU seconds of this thread, tokens)."""
    start = time.thread_time()
    rows = call()
    return time.thread_time() - start, sum(map(len, rows))


def compare(generators: dict[str, Any], prompts: list[list[int]], tokens: int, stop: bool, rounds: int) -> dict:
    """Median tokens per second of each generator, taken in turn; `ratio` is against model.generate, round by round."""
    rows: dict[str, list[tuple[float, int]]] = {name: [] for name in generators}
    for seed in range(rounds):
        for name, generator in generators.items():
            rows[name].append(timed(lambda g=generator, s=seed: g(prompts, 8, tokens, greedy=False, stop=stop, seed=s)))
            seconds, count = rows[name][-1]
            print(
                f"  round {seed} {name:34s} {seconds:7.2f} s {count:5d} tokens {count / seconds:7.1f} tok/s", flush=True
            )
    rates = {name: [count / seconds for seconds, count in pairs] for name, pairs in rows.items()}
    return {
        name: {
            "seconds": [round(seconds, 3) for seconds, _ in pairs],
            "tokens": [count for _, count in pairs],
            "median_tokens_per_s": round(statistics.median(rates[name]), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(rates[name], rates["generate"])), 2),
        }
        for name, pairs in rows.items()
    }


def decode_step(engine: NativeEngine, prompts: list[list[int]], steps: int) -> dict[str, float]:
    """Median ms of the parts of a decode step of 32 rows (4 prompts x 8 samples, own rows)."""
    parts: dict[str, list[float]] = {"trunk": [], "head": [], "sampling": [], "whole": []}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            parts[name].append(1e3 * (time.thread_time() - start))
            return result

        return call

    runner, draw = engine._runner, sampling.draw
    hidden, logits = runner.hidden, runner.logits
    runner.hidden, runner.logits = clocked("trunk", hidden), clocked("head", logits)  # type: ignore[method-assign]
    sampling.draw = clocked("sampling", draw)
    try:
        requests = [GenerationRequest(i, p, 8) for i, p in enumerate(prompts[:4])]
        start = time.thread_time()
        list(engine.generate(requests, SamplingParams(max_tokens=steps, ignore_eos=True)))
        whole = 1e3 * (time.thread_time() - start)
    finally:
        runner.hidden, runner.logits, sampling.draw = hidden, logits, draw  # type: ignore[method-assign]
    prefill = parts["trunk"].pop(0)
    found = {name: round(statistics.median(values), 1) for name, values in parts.items() if values}
    rest = whole - prefill - sum(sum(v) for v in parts.values())
    return {"prefill": round(prefill, 1), **found, "bookkeeping": round(rest / steps, 1)}


def main() -> None:
    """Gate, then time the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["step", "sums", "full"], choices=["step", "sums", "full"])
    parser.add_argument("--variants", action="store_true", help="also time the engine with single ideas switched off")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    stop_ids = sorted(stop_token_ids(model, tokenizer))
    prompts = prompts_of(tokenizer, 8, seed=0)
    names = list(ENGINES) if args.variants else ["native"]
    generators: dict[str, Any] = {"generate": Generate(args.model, stop_ids)}
    generators |= {name: Native(model, stop_ids, **ENGINES[name]) for name in names}
    greedy_gate(generators, prompts, 64)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    result: dict[str, Any] = {
        "command": f"python bench/rollout/native_vs_generate.py --rounds {args.rounds}" + " --variants" * args.variants,
        "model": Path(args.model).name, "threads": 1, "clock": "thread_time", "python": platform.python_version(),
        "torch": torch.__version__, "transformers": importlib.metadata.version("transformers"),
        "machine": platform.processor() or platform.machine(), "commit": commit.strip(),
        "prompt_tokens": [len(p) for p in prompts],
    }  # fmt: skip
    for case in args.cases:
        print(case)
        if case == "step":
            result["decode_step_ms"] = {n: decode_step(generators[n].engine, prompts, 24) for n in names}
            print(json.dumps(result["decode_step_ms"], indent=1))
        else:
            count, tokens, stop = (8, 64, False) if case == "full" else (4, 32, True)
            result[case] = compare(generators, prompts[:count], tokens, stop, args.rounds)
            for name, row in result[case].items():
                print(f"  {name:34s} median {row['median_tokens_per_s']:7.1f} tok/s, x{row['ratio']} of generate")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
