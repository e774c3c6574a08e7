"""From scores to advantages: score placed, KL in the reward, correction, masks, estimator, whitening.

Group statistics are taken over the samples of all ranks, whitening over the tokens of all ranks, both before any split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.algorithms.advantages.reinforce import RunningBaseline
from fastrl.algorithms.kl import FixedKL
from fastrl.algorithms.registry import Entry
from fastrl.algorithms.token_rewards import kl_in_reward, move_to_sampled, place_scores
from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.dist.collectives import all_reduce_sum, data_group
from fastrl.errors import ConfigError
from fastrl.kernels import whiten
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import gather_own, reduce_one, sequence_sums

SEQUENCE_DATA = ("scores", "group_id", "valid", "lengths", "greedy_scores", "sample_id")  # gathered over ranks


@dataclass
class AdvantageStage:
    """Everything between rewards and updates. `kl_controller.value` is the beta that serves the current step."""

    estimator: Entry
    options: dict[str, Any]
    whiten: bool
    kl_controller: FixedKL
    kl: Entry | None = None  # estimator of the KL in the reward; None without such a term
    correction: Entry | None = None
    correction_options: dict[str, Any] = field(default_factory=dict)
    overlong_masking: bool = False
    overlong_leaves_baseline: bool = False
    running: RunningBaseline | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        decay = self.options.get("baseline_decay")
        if decay is not None and "running_baseline" in self.estimator.data:
            self.running = RunningBaseline(decay)

    def __call__(self, batch: RolloutBatch, metrics: Metrics) -> RolloutBatch:
        """The batch with token_level_scores, token_level_rewards, loss_mask, rollout_weight, advantages and returns."""
        scorable = batch.need("valid")
        batch = self.rewards(batch, metrics)
        batch = self.masks(batch, metrics)
        if not self.corrects_last:
            batch = self.correct(batch, metrics)
        advantages, returns = self.estimate(batch)
        if self.whiten:
            counted = batch.response_mask & batch.need("valid")[batch.sequence_index]
            advantages = whiten_over_ranks(advantages, counted)
        advantages = torch.where(batch.response_mask, advantages, torch.zeros_like(advantages))
        batch = batch.with_(advantages=advantages, returns=returns)
        if self.corrects_last:
            batch = self.correct(batch, metrics)
        loss_mask = batch.need("loss_mask")
        metrics.add_moments("policy/advantage", advantages, loss_mask)
        metrics.add_sum("policy/loss_tokens", loss_mask.sum())
        masked = (batch.response_mask & ~loss_mask).sum()
        metrics.add_sum("policy/masked_tokens", masked)
        metrics.add("policy/masked_fraction", masked, batch.response_mask.sum())
        metrics.add_sum("policy/masked_sequences", (sequence_sums(loss_mask, batch) == 0).sum())
        return batch.with_(valid=scorable)

    def rewards(self, batch: RolloutBatch, metrics: Metrics) -> RolloutBatch:
        """token_level_scores, and token_level_rewards with the KL to the reference taken off."""
        valid = batch.need("valid")
        scores = torch.where(valid, batch.need("scores"), torch.zeros_like(batch.need("scores")))
        placed = place_scores(scores, batch.response_mask, batch.cu_seqlens)
        if batch.token_level_scores is not None:  # what an environment gave to single tokens
            given, moved, lost = move_to_sampled(batch.token_level_scores, batch.response_mask, batch.cu_seqlens)
            placed = placed + given
            metrics.add_sum("reward/moved_to_sampled", moved)
            metrics.add_sum("reward/moved_nowhere", lost)
        rewards = placed
        beta = self.kl_controller.value
        if beta > 0 and self.kl is not None:
            kl = self.kl_of(batch, self.kl)
            rewards = kl_in_reward(placed, kl, batch.response_mask, beta=beta)
            per_sequence = sequence_sums(torch.where(batch.response_mask, kl, torch.zeros_like(kl)), batch)
            lengths = sequence_sums(batch.response_mask, batch).clamp(min=1)
            totals = all_reduce_sum(
                {"kl": (per_sequence / lengths).sum(), "n": torch.tensor(float(batch.num_sequences))}, data_group()
            )
            mean_kl, count = float(totals["kl"] / totals["n"].clamp(min=1)), int(totals["n"])
            metrics.set("kl/reward", mean_kl)
            metrics.set("kl/reward_coef", beta)
            metrics.add_mean("reward/kl_penalty", beta * per_sequence)
            self.kl_controller.update(mean_kl, count)
        return batch.with_(scores=scores, token_level_scores=placed, token_level_rewards=rewards)

    def kl_of(self, batch: RolloutBatch, estimator: Entry) -> Tensor:
        """KL per token [T] of the old policy to the reference."""
        if "logits" in estimator.needs:
            return batch.need("ref_kl")
        return estimator.call({"log_prob": batch.need("old_log_prob"), "ref_log_prob": batch.need("ref_log_prob")})

    def masks(self, batch: RolloutBatch, metrics: Metrics) -> RolloutBatch:
        """loss_mask without unscorable and, if asked for, overlong responses; `valid` becomes who is in a baseline."""
        kept = batch.need("valid")
        baseline = kept
        if self.overlong_masking:
            cut = batch.finish_reason == int(FinishReason.length)
            metrics.add_sum("policy/overlong_masked", (kept & cut).sum())
            kept = kept & ~cut
            baseline = kept if self.overlong_leaves_baseline else baseline
        return batch.with_(loss_mask=batch.response_mask & kept[batch.sequence_index], valid=baseline)

    def correct(self, batch: RolloutBatch, metrics: Metrics) -> RolloutBatch:
        """rollout_weight, and loss_mask after rejections, where the old pass ran; the rejected leave the baseline."""
        if self.correction is None or batch.old_log_prob is None or batch.rollout_log_prob is None:
            return batch
        data = {name: getattr(batch, name, None) for name in self.correction.data}
        result = self.correction.call(data | {"reduce": reduce_one}, self.correction_options)
        record(result.stats, metrics)
        keep = result.keep
        lost = (batch.response_mask & ~keep).sum()
        metrics.add_sum("mismatch/rejected_tokens", lost)
        metrics.add("mismatch/rejected_fraction", lost, batch.response_mask.sum())
        rejected = (sequence_sums(batch.response_mask, batch) > 0) & (sequence_sums(keep, batch) == 0)
        metrics.add_sum("mismatch/rejected_sequences", rejected.sum())
        return batch.with_(
            rollout_weight=result.weight,
            loss_mask=batch.need("loss_mask") & keep,
            valid=batch.need("valid") & ~rejected,
        )

    @property
    def corrects_last(self) -> bool:
        """True when the rejection looks at advantages and so comes after the estimator."""
        return (
            self.correction is not None
            and self.correction.complete(self.correction_options).get("off_policy_delta") is not None
        )

    def estimate(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """The estimator's (advantages [T], returns [T]), unwhitened."""
        if self.estimator.level == "sequence":
            per_sequence = self.sequence_advantages(batch)
            spread = per_sequence[batch.sequence_index]
            advantages = torch.where(batch.response_mask, spread, torch.zeros_like(spread))
            return advantages, advantages
        data = {name: getattr(batch, name, None) for name in self.estimator.data}
        if "lengths" in data:
            data["lengths"] = sequence_sums(batch.response_mask, batch)
        result = self.estimator.call(data, self.options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                f"algorithm.advantage = {self.estimator.name}: returned a {type(result).__name__} instead of "
                "(advantages, returns)"
            )
        for part in result:
            self.check_shape(part, batch.response_mask, "token")
        return result

    def check_shape(self, value: Any, like: Tensor, unit: str) -> None:
        """Refuses what an estimator must not return: anything else than one number per token or response."""
        if not isinstance(value, Tensor) or value.shape != like.shape:
            what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"algorithm.advantage = {self.estimator.name}: returned {what} instead of a tensor of shape "
                f"{list(like.shape)}, one number per {unit}"
            )

    def sequence_advantages(self, batch: RolloutBatch) -> Tensor:
        """Advantages [S] of this rank, from the scalars of all ranks."""
        columns = {name: getattr(batch, name, None) for name in SEQUENCE_DATA}
        columns["lengths"] = sequence_sums(batch.response_mask, batch)
        if "components" in self.estimator.data:
            columns |= {f"component/{name}": value for name, value in (batch.components or {}).items()}
        present = {name: value for name, value in columns.items() if value is not None}
        gathered, own = gather_own(list(present.values()), data_group())
        data: dict[str, Any] = dict(zip(present, gathered))
        if self.running is not None and self.running.num_updates:
            data["running_baseline"] = torch.as_tensor(self.running.value, dtype=data["scores"].dtype)
        if "components" in self.estimator.data:
            data["components"] = {
                n.removeprefix("component/"): data.pop(n) for n in list(data) if n.startswith("component/")
            }
        advantages = self.estimator.call(data, self.options)
        self.check_shape(advantages, data["scores"], "response")
        if self.running is not None and bool(data["valid"].any()):
            self.running.update(float(data["scores"][data["valid"]].mean()))
        return advantages[own]

    def state_dict(self) -> dict[str, Any]:
        """The running baseline and the KL coefficient."""
        return {
            "kl": self.kl_controller.state_dict(),
            "baseline": None if self.running is None else self.running.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.kl_controller.load_state_dict(state["kl"])
        if self.running is not None and state["baseline"] is not None:
            self.running.load_state_dict(state["baseline"])


def whiten_over_ranks(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with mean and variance (ddof 1, two-pass) over the masked tokens of all ranks.

    Fewer than two tokens: x - mean. All [T].
    """
    kept = torch.where(mask, values, torch.zeros_like(values)).double()
    first = all_reduce_sum({"sum": kept.sum(), "count": mask.sum().double()}, data_group())
    mean = first["sum"] / first["count"].clamp(min=1)
    deviation = torch.where(mask, kept - mean, torch.zeros_like(kept))
    squares = all_reduce_sum({"squares": (deviation * deviation).sum()}, data_group())["squares"]
    enough = first["count"] > 1
    variance = torch.where(enough, squares / (first["count"] - 1).clamp(min=1), torch.ones_like(squares))
    eps = torch.where(enough, 1e-8, 0.0)
    return whiten(values, mask, mean=mean.to(values.dtype), var=(variance + eps).to(values.dtype), eps=0.0)


def record(stats: dict[str, tuple[Tensor, Tensor]], metrics: Metrics) -> None:
    """Counted statistics (sum, count) of a correction, under `mismatch/`."""
    for name, (total, count) in stats.items():
        metrics.add(CORRECTION_STATS.get(name, f"mismatch/{name}"), total, count)
        if name in ("truncated_tokens", "masked_tokens"):
            metrics.add_sum("mismatch/clipped_tokens", total)


CORRECTION_STATS = {
    "truncated_tokens": "mismatch/clipped_fraction",
    "masked_tokens": "mismatch/clipped_fraction",
    "rollout_weight": "mismatch/applied_weight/mean",
    "tokens_without_log_prob": "mismatch/missing_fraction",
}
