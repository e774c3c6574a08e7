"""Cases about group advantages, whitening, GAE, returns, filters and evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from reported_data import flags, make_batch, tensor
from torch import Tensor

from fastrl.algorithms import evaluation, get_advantage
from fastrl.algorithms.entry import make_entry
from fastrl.algorithms.filters import informative_groups as informative
from fastrl.algorithms.kl import FixedKL
from fastrl.algorithms.token_rewards import kl_in_reward, place_scores
from fastrl.config.schema import Config
from fastrl.data.batch import FinishReason
from fastrl.kernels import whiten as whiten_kernel
from fastrl.trainer.advantage import AdvantageStage, whiten_over_ranks
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.setup import advantage_stage


def group_advantage(i: dict[str, Any]) -> dict[str, Any]:
    data = {"scores": tensor(i["rewards"]), "group_id": torch.tensor(i["group_ids"])}
    if i.get("exclude_zero_token_samples"):
        data["valid"] = torch.tensor(i["valid_tokens"]) > 0
    options = {}
    if i["estimator"] == "grpo":
        options = {"ddof": i.get("ddof", 1), "epsilon": i.get("eps", 1e-6)}
    return {"adv": get_advantage(i["estimator"]).call(data, options)}


def group_advantage_table(i: dict[str, Any]) -> dict[str, Any]:
    table = {
        "grpo_ddof1": {"estimator": "grpo", "ddof": 1},
        "grpo_ddof0": {"estimator": "grpo", "ddof": 0},
        "dr_grpo": {"estimator": "dr_grpo"},
        "rloo": {"estimator": "rloo"},
    }
    return {name: group_advantage(i | changes)["adv"] for name, changes in table.items()}


def scores_as_advantages(scores: Tensor) -> Tensor:
    """An estimator whose advantages are handed in as scores."""
    return scores


def broadcast_advantage(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["masks"])
    rows, width = mask.shape
    per_step = tensor(i["trajectory_adv"])[torch.tensor(i["step_traj"])]
    batch = make_batch([width] * rows, mask=mask.flatten(), scores=per_step)
    entry = make_entry("advantage", "given", scores_as_advantages, level="sequence")
    advantages, _ = AdvantageStage(entry, {}, False, FixedKL(0.0)).estimate(batch)
    return {"adv": advantages.view(rows, width)}


def whiten(i: dict[str, Any]) -> dict[str, Any]:
    values = tensor(i["values"])
    mask = flags(i.get("mask", torch.ones_like(values).tolist()))
    return {"out": whiten_kernel(values, mask, ddof=i.get("ddof", 1), eps=i.get("eps", 1e-8))}


@contextmanager
def ranks(count: int) -> Iterator[Any]:
    """Collectives of the advantage stage among threads; yields run(work) -> results by rank."""
    barrier, slots = threading.Barrier(count), [None] * count
    rank_of = threading.local()

    def all_reduce_sum(tensors: dict[str, Tensor], group: Any = None) -> dict[str, Tensor]:
        slots[rank_of.number] = tensors
        barrier.wait()
        total = {name: torch.stack([s[name] for s in slots]).sum(0) for name in tensors}
        barrier.wait()
        return total

    def run(work: Any) -> list[Any]:
        results = [None] * count

        def one(number: int) -> None:
            rank_of.number = number
            results[number] = work(number)

        threads = [threading.Thread(target=one, args=(r,)) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    with mock.patch("fastrl.trainer.advantage.all_reduce_sum", all_reduce_sum):
        yield run


def whiten_sharded(i: dict[str, Any]) -> dict[str, Any]:
    shards = i.get("shards", i.get("values"))
    values = [tensor(v).flatten() for v in shards]
    masks = [flags(m).flatten() for m in i["mask"]] if "mask" in i else [torch.ones_like(v).bool() for v in values]
    with ranks(len(values)) as run:
        out = run(lambda r: whiten_over_ranks(values[r], masks[r]))
    return {"out": [o.tolist() for o in out]}


def row_normalize(i: dict[str, Any]) -> dict[str, Any]:
    values = tensor(i["values"])
    mask = flags(i.get("mask", torch.ones_like(values).tolist()))
    rows = [whiten_kernel(v, m, ddof=i.get("ddof", 1), eps=i.get("eps", 1e-8)) for v, m in zip(values, mask)]
    return {"out": torch.stack(rows)}


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    data = {"token_level_rewards": rewards, "response_mask": mask, "cu_seqlens": torch.tensor([0, mask.numel()])}
    return get_advantage("reinforce_plus_plus").call(data, {"gamma": gamma})[1]


def discounted_return(i: dict[str, Any]) -> dict[str, Any]:
    return {"returns": reward_to_go(tensor(i["rewards"]), flags(i["mask"]), i["gamma"])}


def kl_shaped_return(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["mask"])
    placed = place_scores(tensor([i["score"]]), mask, torch.tensor([0, mask.numel()]))
    rewards = kl_in_reward(placed, tensor(i["kl"]), mask, beta=i["kl_coef"])
    return {"returns": reward_to_go(rewards, mask, i["gamma"])}


def informative_groups(i: dict[str, Any]) -> dict[str, Any]:
    scores = torch.cat([tensor(r) for r in i["rewards"]])
    sizes = torch.tensor([len(r) for r in i["rewards"]])
    keep = informative(scores, torch.repeat_interleave(torch.arange(len(sizes)), sizes))
    return {"keep": keep[sizes.cumsum(0) - 1]}


def filter_groups(i: dict[str, Any]) -> dict[str, Any]:
    batch = make_batch([1] * len(i["rewards"]), group=i["group_ids"], scores=tensor(i["rewards"]))
    kept = informative(batch.scores, batch.group_id).nonzero()[:, 0]
    left = batch.select(kept)
    return {"kept_rows": left.sample_id, "rewards": left.scores}


def estimate_gae(
    rewards: Any, values: Any, mask: Any, *, gamma: float, lam: float, **more: Any
) -> tuple[Tensor, Tensor]:
    rewards, values, mask = tensor(rewards), tensor(values), flags(mask)
    if rewards.ndim == 1:
        rewards, values, mask = rewards[None], values[None], mask[None]
    rows, width = rewards.shape
    data = {
        "token_level_rewards": rewards.flatten(),
        "values": values.flatten(),
        "response_mask": mask.flatten(),
        "cu_seqlens": torch.arange(rows + 1) * width,
    } | more
    options = {"gamma": float(gamma), "gae_lambda": float(lam), "bootstrap_truncated": "bootstrap_values" in more}
    advantages, returns = get_advantage("gae").call(data, options)
    shape = (rows, width) if rows > 1 else (width,)
    return advantages.view(shape), returns.view(shape)


def gae(i: dict[str, Any]) -> dict[str, Any]:
    advantages, returns = estimate_gae(i["rewards"], i["values"], i["mask"], gamma=i["gamma"], lam=i["lam"])
    return {"advantages": advantages, "returns": returns}


def gae_outcome(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["mask"])
    placed = place_scores(tensor([i["score"]]), mask, torch.tensor([0, mask.numel()]))
    return gae(i | {"rewards": placed.tolist()})


def gae_batch(i: dict[str, Any]) -> dict[str, Any]:
    mask = i.get("mask", torch.ones_like(tensor(i["rewards"])).tolist())
    bootstrap = i.get("bootstrap_values", i.get("bootstrap"))
    truncated = flags(i["truncated"])
    more = (
        {} if bootstrap is None else {"bootstrap_values": torch.where(truncated, tensor(bootstrap), torch.tensor(0.0))}
    )
    advantages, returns = estimate_gae(i["rewards"], i["values"], mask, gamma=i["gamma"], lam=i["lam"], **more)
    return {"advantages": advantages, "returns": returns}


def formula(text: str, t: int) -> float:
    """A generated input of the cases: a formula of t."""
    from math import cos, exp, sin

    return float(
        eval(text, {"__builtins__": {}}, {"t": t, "sin": sin, "cos": cos, "exp": exp, "mod": lambda a, b: a % b})
    )


def gae_formula(i: dict[str, Any]) -> dict[str, Any]:
    length = i.get("T", i.get("length"))
    rewards = [formula(str(i["rewards"]), t) for t in range(length)]
    values = [formula(str(i["values"]), t) for t in range(length)]
    mask = [formula(str(i.get("mask", 1)), t) != 0 for t in range(length)]
    advantages, returns = estimate_gae(rewards, values, mask, gamma=i["gamma"], lam=i["lam"])
    at = torch.tensor(i.get("check", i.get("indices", list(range(length)))))
    return {"advantages": advantages[at], "returns": returns[at]}


def gae_formula_lengths(i: dict[str, Any]) -> dict[str, Any]:
    lengths = i.get("lengths", i.get("Ts"))
    results = [gae_formula(i | {"T": length}) for length in lengths]
    return {name: [r[name].tolist() for r in results] for name in ("advantages", "returns")}


def gae_identities(i: dict[str, Any]) -> dict[str, Any]:
    def run(gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        return estimate_gae(i["rewards"], i["values"], i["mask"], gamma=gamma, lam=lam)

    return {
        "lam0_gamma1": run(1.0, 0.0)[0],
        "gamma0": run(0.0, 1.0)[0],
        "returns_gamma1_lam1": run(1.0, 1.0)[1],
    }


def place_score(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["mask"])
    rows, width = mask.shape
    placed = place_scores(tensor(i["scores"]), mask.flatten(), torch.arange(rows + 1) * width)
    return {"token_rewards": placed.view(rows, width)}


def overlong_filter(i: dict[str, Any]) -> dict[str, Any]:
    mask, truncated = flags(i["mask"]), flags(i["truncated"])
    rows, width = mask.shape
    reasons = torch.where(truncated, int(FinishReason.length), int(FinishReason.stop)).to(torch.int8)
    batch = make_batch([width] * rows, mask=mask.flatten(), finish_reason=reasons)
    stage = advantage_stage(Config(algorithm={"advantage": "grpo", "overlong_masking": True}))
    kept = stage.masks(batch, Metrics()).loss_mask.view(rows, width)
    lengths = mask.sum(-1)  # lengths are those of what was sampled, whatever leaves the loss
    return {
        "mask": kept.int(),
        "loss_mask": kept.int(),
        "lengths": lengths,
        "mean_length": float(lengths.double().mean()),
        "max_length": int(lengths.max()),
        "truncated_fraction": float(truncated.double().mean()),
    }


def pass_at_k(i: dict[str, Any]) -> dict[str, Any]:
    values = [
        float(evaluation.pass_at_k(torch.tensor([c["n"]]), torch.tensor([c["c"]]), c["k"])[0]) for c in i["cases"]
    ]
    return {"values": values}
