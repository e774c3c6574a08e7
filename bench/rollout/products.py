"""Linear products of a decode step on a CPU: MKL, oneDNN in place, oneDNN on blocked copies, by the number of rows.

    python bench/rollout/products.py [--rounds 8] [--out FILE]

The shapes are those of a 135M Llama (30 layers, hidden 576, vocabulary 49152). A round times each way once; the figures
are the fastest round (`time.thread_time`, one thread, weights larger than the caches), in ms for all layers together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastrl.models.cpu import keep_heap
from fastrl.rollout.products import PackedProduct, Part, onednn_linear

LAYERS, HIDDEN, VOCABULARY = 30, 576, 49152
SHAPES = {"qkv": (960, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (3072, HIDDEN), "down": (HIDDEN, 1536)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96)


def fastest(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """ms of each way, the ways in turn."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            best[name] = min(best[name], 1e3 * (time.thread_time() - start))
    return {name: round(ms, 1) for name, ms in best.items()}


def packing(weights: list[Tensor], rounds: int) -> float:
    """ms to make the blocked copies, memory being at hand."""

    def pack() -> None:
        for weight in weights:
            torch.ops.mkldnn._reorder_linear_weight(weight, 32)

    pack()
    return fastest({"pack": pack}, rounds)["pack"]


@torch.inference_mode()
def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    layers = [(name, torch.randn(shape) * 0.02) for name, shape in SHAPES.items() for _ in range(LAYERS)]
    packed = [(name, PackedProduct([Part(weight, None)])) for name, weight in layers]
    head = torch.randn(VOCABULARY, HIDDEN) * 0.02
    packed_head = PackedProduct([Part(head, None)])
    table = {}
    print("rows   trunk: MKL  in place   packed      head: MKL  in place   packed")
    for rows in ROWS:
        x = {name: torch.randn(rows, shape[1]) for name, shape in SHAPES.items()}
        h = torch.randn(rows, HIDDEN)

        def trunk(way: Callable[[Tensor, Tensor], Tensor], x: dict[str, Tensor] = x) -> None:
            for name, weight in layers:
                way(x[name], weight)

        def packed_trunk(x: dict[str, Tensor] = x) -> None:
            for name, product in packed:
                product(x[name])

        table[rows] = fastest(
            {
                "trunk_mkl": lambda t=trunk: t(linear),
                "trunk_in_place": lambda t=trunk: t(lambda a, w: onednn_linear(a, w, None)),
                "trunk_packed": packed_trunk,
                "head_mkl": lambda h=h: linear(h, head),
                "head_in_place": lambda h=h: onednn_linear(h, head, None),
                "head_packed": lambda h=h: packed_head(h),
            },
            args.rounds,
        )
        print(f"{rows:4d}", *(f"{value:10.1f}" for value in table[rows].values()))
    pack_ms = packing([weight for _, weight in layers] + [head], 3)
    print(f"packing all weights: {pack_ms:.0f} ms")
    if args.out:
        result = {
            "command": f"python bench/rollout/products.py --rounds {args.rounds}",
            "torch": torch.__version__,
            "threads": 1,
            "clock": "thread_time, fastest round",
            "ms_by_rows": table,
            "pack_ms": pack_ms,
        }
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
