"""Cases about aggregation, policy and value losses, KL and corrections."""

from __future__ import annotations

from typing import Any

import torch
from reported_data import GIVEN, flags, make_batch, optimizer_members, tensor, token_sum
from torch import Tensor

from fastrl.algorithms import get_correction, get_kl
from fastrl.algorithms.kl import AdaptiveKL, unbiased_kl
from fastrl.algorithms.token_rewards import kl_in_reward, place_scores
from fastrl.algorithms.value_loss import value_loss as value_loss_of
from fastrl.config.schema import Config
from fastrl.kernels import aggregate, kl_divergence, masked_stats
from fastrl.trainer.losses import LossSettings, OptimizerBatch, token_terms
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.setup import advantage_stage, loss_settings


def settings(**algorithm: Any) -> LossSettings:
    """The loss that a configuration trains with."""
    return loss_settings(Config(algorithm=algorithm))


def aggregate_loss(i: dict[str, Any]) -> dict[str, Any]:
    loss, mask = tensor(i["token_loss"]), flags(i["mask"])
    rows, width = loss.shape
    x = loss.flatten().requires_grad_()
    factor = i.get("loss_scale_factor", i.get("max_len"))
    members = optimizer_members(mask.flatten(), [width] * rows, i["mode"], factor, group=i.get("group_ids"))
    shares = []
    for rank in i.get("layout", [[list(range(rows))]]):
        share = torch.zeros(())
        for micro in rank:
            index = torch.tensor([row * width + t for row in micro for t in range(width)])
            terms, _ = token_terms(GIVEN, members, x[index], None, index)
            share = share + terms.sum()
        shares.append(share)
    torch.stack(shares).sum().backward()
    # ranks add their gradients up here; the cases' ranks average them, which takes the world size back out
    values = [float(share.detach()) for share in shares]
    scalars = [value * len(shares) for value in values]
    return {
        "loss": sum(values),
        "token_weight": x.grad.view(rows, width),
        "per_rank_backward_scalar": scalars,
    }


def aggregate_loss_invariance(i: dict[str, Any]) -> dict[str, Any]:
    results = [aggregate_loss(i | {"layout": layout}) for layout in i["layouts"]]
    first = results[0]
    same = all(torch.allclose(r["token_weight"], first["token_weight"], rtol=1e-6, atol=0) for r in results)
    losses = [r["loss"] for r in results]
    return {"loss": first["loss"], "losses": losses, "token_weight": first["token_weight"], "invariant": same}


def aggregate_loss_all_modes(i: dict[str, Any]) -> dict[str, Any]:
    results = {mode: aggregate_loss(i | {"mode": mode}) for mode in i["modes"]}
    first = next(iter(results.values()))
    agree = all(
        r["loss"] == first["loss"] and torch.equal(r["token_weight"], first["token_weight"]) for r in results.values()
    )
    if agree:
        return {"loss": first["loss"], "token_weight": first["token_weight"]}
    return {
        "loss": {mode: r["loss"] for mode, r in results.items()},
        "token_weight": {mode: r["token_weight"] for mode, r in results.items()},
    }


def aggregate_loss_packed(i: dict[str, Any]) -> dict[str, Any]:
    loss, mask = tensor(i["token_loss"]).flatten(), flags(i["mask"]).flatten()
    segments = torch.tensor(i["segments"]).flatten()
    lengths = torch.unique_consecutive(segments, return_counts=True)[1].tolist()
    x = loss.requires_grad_()
    members = optimizer_members(mask, lengths, i["mode"], i.get("max_len"))
    terms, _ = token_terms(GIVEN, members, x, None, torch.arange(x.numel()))
    terms.sum().backward()
    return {"loss": float(terms.sum().detach()), "token_weight": x.grad}


def loss_windows(i: dict[str, Any]) -> dict[str, Any]:
    losses = []
    for start in range(0, len(i["micro"]), i["accumulate"]):
        window = i["micro"][start : start + i["accumulate"]]
        lengths = [m["tokens"] for m in window]
        values = torch.cat([torch.full((m["tokens"],), m["loss_sum"] / m["tokens"]) for m in window])
        members = optimizer_members(torch.ones_like(values, dtype=torch.bool), lengths, "token-mean", None)
        losses.append(float(token_terms(GIVEN, members, values, None, torch.arange(values.numel()))[0].sum()))
    return {"window_losses": losses, "n_updates": len(losses)}


def clipped_policy_loss(i: dict[str, Any]) -> dict[str, Any]:
    loss = settings(
        policy_loss="clip",
        clip_low=i["eps_low"],
        clip_high=i["eps_high"],
        dual_clip=i.get("dual_clip_c"),
        correction="none",
    )
    x = tensor(i["logp"]).requires_grad_()
    old = None if i["old_logp"] is None else tensor(i["old_logp"])
    terms, stats = token_sum(loss, x, flags(i["mask"]), old_log_prob=old, advantages=tensor(i["advantages"]))
    terms.sum().backward()
    clip = ((stats["clip_high"] + stats["clip_low"]) > 0).double().mean()
    return {"token_loss": terms, "grad_logp": x.grad, "clip_fraction": float(clip)}


def gspo_loss(i: dict[str, Any]) -> dict[str, Any]:
    log_ratio, mask = tensor(i["log_ratio"]), flags(i["mask"])
    rows, width = log_ratio.shape
    x = log_ratio.flatten().requires_grad_()
    advantages = tensor(i["advantages"]).repeat_interleave(width)
    loss = settings(
        policy_loss="gspo",
        clip_low=i["eps_low"],
        clip_high=i["eps_high"],
        loss_agg_mode="seq-mean-token-mean",
        correction="none",
    )
    members = optimizer_members(
        mask.flatten(),
        [width] * rows,
        "seq-mean-token-mean",
        None,
        old_log_prob=torch.zeros(rows * width),
        advantages=advantages,
    )
    terms, stats = token_terms(loss, members, x, None, torch.arange(rows * width), members.batch.cu_seqlens)
    summed = terms.view(rows, width).sum(-1) * rows  # the mean over sequences, taken back to a sum
    summed.sum().backward()
    first = mask.int().argmax(-1)
    ratio = stats["ratio"].view(rows, width)[torch.arange(rows), first]
    return {"sequence_loss": summed, "grad_logp_of_sum": x.grad.view(rows, width), "ratio": ratio}


def cispo_loss(i: dict[str, Any]) -> dict[str, Any]:
    options = {"max_ratio": 1.0 + i["eps_high"]} if i.get("eps_low") is None else {}
    clips = {} if options else {"clip_low": i["eps_low"], "clip_high": i["eps_high"]}
    loss = settings(policy_loss="cispo", policy_loss_options=options, correction="none", **clips)
    x = tensor(i["logp"]).requires_grad_()
    terms, _ = token_sum(
        loss, x, flags(i["mask"]), old_log_prob=tensor(i["old_logp"]), advantages=tensor(i["advantages"])
    )
    terms.sum().backward()
    return {"token_loss": terms, "grad_logp": x.grad}


def corrected_policy_loss(i: dict[str, Any]) -> dict[str, Any]:
    algorithm = {
        "advantage": "grpo",
        "policy_loss": "clip",
        "kl_loss_coef": i["beta"],
        "kl_loss_kind": i["kl"],
        "correction": "token_truncate",
        "correction_options": {"cap": i["cap"]},
    }
    fields = {
        name: tensor(i[key])
        for name, key in (
            ("old_log_prob", "old_logp"),
            ("rollout_log_prob", "rollout_logp"),
            ("ref_log_prob", "ref_logp"),
            ("advantages", "advantages"),
        )
    }
    mask = flags(i["mask"])
    batch = make_batch([mask.numel()], mask=mask, loss_mask=mask, **fields)
    weight = advantage_stage(Config(algorithm=algorithm)).correct(batch, Metrics()).rollout_weight
    x = tensor(i["logp"]).requires_grad_()
    terms, _ = token_sum(settings(**algorithm), x, mask, rollout_weight=weight, **fields)
    terms.sum().backward()
    return {"weight": weight, "token_loss": terms, "grad_logp": x.grad}


def seq_mask_tis_weights(i: dict[str, Any]) -> dict[str, Any]:
    log_weight = tensor(i["log_weight"])
    rows, width = log_weight.shape
    mask = flags(i.get("mask", [[1] * width] * rows))
    low, high = i.get("low", i.get("geo_low")), i.get("high", i.get("geo_high"))
    rule = {"statistic": "k1", "level": "seq_mean", "lower": low, "upper": high}
    result = get_correction("reject_geometric_token_truncate").call(
        {
            "old_log_prob": log_weight.flatten(),
            "rollout_log_prob": torch.zeros(rows * width),
            "response_mask": mask.flatten(),
            "cu_seqlens": torch.arange(rows + 1) * width,
        },
        {"rejection": [rule], "cap": float(i.get("cap", i.get("clamp", 2.0)))},
    )
    weights = torch.where(result.keep, result.weight, torch.zeros_like(result.weight)).view(rows, width)
    return {"weights": weights, "keep": result.keep.view(rows, width).any(-1)}


def tis_weights(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["mask"])
    data = {
        "old_log_prob": tensor(i["train_logp"]),
        "rollout_log_prob": tensor(i["rollout_logp"]),
        "response_mask": mask,
    }
    result = get_correction("token_truncate").call(data, {"cap": float(i["cap"])})
    return {"weights": torch.where(mask, result.weight, torch.zeros_like(result.weight))}


def masked_entropy_proxy(i: dict[str, Any]) -> dict[str, Any]:
    surprise, mask = -tensor(i["logp"]), flags(i["mask"])
    rows, width = surprise.shape
    per_row = masked_stats(surprise.flatten(), mask.flatten(), cu_seqlens=torch.arange(rows + 1) * width)
    return {
        "mean_of_row_sums": float(per_row.sum.mean()),
        "token_mean": float(masked_stats(surprise, mask).mean),
    }


def value_loss(i: dict[str, Any]) -> dict[str, Any]:
    clip = i.get("value_clip", i.get("clip", i.get("eps")))
    v = tensor(i["values"]).requires_grad_()
    loss = value_loss_of(v, tensor(i["old_values"]), tensor(i["returns"]), value_clip=clip).loss
    mask = flags(i.get("mask", torch.ones_like(v).tolist()))
    kept = torch.where(mask, loss, torch.zeros_like(loss))
    kept.sum().backward()
    return {"token_loss": kept, "grad_values": v.grad, "loss": float(aggregate(loss, mask)) if mask.any() else 0.0}


def total_loss(i: dict[str, Any]) -> dict[str, Any]:
    loss = tensor([i["policy_loss"]])
    one = LossSettings(GIVEN.policy_loss, {}, kl=get_kl("k1"), kl_coef=i["kl_coef"])
    members = optimizer_members(flags([1]), [1], "token-sum", None, ref_log_prob=loss - i["kl"])
    members = OptimizerBatch(members.batch, members.sequences, members.scale, entropy_coef=i["entropy_coef"])
    terms, _ = token_terms(one, members, loss, tensor([i["entropy"]]), torch.arange(1))
    return {"total": float(terms.sum())}


def estimate(kind: str, x: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """A KL estimate and its gradient."""
    x = x.clone().requires_grad_()
    value = get_kl(kind).call({"log_prob": x, "ref_log_prob": ref})
    value.sum().backward()
    return value.detach(), x.grad


def kl_estimate(i: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for kind in ("k1", "k2", "k3"):
        out[kind], out[f"grad_{kind}"] = estimate(kind, tensor(i["logp"]), tensor(i["ref_logp"]))
    return out


def kl_estimate_clipped(i: dict[str, Any]) -> dict[str, Any]:
    value, grad = estimate(i["estimator"], tensor(i["logp"]), tensor(i["ref_logp"]))
    return {"value": value, "grad": grad, "grad_finite": bool(torch.isfinite(grad).all())}


def kl_masked_mean(i: dict[str, Any]) -> dict[str, Any]:
    kl = kl_divergence(tensor(i["logp"]), tensor(i["ref_logp"]), kind=i["estimator"])
    return {"value": float(aggregate(kl, flags(i["mask"])))}


def kl_expectation(i: dict[str, Any]) -> dict[str, Any]:
    ref = torch.log_softmax(tensor(i["ref_logits"], torch.float64), -1)
    out: dict[str, Any] = {}
    for kind in ("k1", "k2", "k3", "full"):
        logits = tensor(i["policy_logits"], torch.float64).requires_grad_()
        log_p = torch.log_softmax(logits, -1)
        if kind == "full":
            value = get_kl("full").call({"logits": logits[None], "ref_logits": ref[None]}).sum()
        else:
            value = (log_p.detach().exp() * get_kl(kind).call({"log_prob": log_p, "ref_log_prob": ref})).sum()
        value.backward()
        name = "kl" if kind == "full" else kind
        out[name], out[f"grad_{name}"] = float(value.detach()), logits.grad
    return out


def kl_importance_corrected(i: dict[str, Any]) -> dict[str, Any]:
    x, old = tensor(i["logp"]).requires_grad_(), tensor(i["old_logp"])
    value = unbiased_kl(kl_divergence(x, tensor(i["ref_logp"]), kind=i.get("estimator", "k3")), x, old)
    value.sum().backward()
    return {"value": value, "grad": x.grad}


def kl_shaped_rewards(i: dict[str, Any]) -> dict[str, Any]:
    mask = flags(i["mask"])
    kl = kl_divergence(tensor(i["logp"]), tensor(i["ref_logp"]), kind="k1")
    placed = place_scores(tensor([i["score"]]), mask, torch.tensor([0, mask.numel()]))
    return {"rewards": kl_in_reward(placed, kl, mask, beta=i["beta"])}


def kl_descent(i: dict[str, Any]) -> dict[str, Any]:
    ref = tensor(i["ref_logits"], torch.float64)[None]
    logits = tensor(i["policy_logits"], torch.float64).requires_grad_()

    def kl() -> Tensor:
        return get_kl("full").call({"logits": logits[None], "ref_logits": ref}).sum()

    before = float(kl().detach())
    for _ in range(i.get("steps", 1)):
        (gradient,) = torch.autograd.grad(i["beta"] * kl(), logits)
        logits = (logits - i["lr"] * gradient).detach().requires_grad_()
    return {"kl_before": before, "kl_after": float(kl().detach()), "must_decrease": float(kl().detach()) < before}


def adaptive_kl(i: dict[str, Any]) -> dict[str, Any]:
    controller = AdaptiveKL(i.get("init", i.get("beta")), target=i["target"], horizon=i["horizon"])
    updates = i.get("updates") or [{"kl": kl, "n": i.get("batch", i.get("n", 1))} for kl in i["kls"]]
    values = [controller.update(u["kl"], u.get("n", u.get("batch", 1))) for u in updates]
    return {"values": values, "betas": values, "coefs": values}
