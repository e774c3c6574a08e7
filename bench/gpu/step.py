"""The training pass on a GPU, idea by idea, at the shapes of Qwen2.5-0.5B and 1.5B (random weights), and a parity run.

    python bench/gpu/step.py [--out FILE] [--only TEXT] [--budget-s 270] [--device cuda|cpu] [--scale 1.0]

The rungs are those of `bench/e2e/ladder.py`, under bfloat16 autocast, each checked against the padded pass in float32
before it is timed. The parity run makes 20 updates twice, padded with all logits and as fastrl does it, and compares
loss and gradient norm of every update. One JSON line per result, written at once. `--device cpu --scale 0.02` tries the
script without a GPU. No model is downloaded: the configurations are written out here.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels"), str(HERE.parents[1])]

import torch  # noqa: E402
from kernels import Timer, write  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

from bench.e2e.ladder import Rungs  # noqa: E402
from bench.models.packed_forward import batch_of  # noqa: E402
from fastrl.data.batch import RolloutBatch  # noqa: E402
from fastrl.models.load import prepare_model  # noqa: E402

# hidden, intermediate, layers, heads, key/value heads; vocabulary 151936, tied embeddings
SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2),
}
VOCABULARY = 151936
# prompts, prompt tokens, longest response; 8 samples a prompt
ROLLOUTS = {"P 512 R 256": (2, 512, 256), "P 256 R 512": (2, 256, 512)}
SAMPLES = 8
UPDATES, LEARNING_RATE = 20, 1e-5
TOLERANCE = 0.05  # of a gradient under bfloat16 autocast, |got - want| / |want| over all parameters
PARITY = 1e-3  # relative difference of gradient norms in float32


def config_of(name: str, scale: float) -> Qwen2Config:
    """The shape, smaller in every direction for trying out."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[name]
    small = scale < 1
    return Qwen2Config(
        hidden_size=64 if small else hidden,
        intermediate_size=128 if small else intermediate,
        num_hidden_layers=2 if small else layers,
        num_attention_heads=4 if small else heads,
        num_key_value_heads=2 if small else kv_heads,
        vocab_size=max(512, int(VOCABULARY * scale)),
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def models_of(config: Qwen2Config, device: str) -> tuple[Any, Any]:
    """The same random float32 weights as transformers runs them and with fastrl's attention."""
    torch.manual_seed(0)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    return plain, prepare_model(copy.deepcopy(plain))


def rollout(case: tuple[int, int, int], vocabulary: int, scale: float, seed: int, device: str) -> RolloutBatch:
    """Random tokens; responses of half to the whole length."""
    prompts, prompt, response = (case[0], *(max(4, int(n * min(1.0, scale * 4))) for n in case[1:]))
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    responses = [[tokens(rng.randint(response // 2, response)) for _ in range(SAMPLES)] for _ in range(prompts)]
    return batch_of([tokens(prompt) for _ in range(prompts)], responses).to(device)


def advantages_of(batch: RolloutBatch) -> torch.Tensor:
    """One number per sequence, [T]."""
    generator = torch.Generator().manual_seed(1)
    per_sequence = torch.randn(batch.num_sequences, generator=generator).to(batch.response_ids.device)
    return per_sequence[batch.sequence_index]


def distance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """|got - want| / |want| over all gradients (the first entry is the loss)."""
    off = sum(float((g.float() - w).square().sum()) for g, w in zip(got[1:], want[1:], strict=True))
    return (off / sum(float(w.square().sum()) for w in want[1:])) ** 0.5


def ladder(options: argparse.Namespace, timer: Timer) -> Iterator[dict[str, Any]]:
    """A line per model, rollout and rung."""
    for name in SHAPES:
        if not any(options.only in f"ladder {name} {label}" for label in ROLLOUTS):
            continue
        config = config_of(name, options.scale)
        plain, model = models_of(config, options.device)
        for label, case in ROLLOUTS.items():
            if options.only not in f"ladder {name} {label}":
                continue
            batch = rollout(case, config.vocab_size, options.scale, 0, options.device)
            advantages = advantages_of(batch)
            exact = Rungs(plain, model, batch, advantages).all()["padded"][0]()
            want = [g.detach().clone() for g in exact]
            del exact
            for rung, (run, rows, head) in Rungs(plain, model, batch, advantages, torch.bfloat16).all().items():
                found = {"case": f"ladder {name} {label}", "rung": rung, "rows": rows, "head_rows": head}
                yield found | measured(run, want, timer, batch.num_tokens)
                for owner in (plain, model):
                    owner.zero_grad(set_to_none=True)
            del want
        del plain, model
        release()


def measured(run: Any, want: list[torch.Tensor], timer: Timer, tokens: int) -> dict[str, Any]:
    """Error, and time and memory of a rung that is right."""
    try:
        error = distance(run(), want)
        if not error <= TOLERANCE:
            return {"error": error, "wrong": True}
        if timer.cuda:
            torch.cuda.reset_peak_memory_stats()
        milliseconds = timer(run)
    except Exception as failure:  # one rung's failure must not take the run
        return {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
    peak = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if timer.cuda else {}
    return {
        "error": error,
        "ms": round(milliseconds, 3),
        "response_tokens_per_s": round(1e3 * tokens / milliseconds),
    } | peak


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """20 updates in float32 without and with everything; the same rollouts, AdamW and clipping for both."""
    config = config_of("qwen2.5-0.5b", options.scale)
    plain, model = models_of(config, options.device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, weight_decay=0.0) for m in (plain, model)]
    curves: dict[str, list[list[float]]] = {"padded": [], "fastrl": []}
    for update in range(UPDATES):
        batch = rollout((1, 128, 64), config.vocab_size, options.scale, update, options.device)
        rungs = Rungs(plain, model, batch, advantages_of(batch)).all()
        passes = ("padded", rungs["padded"][0], plain), ("fastrl", rungs["fastrl: + no old pass"][0], model)
        for (name, run, owner), optimizer in zip(passes, optimizers):
            loss = float(run()[0])
            norm = float(torch.nn.utils.clip_grad_norm_(owner.parameters(), 1.0))
            optimizer.step()
            curves[name].append([loss, norm])
    worst = max(abs(a[1] - b[1]) / b[1] for a, b in zip(curves["fastrl"], curves["padded"]))
    result: dict[str, Any] = {"case": f"parity, {UPDATES} updates", "largest_difference": worst, "curves": curves}
    return result | ({} if worst <= PARITY else {"wrong": True})


def release() -> None:
    """Give memory back between models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """Parity first, then the ladder while time is left; the exit code is 1 if something was wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--budget-s", type=float, default=270.0, help="start nothing after this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a toy model, to try the script out")
    options = parser.parse_args()
    started, bad = time.perf_counter(), False
    timer = Timer(options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    write(options.out, {"device": name, "torch": torch.__version__, "scale": options.scale})
    if options.only in "parity":
        row = parity(options)
        write(options.out, row)
        bad |= "wrong" in row
        release()
    for row in ladder(options, timer):
        write(options.out, row)
        bad |= "wrong" in row or "failed" in row
        if time.perf_counter() - started > options.budget_s:
            write(options.out, {"skipped": "what would come after: out of time"})
            break
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
