"""Time of a weight update to an engine process over shared memory, against one memcpy of the same bytes.

    python bench/rollout/weights.py --out bench/results/weights_cpu.json [--rounds 5] [--cases 135M 1.5B]

The engine is a stand-in that copies each tensor into fused tensors of its own (`synthetic_weights.py`). 135M is sent
from float32 parameters as bf16 and as float32, 1.5B from bf16 parameters as bf16. The engine's memory is compared with
the policy after the last update. Medians over rounds; memcpy is measured in turn with the updates, inside one process,
on the bytes that travel. `cpu` is time on a core, of both processes together, which a busy machine changes less.
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
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from synthetic_weights import SIZES, SyntheticEngine, SyntheticPolicy  # noqa: E402

from fastrl.dist.weight_checksum import checksum  # noqa: E402
from fastrl.dist.weight_sync import TensorSpec, WeightReceiver, WeightSender  # noqa: E402
from fastrl.kernels.pack_weights import pack_weights  # noqa: E402

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
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        receiver.check_manifest(expected)
        for name, tensor in receiver.tensors():
            engine.load(name, tensor)
        seconds.append(time.process_time() - started)
    pipe.send(({name: float(rows.double().sum()) for name, rows in engine.rows.items()}, seconds[1:]))


class Memcpy:
    """One copy of `size` bytes inside one process, in pieces of at most 256 MiB."""

    def __init__(self, size: int) -> None:
        self.factor = max(1.0, size / (256 << 20))
        self.source = torch.randint(0, 255, (round(size / self.factor),), dtype=torch.uint8)
        self.target = torch.empty_like(self.source)
        self.target.copy_(self.source)

    def __call__(self) -> tuple[float, float]:
        """(wall, CPU) seconds of one copy of all bytes."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.target.copy_(self.source)
        return self.factor * (time.perf_counter() - wall), self.factor * (time.process_time() - cpu)


def run_case(size: str, held: torch.dtype, dtype: torch.dtype, mib: int, verify: bool, rounds: int) -> dict[str, Any]:
    """One row: wall and CPU time of an update and of a copy, measured in turn."""
    policy = SyntheticPolicy(size, held, "cpu")
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    with WeightSender(
        policy, transport="shared_memory", bucket_bytes=mib << 20, dtype=dtype, verify="always" if verify else "off"
    ) as sender:
        manifest = sender.manifest()
        moved = sum(spec.num_bytes for spec in manifest)
        copy = Memcpy(moved)
        arguments = (other, sender.address, sender.token, [s.to_json() for s in manifest], dtype, rounds + 1)
        process = context.Process(target=engine_main, args=arguments, daemon=True)
        process.start()
        sender.send(0)  # waits for the engine's start and maps the memory
        updates, copies, cpu = [], [], []
        for version in range(1, rounds + 1):
            started = time.process_time()
            updates.append(sender.send(version).seconds)
            cpu.append(time.process_time() - started)
            copies.append(copy())
        sums, engine_cpu = pipe.recv()
        process.join()
    for name, parameter in policy.named_parameters():
        want = float(parameter.to(dtype).double().sum())
        if abs(sums[name] - want) > 1e-9 * max(1.0, abs(want)):
            raise SystemExit(f"{size}: {name} arrived wrong")
    copy_wall, copy_cpu = (statistics.median(c[i] for c in copies) for i in (0, 1))
    both_cpu = statistics.median(a + b for a, b in zip(cpu, engine_cpu))
    return {
        "size": size,
        "held_in": str(held).removeprefix("torch."),
        "sent_as": str(dtype).removeprefix("torch."),
        "bucket_mib": mib,
        "checksums": verify,
        "bytes": moved,
        "update_ms": round(1e3 * statistics.median(updates), 1),
        "fastest_update_ms": round(1e3 * min(updates), 1),
        "memcpy_ms": round(1e3 * copy_wall, 1),
        "update_cpu_ms": round(1e3 * both_cpu, 1),
        "memcpy_cpu_ms": round(1e3 * copy_cpu, 1),
        "cpu_over_memcpy": round(both_cpu / copy_cpu, 2),
    }


def parts() -> dict[str, float]:
    """GB/s of CPU time of what an update consists of, on 256 MiB in one process."""
    data = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8)
    target, wide = torch.empty_like(data), torch.zeros(128 << 20)
    runs = {
        "memcpy": (lambda: target.copy_(data), data.numel()),
        "pack_weights float32 to bfloat16": (lambda: pack_weights([wide], target, BF16), 2 * wide.numel()),
        "checksum": (lambda: checksum(data), data.numel()),
        "zlib.crc32": (lambda: zlib.crc32(data.numpy()), data.numel()),
    }
    rates = {}
    for name, (run, size) in runs.items():
        times = []
        for _ in range(5):
            started = time.process_time()
            run()
            times.append(time.process_time() - started)
        rates[name] = round(size / min(times) / 1e9, 1)
    return rates


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
        "clock": "wall and process_time, medians of rounds",
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "parts_gb_per_cpu_s": parts(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
