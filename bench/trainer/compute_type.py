"""bfloat16 compute over float32 masters on one rank: autocast against bfloat16 views that the optimizer writes.

    python bench/trainer/compute_type.py --model DIR [--updates 3] [--rounds 2] [--out FILE]

The same updates (6 prompts of 25 tokens, 11 responses of 30: 480 rows at most, 330 of the head) from the same weights
under float32, autocast and views. Per variant: CPU seconds of an update (forward, backward, optimizer; the least over
updates and rounds, rounds alternate), the most memory during updates above what the process held before the model, and
against float32 the mean difference of log-probs, the relative difference of the first gradient, and that of the
weights' movement after all updates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.dist.context import context, show
from fastrl.algorithms.registry import get_policy_loss
from fastrl.data.batch import RolloutBatch, cu_seqlens_of
from fastrl.data.packing import pack
from fastrl.models.load import load_model
from fastrl.trainer.actor import Actor
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import optimizer_batch
from fastrl.trainer.optim import Optimizer, Schedule
from fastrl.trainer.view_optimizer import ViewOptimizer

GIB = float(2**30)
VARIANTS = ("float32", "autocast", "views")
LR = 1e-5


def batch_of(vocabulary: int) -> RolloutBatch:
    """6 prompts of 25 tokens, 11 responses of 30, random ids and advantages."""
    random = torch.Generator().manual_seed(0)
    members = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5])
    rows = 30 * len(members)
    batch = RolloutBatch(
        prompt_ids=torch.randint(vocabulary, (150,), generator=random),
        prompt_cu_seqlens=cu_seqlens_of(torch.full((6,), 25)),
        response_ids=torch.randint(vocabulary, (rows,), generator=random),
        cu_seqlens=cu_seqlens_of(torch.full((len(members),), 30)),
        group_index=members,
        group_id=members,
        sample_id=torch.arange(len(members)),
        finish_reason=torch.zeros(len(members), dtype=torch.int8),
        policy_version=torch.zeros(len(members), dtype=torch.int64),
        response_mask=torch.ones(rows, dtype=torch.bool),
    )
    advantages = torch.randn(rows, generator=random)
    return batch.with_(advantages=advantages, loss_mask=batch.response_mask)


def peak_reset() -> None:
    """Start the process's peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(key: str) -> float:
    """VmRSS or VmHWM of this process, GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / GIB


def variant(model_path: str, name: str, updates: int) -> dict[str, Any]:
    """Seconds, memory, log-probs, first gradient and movement of one variant."""
    before = resident("VmRSS")
    model = load_model(model_path, dtype="float32" if name == "float32" else "bfloat16")
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    schedule = Schedule(LR)
    if name == "views":
        masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        nn.Module.to(model, torch.bfloat16)
        optimizer: Optimizer = ViewOptimizer(model, schedule, masters=masters, name="policy")
        del masters
    else:
        optimizer = Optimizer(model, schedule, name="policy")
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    settings = LossSettings(get_policy_loss("clip"), {})
    actor = Actor(model, optimizer, settings, temperature=1.0, dtype=dtype, gradient_in_forward=True)
    batch = batch_of(model.config.vocab_size)
    micro_batches = pack(batch, max_tokens=1024)
    result: dict[str, Any] = {"rows": [micro.num_rows for micro in micro_batches], "seconds": []}
    held: list[Tensor] = [start]  # of the comparison, not of the variant
    peak_reset()
    for update in range(updates):
        seen = torch.zeros(batch.num_tokens)
        members = optimizer_batch(
            batch, torch.arange(batch.num_sequences), batch.need("loss_mask"), loss_agg_mode="token-mean",
            loss_scale_factor=None,
        )  # fmt: skip
        started = time.thread_time()
        for micro in micro_batches:
            actor.backward(members, micro, seen, Metrics())
        spent = time.thread_time() - started
        if update == 0:
            result["gradient"] = torch.cat([g.flatten().float() for g in gradients(optimizer)])
            result["log_prob"] = seen.clone()
            held.append(result["gradient"])
            batch = batch.with_(old_log_prob=seen)
        started = time.thread_time()
        optimizer.step()
        result["seconds"].append(spent + time.thread_time() - started)
    result["peak_gib"] = resident("VmHWM") - before - sum(t.numel() * 4 for t in held) / GIB
    result["moved"] = torch.cat([p.detach().flatten() for p in optimizer.parameters]) - start
    return result


def gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Gradients in the order of the parameters."""
    for p in optimizer.parameters:
        assert p.grad is not None
        yield p.grad


def main() -> None:
    """Run the variants in turn, each in a process of its own, and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(1)
        torch.save(variant(options.model, options.child[0], options.updates), options.child[1])
        return
    exact: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for name in VARIANTS:
            run = in_child(options, name)
            exact = exact or run
            row = found.setdefault(name, {"seconds": [], "peak_gib": [], "rows": run["rows"]})
            row["seconds"].append(round(min(run["seconds"]), 3))
            row["peak_gib"].append(round(run["peak_gib"], 2))
            row["log_prob"] = float((run["log_prob"] - exact["log_prob"]).abs().mean())
            for key in ("gradient", "moved"):
                row[key] = float((run[key] - exact[key]).norm() / exact[key].norm())
            del run
    name = Path(options.model).name
    script = "python bench/trainer/compute_type.py"
    command = f"{script} --model {name} --updates {options.updates} --rounds {options.rounds}"
    show({"context": context(command), "variants": found}, options)


def in_child(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """`variant` in a fresh process: what another one left in the heap would count as this one's memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.pt"
        command = [sys.executable, __file__, "--model", options.model, "--updates", str(options.updates)]
        subprocess.run([*command, "--child", name, str(file)], check=True)
        return torch.load(file, weights_only=True)


if __name__ == "__main__":
    main()
