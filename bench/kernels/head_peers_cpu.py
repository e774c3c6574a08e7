"""The language-model head with a clipped policy loss on a CPU, forward + backward, against what other trainers do.

    OMP_NUM_THREADS=1 python bench/kernels/head_peers_cpu.py [--rows 1024] [--dtype float32] [--rounds 3] [--json FILE]

One thread, alternating, every variant's loss and gradients checked against float64 first. Peers that are not installed
are left out by name. Milliseconds are the least of the thread's CPU time over the rounds (the machine may be busy), and
memory is the largest resident size of a fresh process that runs the variant once, above what its inputs take.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

SEQUENCES = 8  # Liger's loss takes one advantage per sequence
HIDDEN, VOCABULARY = 576, 49152
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # a log-prob of bfloat16 logits tips some clips over


class Data(NamedTuple):
    """Inputs. hidden [N, H], weight [V, H], labels, old, advantages [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor


def make(rows: int, dtype: torch.dtype) -> Data:
    """Random rows whose distribution is about as sharp as a small model's."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN)).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (rows,))
    with torch.no_grad():
        parts = [torch.log_softmax(h.float() @ weight.float().t(), -1) for h in hidden.split(128)]
        value = torch.cat(parts).gather(1, labels[:, None])[:, 0]
    per_sequence = torch.randn(SEQUENCES).repeat_interleave(rows // SEQUENCES)
    return Data(hidden, weight, labels, value + 0.2 * torch.randn(rows), per_sequence)


def token_loss(data: Data, value: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
    """max(-A r, -A clip(r, 0.8, 1.2)) / N."""
    part = slice(None) if rows is None else rows
    a, ratio = data.advantages[part], (value - data.old[part]).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) / data.labels.shape[0]


def naive(d: Data) -> torch.Tensor:
    logits = (d.hidden @ d.weight.t()).float()
    value = torch.log_softmax(logits, -1).gather(1, d.labels[:, None])[:, 0]
    return token_loss(d, value).sum()


def fastrl(d: Data) -> torch.Tensor:
    from fastrl.kernels import linear_token_loss

    return linear_token_loss(d.hidden, d.weight, d.labels, lambda lp, entropy, rows: token_loss(d, lp, rows))[0]


def fastrl_into_buffer(d: Data) -> torch.Tensor:
    """The second and later micro-batches of a step: the weight has a gradient already."""
    from fastrl.kernels import linear_token_loss

    return linear_token_loss(
        d.hidden, d.weight, d.labels, lambda lp, entropy, rows: token_loss(d, lp, rows), weight_grad=BUFFER[0]
    )[0]


def fastrl_recomputed(d: Data) -> torch.Tensor:
    from fastrl.kernels import linear_log_prob

    return token_loss(d, linear_log_prob(d.hidden, d.weight, d.labels).log_prob).sum()


def trl(d: Data) -> torch.Tensor:
    from trl.trainer.utils import selective_log_softmax

    return token_loss(d, selective_log_softmax(d.hidden @ d.weight.t(), d.labels).float()).sum()


def verl_fused(d: Data) -> torch.Tensor:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return token_loss(d, FusedLinearForPPO()(d.hidden, d.weight, d.labels)[0].float()).sum()


def verl_logits(d: Data) -> torch.Tensor:
    from verl.utils.torch_functional import logprobs_from_logits

    logits = (d.hidden @ d.weight.t())[None]
    return token_loss(d, logprobs_from_logits(logits, d.labels[None])[0].float()).sum()


def liger(d: Data) -> torch.Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    shape = (SEQUENCES, -1)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
    mask = torch.ones(d.labels.shape).view(shape)
    result = loss(
        d.hidden.view(*shape, HIDDEN), d.weight, d.labels.view(shape), mask, d.advantages.view(shape)[:, 0],
        old_per_token_logps=d.old.view(shape),
    )  # fmt: skip
    return result[0] if isinstance(result, tuple) else result


def torch_chunked(d: Data) -> torch.Tensor:
    function = torch.nn.functional.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions()
    value = -function(d.hidden, d.weight, d.labels, reduction="none", options=options)
    return token_loss(d, value.float()).sum()


VARIANTS: dict[str, tuple[Callable[[Data], torch.Tensor], str | None]] = {
    "naive": (naive, None),
    "fastrl linear_token_loss": (fastrl, None),
    "fastrl linear_token_loss, weight_grad": (fastrl_into_buffer, None),
    "fastrl linear_log_prob": (fastrl_recomputed, None),
    "trl selective_log_softmax": (trl, "trl"),
    "verl FusedLinearForPPO": (verl_fused, "verl"),
    "verl logprobs_from_logits": (verl_logits, "verl"),
    "liger GRPO loss": (liger, "liger_kernel"),
    "torch linear_cross_entropy": (torch_chunked, "torch.nn.functional:linear_cross_entropy"),
}
BUFFER: list[torch.Tensor] = []


def present(needed: str | None) -> bool:
    """True when the peer can be imported."""
    if needed is None:
        return True
    module, _, name = needed.partition(":")
    try:
        return not name or hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def step(run: Callable[[Data], torch.Tensor], data: Data) -> torch.Tensor:
    """Forward and backward from cleared gradients."""
    data.hidden.grad = data.weight.grad = None
    loss = run(data)
    loss.backward()
    return loss.detach()


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def peak_mib(run: Callable[[Data], torch.Tensor], data: Data) -> float:
    """Memory above the inputs, in a child process that runs the variant once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        data.hidden.grad = data.weight.grad = None
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        step(run, data)
        os.write(writer, str(resident("VmHWM") - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return round(int(text or 0) / 2**20, 1)


def reference(data: Data) -> list[torch.Tensor]:
    """Loss and gradients in float64."""
    wide = Data(*(x.detach().double().requires_grad_() for x in data[:2]), data.labels, *(x.double() for x in data[3:]))
    value = torch.log_softmax(wide.hidden @ wide.weight.t(), -1).gather(1, wide.labels[:, None])[:, 0]
    loss = token_loss(wide, value).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (wide.hidden, wide.weight))]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def checked(name: str, run: Callable[[Data], torch.Tensor], data: Data, want: list[torch.Tensor]) -> float:
    """Largest relative distance of loss and gradients from float64."""
    if BUFFER:
        BUFFER[0].zero_()
    loss = step(run, data)
    weight_grad = data.weight.grad if data.weight.grad is not None else BUFFER[0]
    assert data.hidden.grad is not None, name
    pairs = zip((loss, data.hidden.grad, weight_grad), want, strict=True)
    return max(distance(a, b) for a, b in pairs)


def main() -> None:
    """Check, measure memory, then time the variants in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = make(options.rows, getattr(torch, options.dtype))
    BUFFER.append(torch.zeros(VOCABULARY, HIDDEN))
    chosen = {name: run for name, (run, needed) in VARIANTS.items() if present(needed)}
    for name in set(VARIANTS) - set(chosen):
        print(f"{name}: not installed")
    want = reference(data)
    rows: dict[str, dict[str, Any]] = {}
    for name, run in chosen.items():
        error = checked(name, run, data, want)
        rows[name] = {"error": error, "peak_mib": peak_mib(run, data)}
        if not error <= TOLERANCE[options.dtype]:
            rows[name]["wrong"] = True
    del want
    times: dict[str, list[float]] = {name: [] for name, row in rows.items() if "wrong" not in row}
    for _ in range(options.rounds):
        for name, seen in times.items():
            start = time.thread_time()
            step(chosen[name], data)
            seen.append(1e3 * (time.thread_time() - start))
    for name, seen in times.items():
        rows[name]["ms"] = round(min(seen), 1)
    where = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    for name, row in rows.items():
        print(f"{name:40s} {row.get('ms', 'wrong'):>8} ms  {row['peak_mib']:>7} MiB  error {row['error']:.1e}")
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        known = [k for k in known if (k["rows"], k["dtype"]) != (options.rows, options.dtype)]
        entry = {"rows": options.rows, "dtype": options.dtype, "shape": [HIDDEN, VOCABULARY], **where, "results": rows}
        options.json.write_text(json.dumps([*known, entry], indent=1) + "\n")


if __name__ == "__main__":
    main()
