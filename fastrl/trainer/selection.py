"""Choices over a whole optimizer batch before it is split: batch-level losses, the entropy quantile, the bonus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastrl.algorithms.entropy import AdaptiveEntropy, top_entropy_mask
from fastrl.data.packing import MicroBatch
from fastrl.trainer.losses import OptimizerBatch
from fastrl.trainer.normalizers import reduce_one

if TYPE_CHECKING:
    from fastrl.trainer.loop import Trainer


@dataclass
class EntropyController:
    """The entropy bonus: a fixed coefficient, or one that steers the measured entropy to a target."""

    coef: float
    target: float | None = None

    def __post_init__(self) -> None:
        self.adaptive = None if self.target is None else AdaptiveEntropy(self.coef, target=self.target)

    @property
    def active(self) -> bool:
        """True when there is a bonus."""
        return self.value > 0 or self.adaptive is not None

    @property
    def value(self) -> float:
        """The coefficient that serves the current step."""
        return self.coef if self.adaptive is None else self.adaptive.value

    def update(self, entropy: float) -> None:
        """Move the coefficient by the entropy (nats per token) that the finished step measured."""
        if self.adaptive is not None:
            self.adaptive.update(entropy)

    def state_dict(self) -> dict[str, Any]:
        """The adaptive part's state, empty for a fixed coefficient."""
        return {} if self.adaptive is None else self.adaptive.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        if self.adaptive is not None and state:
            self.adaptive.load_state_dict(state)


def select_tokens(
    trainer: Trainer, members: OptimizerBatch, micro_batches: list[MicroBatch], mask: Tensor, update: int
) -> tuple[OptimizerBatch, Tensor]:
    """The optimizer batch after its selections, and the mask [T] of the tokens that stay in the loss.

    Log-probs and entropies come from a no-gradient pass over the optimizer batch, made here: the same numbers for any
    split into micro-batches. The entropy quantile shrinks the mask, so the scale is counted anew; a batch-level loss
    gets its selection.
    """
    actor, batch, settings = trainer.parts.actor, members.batch, trainer.parts.actor.settings
    rows = actor.log_prob(batch, micro_batches, want_entropy=True, metrics=trainer.metrics)
    quantile = trainer.config.algorithm.entropy_quantile
    if quantile is not None:
        mask = top_entropy_mask(rows["entropy"], members.scale != 0, quantile, reduce=reduce_one)
        members = trainer.members(batch, members.sequences, mask, members.num_updates_before)
        trainer.metrics.add("policy/entropy_kept_fraction", mask.sum(), batch.need("loss_mask").sum())
    if settings.policy_loss.select is not None:
        data: dict[str, Any] = {name: getattr(batch, name, None) for name in settings.policy_loss.data}
        data |= selection_data(trainer, members, rows, update)
        members = replace(members, selection=settings.policy_loss.make_selection(data, settings.options))
    return members, mask


def selection_data(trainer: Trainer, members: OptimizerBatch, rows: dict[str, Tensor], update: int) -> dict[str, Any]:
    """What a selection may look at: detached [T] tensors of the optimizer batch and the address of its random picks."""
    batch = members.batch
    return {
        "log_prob": rows["log_prob"],
        "old_log_prob": batch.need("old_log_prob"),
        "advantages": batch.need("advantages"),
        "entropy": rows["entropy"],
        "loss_mask": members.scale != 0,
        "cu_seqlens": batch.cu_seqlens,
        "sample_id": batch.sample_id,
        "seed": trainer.config.run.seed,
        "update": update,
        "reduce": reduce_one,
    }
