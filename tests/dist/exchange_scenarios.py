"""What the ranks of the exchange tests run: one global batch, of which each rank first holds every size-th group."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import ragged_batch, tiny_model

from fastrl.algorithms.kl import FixedKL
from fastrl.algorithms.registry import check_options, get_advantage, get_kl, get_policy_loss
from fastrl.data.balance import CostModel
from fastrl.data.batch import SEQUENCE_FIELDS, RolloutBatch
from fastrl.data.packing import fill_up, pack, plan_optimizer_batches
from fastrl.dist.collectives import all_gather_rows, all_reduce_max
from fastrl.dist.exchange import exchange, gather_table
from fastrl.dist.sequence import sequence_groups
from fastrl.models.head import trunk
from fastrl.models.load import ValueModel, prepare_model
from fastrl.trainer.actor import Actor, PolicyModel
from fastrl.trainer.advantage import AdvantageStage
from fastrl.trainer.balancing import Exchange
from fastrl.trainer.critic import Critic
from fastrl.trainer.full_kl import FullKL
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import optimizer_batch, remaining
from fastrl.trainer.observe import mismatch_metrics
from fastrl.trainer.optim import Optimizer, Schedule
from fastrl.trainer.sequence import counts_loss, merge_seen, share_rows

# Uneven groups, an empty response, a group of one, and more groups than ranks of some sizes.
PROMPTS = [4, 9, 3, 5, 7]
RESPONSES = [[3, 5, 1, 12], [2, 0, 4], [6, 2, 9, 1], [17], [1, 1, 3]]


def global_batch() -> RolloutBatch:
    """All fields there can be, with values that tell where they belong."""
    batch = ragged_batch(PROMPTS, RESPONSES, seed=3)
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float, size: int = batch.num_tokens) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    old = -noise(0.5).abs() - 2.5
    scores = (torch.arange(batch.num_sequences) % 3).double()
    return batch.with_(
        group_id=batch.group_index * 3 + 1,
        sample_id=torch.arange(batch.num_sequences) * 2 + 1,
        finish_reason=(torch.arange(batch.num_sequences) % 2).to(torch.int8),
        policy_version=torch.arange(batch.num_sequences) // 4,
        scores=scores,
        valid=torch.arange(batch.num_sequences) != 9,
        components={"a": scores * 2, "b": -scores.float()},
        greedy_scores=scores / 2,
        old_log_prob=old,
        rollout_log_prob=old + noise(0.3),
        sum_sq=noise(0.1).abs(),
    )


def share_of(batch: RolloutBatch, rank: int, size: int) -> RolloutBatch:
    """Every size-th group."""
    share = batch.select((batch.group_index % size == rank).nonzero().squeeze(1))
    if not share.num_sequences:  # as generation leaves it: nothing to name components or log-probs by
        share = share.with_(components={}, greedy_scores=None)
    return share


def rows_of(batch: RolloutBatch) -> list[dict[str, Any]]:
    """One dictionary per sequence with all its fields and its prompt."""
    rows = []
    for s in range(batch.num_sequences):
        tokens = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
        group = int(batch.group_index[s])
        prompt = batch.prompt_ids[int(batch.prompt_cu_seqlens[group]) : int(batch.prompt_cu_seqlens[group + 1])]
        row: dict[str, Any] = {"prompt": prompt.tolist()}
        for f in fields(batch):
            value = getattr(batch, f.name)
            if value is None or f.name in ("prompt_ids", "prompt_cu_seqlens", "cu_seqlens", "group_index"):
                continue
            if f.name == "components":
                row |= {f"component/{n}": [str(v.dtype), float(v[s])] for n, v in value.items()}
            else:
                row[f.name] = [str(value.dtype), value[s if f.name in SEQUENCE_FIELDS else tokens].tolist()]
        rows.append(row)
    return rows


def moved(rank: int, size: int, how: str) -> dict[str, Any]:
    """The rows of this rank after an exchange to the destinations of `how`."""
    batch = share_of(global_batch(), rank, size)
    table = gather_table(batch)
    number = table.sample_id // 2
    destination = {
        "scattered": number * 7 % size,
        "all to the last": torch.full_like(number, size - 1),
        "home": table.owner,
    }[how]
    out, traffic = exchange(batch, table, destination)
    return {
        "rows": rows_of(out),
        "wanted": [int(n) for n, d in zip(number, destination) if int(d) == rank],
        "sent": traffic.sent,
        "kept": traffic.kept,
        "prompts": out.num_groups,
    }


def update(
    rank: int,
    size: int,
    advantage: str = "grpo",
    *,
    num_updates: int = 1,
    loss: str = "clip",
    family: str = "llama",
    sequence: int = 1,
    checkpointing: bool = False,
    full_kl: bool = False,
) -> dict[str, Any]:
    """Gradients (summed over ranks) and metrics of the update of one rollout, exchanged and balanced."""
    metrics = Metrics()
    batch = share_of(global_batch(), rank, size)
    estimator = get_advantage(advantage)
    stage = Exchange(
        CostModel(1.0, 0.3, 0.01),
        num_updates=num_updates,
        share_prompts=True,
        whole_groups=estimator.whole_groups,
        num_copies=sequence,
    )
    batch = stage(batch, seed=11, metrics=metrics)
    groups = set(batch.group_id.tolist())
    model = prepare_model(tiny_model(family), gradient_checkpointing=checkpointing)
    share_rows(model, sequence_groups(sequence))
    metrics.muted = not counts_loss(model)
    batch = AdvantageStage(estimator, check_options(estimator, {}), True, FixedKL(0.0))(batch, metrics)
    plans = plan_optimizer_batches(
        batch.group_id, num_updates=num_updates, seed=11, all_group_id=all_gather_rows(batch.group_id)
    )
    made = [pack(batch, members, max_tokens=24) for members in plans]
    counts = all_reduce_max([len(m) for m in made])
    made = [fill_up(micro_batches, count, "cpu") for micro_batches, count in zip(made, counts)]
    policy_loss = get_policy_loss(loss)
    actor = Actor(
        model,
        Optimizer(model, Schedule(0.0), name="policy"),
        LossSettings(
            policy_loss=policy_loss,
            options=check_options(policy_loss, {}),
            kl=get_kl("full") if full_kl else None,
            kl_coef=0.3,
        ),
        temperature=0.8,
        dtype=torch.float64,
        gradient_in_forward=policy_loss.level != "sequence",
    )
    if full_kl:
        other = prepare_model(tiny_model(family, seed=1))
        share_rows(other, sequence_groups(sequence))
        actor.full_kl = FullKL(actor, PolicyModel(other, temperature=0.8, dtype=torch.float64)).rows
    flat = [micro for micro_batches in made for micro in micro_batches]
    now = actor.log_prob(batch, flat, want_entropy=True, want_sum_sq=True, metrics=metrics)
    seen = torch.full_like(batch.need("advantages"), float("nan"))
    gradients, losses = [], []
    for members, micro_batches in zip(plans, made):
        mask = batch.need("loss_mask")
        part = optimizer_batch(batch, members, mask, loss_agg_mode="seq-mean-token-mean", loss_scale_factor=None)
        shares = [actor.backward(part, micro, seen, metrics) for micro in remaining(micro_batches, mask)]
        gradient, total = summed(model, shares)
        gradients.append(gradient)
        losses.append(total)
    mismatch_metrics(batch, merge_seen(model, seen), metrics)
    metrics.muted = False
    per_token = {"advantages": batch.need("advantages"), **now}
    if full_kl:
        per_token["ref_kl"] = FullKL(actor, PolicyModel(other, temperature=0.8, dtype=torch.float64)).of_batch(
            flat, batch.need("advantages")
        )
    return {
        "gradients": gradients,
        "losses": losses,
        "metrics": metrics.reduce(),
        "passes": [len(micro_batches) for micro_batches in made],
        "tokens": {name: by_sample(batch, value) for name, value in per_token.items()},
        "groups": sorted(groups),
        "sequences": batch.num_sequences,
    }


def values(rank: int, size: int, sequence: int = 1) -> dict[str, Any]:
    """Values, bootstrap values and the critic's gradient on the same batch."""
    metrics = Metrics()
    batch = share_of(global_batch(), rank, size)
    stage = Exchange(CostModel(), num_updates=1, share_prompts=True, whole_groups=False, num_copies=sequence)
    batch = stage(batch, seed=1, metrics=metrics)
    causal = prepare_model(tiny_model("llama"))
    model = ValueModel(trunk(causal), "auto")
    torch.nn.init.constant_(model.value_head.weight, 0.1)
    share_rows(model, sequence_groups(sequence))
    metrics.muted = not counts_loss(model)
    critic = Critic(model, Optimizer(model, Schedule(0.0), name="critic"), dtype=torch.float64)
    members = torch.arange(batch.num_sequences)
    made = pack(batch, members, max_tokens=24, extra_row=batch.finish_reason == 1)
    made = fill_up(made, all_reduce_max([len(made)])[0], "cpu")
    found = critic.values(batch, made, metrics)
    batch = batch.with_(values=found["values"], returns=found["values"] * 0.5 + 1, loss_mask=batch.response_mask)
    part = optimizer_batch(batch, members, batch.response_mask, loss_agg_mode="token-mean", loss_scale_factor=None)
    shares = []
    critic.optimizer.step = lambda finite: (shares.append(summed(model, [])), (torch.tensor(1.0), True))[1]
    critic.update(part, made, metrics)
    metrics.muted = False
    return {
        "gradients": [gradient for gradient, _ in shares],
        "metrics": metrics.reduce(),
        "tokens": {"values": by_sample(batch, found["values"])},
        "bootstrap": dict(zip(batch.sample_id.tolist(), found["bootstrap_values"].tolist())),
        "sequences": batch.num_sequences,
    }


def summed(model: torch.nn.Module, shares: list[torch.Tensor]) -> tuple[list[float], float]:
    """Gradient of the model and loss over all ranks; the gradient is cleared."""
    flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    gradient, total = torch.cat(flat), torch.as_tensor(sum(shares), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(gradient)
        dist.all_reduce(total)
    model.zero_grad()
    return gradient.tolist(), float(total)


def by_sample(batch: RolloutBatch, values: torch.Tensor) -> dict[int, list[float]]:
    """A [T] quantity as lists by sample id."""
    return dict(zip(batch.sample_id.tolist(), [v.tolist() for v in values.split(batch.lengths.tolist())]))
