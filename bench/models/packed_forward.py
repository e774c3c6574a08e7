"""Forward and backward of a model's trunk over one micro-batch: padded, with repeated prompts, and as a prefix tree
(with the tiled attention, and with SDPA per segment).

    python bench/models/packed_forward.py --model DIR [--rounds 5] [--out FILE]

Cases: `sums`, 4 one-digit sums in the chat template x 8 responses of 2 to 24 tokens; `short`, 4 prompts of 45 random
tokens x 8 responses of 10; `long`, 1 prompt of 96 x 8 responses of 48. Nothing is timed before all variants give the
same hidden rows. One thread, `time.thread_time`, variants in turn; the least and the median of the rounds, in seconds.
`--no-heap` leaves the allocator as it is, `--no-onednn` the linear layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.data.packing import MicroBatch, pack
from fastrl.models import cpu
from fastrl.models.forward import hidden_rows
from fastrl.models.head import trunk
from fastrl.models.load import load_model, load_tokenizer


def batch_of(prompts: list[list[int]], responses: list[list[list[int]]]) -> RolloutBatch:
    """Responses per prompt as a rollout."""
    flat = [r for group in responses for r in group]
    group = torch.tensor([g for g, rs in enumerate(responses) for _ in rs])
    total = sum(map(len, flat))
    return RolloutBatch(
        prompt_ids=torch.tensor([t for p in prompts for t in p]),
        prompt_cu_seqlens=cu_seqlens_of(torch.tensor([len(p) for p in prompts])),
        response_ids=torch.tensor([t for r in flat for t in r]),
        cu_seqlens=cu_seqlens_of(torch.tensor([len(r) for r in flat])),
        group_index=group,
        group_id=group,
        sample_id=torch.arange(len(flat)),
        finish_reason=torch.zeros(len(flat), dtype=torch.int8),
        policy_version=torch.zeros(len(flat), dtype=torch.int64),
        response_mask=torch.ones(total, dtype=torch.bool),
    )


def cases(path: str) -> dict[str, RolloutBatch]:
    """The rollouts that are timed."""
    tokenizer, rng = load_tokenizer(path), random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(count)]

    sums = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}],
            tokenize=True, add_generation_prompt=True, return_dict=False,
        )
        for a, b in rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], 4)
    ]  # fmt: skip
    return {
        "sums": batch_of(sums, [[tokens(rng.randint(2, 24)) for _ in range(8)] for _ in range(4)]),
        "short": batch_of([tokens(45) for _ in range(4)], [[tokens(10) for _ in range(8)] for _ in range(4)]),
        "long": batch_of([tokens(96)], [[tokens(48) for _ in range(8)]]),
    }


def padded_rows(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Rows [T] that predict the response tokens, from one right-padded batch through transformers' own attention."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    responses = batch.response_ids.split(batch.lengths.tolist())
    sequences = [torch.cat([prompts[g], r]) for g, r in zip(batch.group_index.tolist(), responses)]
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(s) for s in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    hidden = trunk(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.cat(
        [hidden[i, len(s) - len(r) - 1 : len(s) - 1] for i, (s, r) in enumerate(zip(sequences, responses))]
    )


def packed_rows(model: PreTrainedModel, micro: MicroBatch, attention: str = "auto") -> Tensor:
    """The same rows, in the batch's order."""
    setattr(model, "fastrl_attention", attention)  # noqa: B010
    rows = hidden_rows(model, micro)
    return torch.empty_like(rows).index_copy(0, micro.token_index, rows)


def time_case(
    plain: PreTrainedModel, model: PreTrainedModel, batch: RolloutBatch, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds per variant, after they agreed."""
    longest = int((batch.lengths + batch.prompt_lengths[batch.group_index]).max())
    micros = {name: pack(batch, max_tokens=10**9, share_prompts=name == "tree")[0] for name in ("repeated", "tree")}
    variants: dict[str, tuple[PreTrainedModel, Callable[[], Tensor], int]] = {
        "padded": (plain, lambda: padded_rows(plain, batch), longest * batch.num_sequences),
        "repeated": (model, lambda: packed_rows(model, micros["repeated"]), micros["repeated"].num_rows),
        "tree": (model, lambda: packed_rows(model, micros["tree"]), micros["tree"].num_rows),
        "tree, sdpa": (model, lambda: packed_rows(model, micros["tree"], "sdpa"), micros["tree"].num_rows),
    }  # fmt: skip
    with torch.no_grad():
        reference = variants["padded"][1]()
        for name, (_, run, _) in variants.items():
            error = float((run() - reference).norm() / reference.norm())
            assert error < 1e-4, f"{name} differs from the padded forward by {error:.1e}"
    grad = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in options.variants}
    for _ in range(options.rounds + 1):  # the first round warms up
        for name in times:
            owner, run, _ = variants[name]
            started = time.thread_time()
            rows = run()
            middle = time.thread_time()
            rows.backward(grad)
            times[name].append((middle - started, time.thread_time() - middle))
            owner.zero_grad()
    return {
        name: {
            "rows": variants[name][2],
            "forward_s": summary([f for f, _ in found[1:]]),
            "backward_s": summary([b for _, b in found[1:]]),
        }
        for name, found in times.items()
    }


def summary(seconds: list[float]) -> dict[str, float]:
    return {"least": round(min(seconds), 3), "median": round(statistics.median(seconds), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=["sums", "short", "long"])
    parser.add_argument("--variants", nargs="*", default=["padded", "repeated", "tree", "tree, sdpa"], help="to time")
    parser.add_argument("--no-heap", action="store_true")
    parser.add_argument("--no-onednn", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heap = not options.no_heap and cpu.keep_heap()
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    model = load_model(options.model)
    if options.no_onednn:
        for module in model.modules():
            if type(module) is cpu.OneDnnLinear:
                module.__class__ = nn.Linear
    found = cases(options.model)
    result = {
        "context": {
            "model": Path(options.model).name,
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
            "machine": platform.processor() or platform.machine(),
            "threads": 1,
            "heap kept": heap,
            "onednn": not options.no_onednn,
        },
        "cases": {name: time_case(plain, model, found[name], options) for name in options.cases},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
