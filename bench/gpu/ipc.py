"""New weights from one process to another on one GPU: buckets over CUDA IPC, a handle per tensor, zero-copy.

    python bench/gpu/ipc.py [--out FILE] [--sizes 1.5B 8B] [--buckets-mib 128 512 2048] [--budget-s 110]

The engine is a stand-in in a process of its own: fused qkv and gate_up tensors and, on a GPU, a captured CUDA graph
that reads them. After the updates the graph is replayed there and must give what the trainer computes from its own
weights; a variant that does not is reported as wrong and not timed. One JSON line a variant: bytes, median
milliseconds, GB/s of payload, and the fraction of the ceiling: the same bytes copied once inside one process. vLLM is
not needed. `--device cpu --sizes tiny --buckets-mib 1` tries the script without a GPU, over shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "rollout"), str(HERE.parents[1])]

import torch  # noqa: E402
from synthetic_weights import SIZES, SyntheticEngine, SyntheticPolicy, fused_reference, probe_output  # noqa: E402

from fastrl.dist.weight_sync import WeightReceiver, WeightSender  # noqa: E402
from fastrl.dist.zero_copy import SharedWeights, SharedWeightsReceiver  # noqa: E402

DTYPE = torch.bfloat16
PROBE_LAYERS = 2
UPDATES = 5  # timed ones; one before them warms up
WAIT_S = 60.0


class Engine:
    """The other process's side: serves commands until told to stop."""

    def __init__(self, pipe: Any, size: str, device: str) -> None:
        self.pipe, self.size, self.device = pipe, size, device
        self.policy_specs = SyntheticPolicy(size, DTYPE, "meta").specs(DTYPE)
        self.engine: SyntheticEngine | None = None
        self.graph: Any = None
        self.output: torch.Tensor | None = None

    def serve(self) -> None:
        """One command after the other; an exception is the answer to the command it came from."""
        while True:
            command, *arguments = self.pipe.recv()
            if command == "stop":
                return
            try:
                self.pipe.send(("ok", getattr(self, command)(*arguments)))
            except Exception:
                self.pipe.send(("error", traceback.format_exc()))

    def buckets(self, address: str, token: str, updates: int) -> None:
        """Take updates into the engine's own memory."""
        engine = self.own()
        receiver = WeightReceiver(address, token, timeout_s=WAIT_S)
        for _ in range(updates):
            receiver.check_manifest(self.policy_specs)
            for name, tensor in receiver.tensors():
                engine.load(name, tensor)
        self.wait_for_device()
        receiver.close()

    def handles(self, updates: int) -> None:
        """The peers' way: a handle per tensor, opened anew each time; the trainer waits for the device."""
        engine = self.own()
        for _ in range(updates):
            for name, (rebuild, arguments) in self.pipe.recv():
                engine.load(name, rebuild(*arguments))
            self.wait_for_device()
            self.pipe.send("done")

    def shared(self, address: str, token: str, updates: int) -> None:
        """Compute with the trainer's own memory."""
        self.forget()
        receiver = SharedWeightsReceiver(address, token, timeout_s=WAIT_S)
        self.capture(receiver.accept(receiver.layout.engine_specs()))
        for _ in range(updates):
            receiver.wait(WAIT_S)
        self.receiver = receiver

    def compute(self) -> list[float]:
        """What the engine computes now: the captured graph, replayed."""
        if self.graph is None:
            assert self.tensors is not None
            return probe_output(self.tensors, PROBE_LAYERS).float().tolist()
        self.graph.replay()
        torch.cuda.synchronize()
        assert self.output is not None
        return self.output.float().tolist()

    def own(self) -> SyntheticEngine:
        """The engine's own memory, with its graph captured once."""
        if self.engine is None:
            self.engine = SyntheticEngine(self.policy_specs, DTYPE, self.device)
            self.capture(self.engine.tensors)
        return self.engine

    def forget(self) -> None:
        """Free the engine's own memory."""
        self.engine = self.graph = self.output = self.tensors = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def capture(self, tensors: dict[str, torch.Tensor]) -> None:
        """Record the computation over these very tensors."""
        self.tensors = tensors
        if self.device != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            probe_output(tensors, PROBE_LAYERS)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = probe_output(tensors, PROBE_LAYERS)

    def wait_for_device(self) -> None:
        """Everything queued here is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def engine_main(pipe: Any, size: str, device: str) -> None:
    """Entry of the engine process."""
    Engine(pipe, size, device).serve()


class Peer:
    """The trainer's end of the engine process."""

    def __init__(self, size: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=engine_main, args=(other, size, device), daemon=True)
        self.process.start()

    def start(self, *command: Any) -> None:
        """Give a command without waiting."""
        self.pipe.send(command)

    def finish(self) -> Any:
        """The answer to the last command."""
        if not self.pipe.poll(WAIT_S):
            raise TimeoutError("the engine process does not answer")
        kind, value = self.pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it may have died already
            self.pipe.send(("stop",))
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def change(policy: SyntheticPolicy, version: int) -> None:
    """Other weights than before; six of them make a fifth less, so that a variant that does nothing shows."""
    with torch.no_grad():
        torch._foreach_mul_(list(policy.parameters()), -1.25 if version % 2 else -0.75)


def agrees(policy: SyntheticPolicy, got: list[float]) -> bool:
    """Whether the engine computes with the policy's present weights; bf16 sums, any order."""
    want = probe_output(fused_reference(policy, PROBE_LAYERS), PROBE_LAYERS).float().cpu()
    return bool(torch.allclose(torch.tensor(got), want, atol=0.02 * float(want.abs().max()), rtol=0.05))


def wait_for_device(device: str) -> None:
    """Everything queued in this process is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def ceiling(device: str, size: int) -> float:
    """Milliseconds of copying `size` bytes once inside one process (in pieces of a GiB)."""
    piece = min(size, 2**30)
    source = torch.empty(piece, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        wait_for_device(device)
        started = time.perf_counter()
        target.copy_(source)
        wait_for_device(device)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times) * size / piece


def by_buckets(policy: SyntheticPolicy, peer: Peer, device: str, mib: int, verify: bool) -> tuple[list[float], int]:
    """Updates through two buckets; milliseconds of each, until the engine has loaded everything."""
    transport = "cuda_ipc" if device == "cuda" else "shared_memory"
    with WeightSender(
        policy,
        transport=transport,
        bucket_bytes=mib << 20,
        dtype=DTYPE,
        verify="always" if verify else "off",
        timeout_s=WAIT_S,
    ) as sender:
        peer.start("buckets", sender.address, sender.token, UPDATES + 1)
        times = []
        for version in range(UPDATES + 1):
            change(policy, version)
            wait_for_device(device)
            started = time.perf_counter()
            delivery = sender.send(version)
            times.append(time.perf_counter() - started)
        started = time.perf_counter()
        peer.finish()  # waits for its device; the last update's copies are in this
        times[-1] += time.perf_counter() - started
    return [1e3 * t for t in times[1:]], delivery.bytes


def by_handles(policy: SyntheticPolicy, peer: Peer, device: str) -> tuple[list[float], int]:
    """The peers' way: one handle per parameter."""
    from torch.multiprocessing.reductions import reduce_tensor

    peer.start("handles", UPDATES + 1)
    times = []
    for version in range(UPDATES + 1):
        change(policy, version)
        wait_for_device(device)
        started = time.perf_counter()
        peer.pipe.send([(name, reduce_tensor(p.data)) for name, p in policy.named_parameters()])
        if not peer.pipe.poll(WAIT_S) or peer.pipe.recv() != "done":
            raise RuntimeError("the engine failed")
        times.append(time.perf_counter() - started)
    peer.finish()
    return [1e3 * t for t in times[1:]], sum(p.numel() * p.element_size() for p in policy.parameters())


def by_sharing(policy: SyntheticPolicy, peer: Peer, device: str) -> tuple[list[float], int]:
    """Zero-copy: the parameters are the engine's memory."""
    shared = SharedWeights(policy, dtype=DTYPE, timeout_s=WAIT_S)
    shared.masters.clear()
    peer.start("shared", shared.address, shared.token, UPDATES + 1)
    times = []
    for version in range(UPDATES + 1):
        change(policy, version)
        wait_for_device(device)
        started = time.perf_counter()
        shared.publish(version)
        times.append(time.perf_counter() - started)
    peer.finish()
    shared.close()
    return [1e3 * t for t in times[1:]], 0


def variants(policy: SyntheticPolicy, peer: Peer, device: str, buckets: list[int]) -> Iterator[tuple[str, Callable]]:
    """Name and function of each way; zero-copy last, because it moves the parameters."""
    for mib in buckets:
        yield f"buckets {mib} MiB", lambda mib=mib: by_buckets(policy, peer, device, mib, False)
    yield f"buckets {buckets[0]} MiB, checksums", lambda: by_buckets(policy, peer, device, buckets[0], True)
    if device == "cuda":
        yield "a handle per tensor", lambda: by_handles(policy, peer, device)
    yield "zero-copy", lambda: by_sharing(policy, peer, device)


def measure(size: str, device: str, buckets: list[int], deadline: float) -> Iterator[dict[str, Any]]:
    """A row per variant of one model size."""
    policy = SyntheticPolicy(size, DTYPE, device)
    total = sum(p.numel() * p.element_size() for p in policy.parameters())
    copy_ms = ceiling(device, total)
    yield {"size": size, "variant": "one copy", "bytes": total, "ms": round(copy_ms, 3)}
    peer = Peer(size, device)
    try:
        for name, run in variants(policy, peer, device, buckets):
            row: dict[str, Any] = {"size": size, "variant": name}
            if time.perf_counter() > deadline:
                yield row | {"skipped": "out of time"}
                continue
            try:
                times, moved = run()
                peer.start("compute")
                if not agrees(policy, peer.finish()):
                    yield row | {"wrong": True}
                    continue
            except Exception as failure:  # one variant's failure must not take the run
                yield row | {"failed": f"{type(failure).__name__}: {str(failure)[-600:]}"}
                peer.stop()
                peer = Peer(size, device)
                continue
            ms = statistics.median(times)
            row |= {"bytes": moved, "ms": round(ms, 3), "spread_ms": [round(min(times), 3), round(max(times), 3)]}
            if moved:
                row |= {"gb_s": round(moved / ms / 1e6, 1), "of_one_copy": round(copy_ms / ms, 3)}
            yield row
    finally:
        peer.stop()
        del policy
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def write(out: TextIO, row: dict[str, Any]) -> None:
    """One line, on disk at once."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not sys.stdout:
        out.write(line + "\n")
        out.flush()


def main() -> int:
    """Run all variants; the exit code is 1 if one is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=argparse.FileType("a"), default=sys.stdout)
    parser.add_argument("--sizes", nargs="+", default=["1.5B", "8B"], choices=sorted(SIZES))
    parser.add_argument("--buckets-mib", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--budget-s", type=float, default=110.0, help="start no variant after this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    options = parser.parse_args()
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # memory of expandable segments has no handle per tensor
    deadline = time.perf_counter() + options.budget_s
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    write(options.out, {"device": name, "torch": torch.__version__, "updates": UPDATES})
    bad = 0
    for size in options.sizes:
        for row in measure(size, options.device, options.buckets_mib, deadline):
            write(options.out, row)
            bad += "wrong" in row or "failed" in row
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
