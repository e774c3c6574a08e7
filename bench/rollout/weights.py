"""Time of a weight update to an engine process over shared memory, against one memcpy of the same bytes.

    python bench/rollout/weights.py --out bench/results/weights_cpu.json [--rounds 5] [--cases 135M 1.5B]

The engine is a stand-in that copies each tensor into fused tensors of its own (`synthetic_weights.py`). 135M is sent
from float32 parameters as bf16 and as float32, 1.5B from bf16 parameters as bf16. The engine's memory is compared with
the policy after the last update. Medians over rounds; memcpy is measured in the same run, inside one process, on the
bytes that travel. On one core the two processes take turns and nothing overlaps: `cores` in the result says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from synthetic_weights import SIZES, SyntheticEngine, SyntheticPolicy  # noqa: E402

from fastrl.dist.weight_sync import TensorSpec, WeightReceiver, WeightSender  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
# size, parameters, travelling type, bucket in MiB, verified
CASES = {
    "135M": [(F32, BF16, 256, False), (F32, BF16, 256, True), (F32, BF16, 32, True), (F32, F32, 256, True)],
    "1.5B": [(BF16, BF16, 256, False), (BF16, BF16, 256, True), (BF16, BF16, 64, True)],
    "tiny": [(F32, BF16, 1, True)],
}


def engine_main(pipe: Any, address: str, token: str, specs: list[list[Any]], dtype: torch.dtype, rounds: int) -> None:
    """Take the updates, then send back sums of the fused tensors."""
    torch.set_num_threads(1)
    expected = [TensorSpec.from_json(fields) for fields in specs]
    engine = SyntheticEngine(expected, dtype, "cpu")
    receiver = WeightReceiver(address, token, timeout_s=120)
    for _ in range(rounds):
        receiver.check_manifest(expected)
        for name, tensor in receiver.tensors():
            engine.load(name, tensor)
    pipe.send({name: float(rows.double().sum()) for name, rows in engine.rows.items()})


def memcpy_ms(size: int, rounds: int) -> float:
    """Milliseconds of one copy of `size` bytes inside one process, in pieces of at most 256 MiB."""
    piece = min(size, 256 << 20)
    source = torch.randint(0, 255, (piece,), dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(max(rounds, 5)):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times) * size / piece


def run_case(size: str, held: torch.dtype, dtype: torch.dtype, mib: int, verify: bool, rounds: int) -> dict[str, Any]:
    """One row: the update's time, its bytes, and the copy's."""
    policy = SyntheticPolicy(size, held, "cpu")
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    with WeightSender(policy, transport="shared_memory", bucket_bytes=mib << 20, dtype=dtype, verify=verify) as sender:
        specs = [spec.to_json() for spec in sender.manifest()]
        arguments = (other, sender.address, sender.token, specs, dtype, rounds + 1)
        process = context.Process(target=engine_main, args=arguments, daemon=True)
        process.start()
        sender.send(0)  # waits for the engine's start and maps the memory
        deliveries = [sender.send(version) for version in range(1, rounds + 1)]
        sums = pipe.recv()
        process.join()
    for name, parameter in policy.named_parameters():
        want = float(parameter.to(dtype).double().sum())
        if abs(sums[name] - want) > 1e-9 * max(1.0, abs(want)):
            raise SystemExit(f"{size}: {name} arrived wrong")
    moved = deliveries[0].bytes
    update, copy = statistics.median(1e3 * d.seconds for d in deliveries), memcpy_ms(moved, rounds)
    return {
        "size": size,
        "held_in": str(held).removeprefix("torch."),
        "sent_as": str(dtype).removeprefix("torch."),
        "bucket_mib": mib,
        "checksums": verify,
        "bytes": moved,
        "update_ms": round(update, 1),
        "memcpy_ms": round(copy, 1),
        "update_over_memcpy": round(update / copy, 2),
        "fastest_ms": round(1e3 * min(d.seconds for d in deliveries), 1),
    }


def main() -> None:
    """Measure the cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=["135M", "1.5B"], choices=sorted(set(SIZES) & set(CASES)))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.cases:
        for case in CASES[size]:
            rows.append(run_case(size, *case, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": f"python bench/rollout/weights.py --rounds {options.rounds} --cases {' '.join(options.cases)}",
        "torch": torch.__version__,
        "threads_per_process": 1,
        "cores": len(os.sched_getaffinity(0)),
        "clock": "wall, median of rounds",
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
