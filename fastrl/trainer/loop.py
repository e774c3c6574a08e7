"""The loop. `Trainer.step` names every stage in order; each stage lives in a file of its own.

generate -> exchange -> old log-prob -> reference log-prob -> values -> reward -> advantage -> update critic ->
update actor -> sync weights -> log. What the plan does not ask for does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.config.schema import Config
from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import MicroBatch, fill_up, pack, plan_optimizer_batches
from fastrl.data.prompts import Prompt, PromptCursor
from fastrl.dist.collectives import all_gather_rows, all_reduce_max, any_rank, world_size
from fastrl.errors import Terminated
from fastrl.models.flops import peak_flops
from fastrl.rollout.engine import Engine
from fastrl.rollout.records import RolloutWriter
from fastrl.rollout.seeds import sample_seed
from fastrl.trainer.actor import Actor, PolicyModel
from fastrl.trainer.advantage import AdvantageStage
from fastrl.trainer.balancing import Exchange
from fastrl.trainer.choreography import Choreography
from fastrl.trainer.critic import Critic
from fastrl.trainer.full_kl import FullKL
from fastrl.trainer.generation import Generator, RefillSettings, ScoredSample, build_batch, fill_batch, resampled
from fastrl.trainer.losses import OptimizerBatch
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import optimizer_batch, remaining
from fastrl.trainer.observe import batch_metrics, mismatch_metrics, rollout_metrics
from fastrl.trainer.plan import Plan
from fastrl.trainer.probe import DeliveryProbe
from fastrl.trainer.records import kept_records, mean_advantages
from fastrl.trainer.reporter import Reporter
from fastrl.trainer.selection import EntropyController, select_tokens
from fastrl.trainer.sequence import counts_loss, merge_seen
from fastrl.trainer.shared_engine import Sharing
from fastrl.trainer.validation import Validator


@dataclass
class Parts:
    """Everything a trainer drives, built by `fastrl.trainer.setup` from the configuration."""

    config: Config
    plan: Plan
    actor: Actor
    reference: PolicyModel | None
    critic: Critic | None
    engine: Engine
    memory: Choreography
    probe: DeliveryProbe | None
    generator: Generator
    cursor: PromptCursor
    exchange: Exchange
    advantages: AdvantageStage
    entropy: EntropyController
    validator: Validator | None
    metrics: Metrics
    device: torch.device
    total_steps: int
    num_overlong_prompts: int = 0
    sharing: Sharing = field(default_factory=Sharing)


Packed = list[tuple[Tensor, list[MicroBatch]]]  # per optimizer batch: its sequences and their micro-batches


class Trainer:
    """One rank of a run. `fit` trains; `step_number` counts finished steps, `version` the weight updates of the engine.

    Args:
        reporter: is told phases, progress and the numbers of every step.
        writer: keeps generated samples; None keeps none.
        checkpoint: called when a checkpoint is due, with the step's validation score if there is one.
        asked_to_stop: looked at after every step; true on some rank makes all save and stop.
    """

    def __init__(
        self,
        parts: Parts,
        reporter: Reporter,
        writer: RolloutWriter | None,
        checkpoint: Callable[[float | None], None],
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.parts, self.config, self.plan = parts, parts.config, parts.plan
        self.reporter, self.writer, self.checkpoint = reporter, writer, checkpoint
        self.asked_to_stop = asked_to_stop
        self.metrics = parts.metrics
        self.step_number = 0
        self.largest_microbatch = 0  # rows of the largest micro-batch packed so far
        self.version = 0
        self.samples: list[ScoredSample] = []

    def fit(self) -> None:
        """Train until `total_steps`; validate and save when due, and at the end.

        Raises Terminated when it was asked to stop, after a checkpoint.
        """
        run, total = self.config.run, self.parts.total_steps
        self.parts.memory.open(self.parts.actor.model, self.version)
        if run.validate_before_training and self.step_number == 0:
            values, held_out = self.validate()
            if values:
                self.keep_samples(None, held_out)
                self.reporter.log(0, values)
        while self.step_number < total:
            batch, values = self.step()
            last, held_out = self.step_number == total, None
            if last or is_due(self.step_number, run.validation_every_steps):
                figures, held_out = self.validate()
                values |= figures
            self.keep_samples(batch, held_out)
            self.reporter.log(self.step_number, values)
            stopping = not last and any_rank(self.asked_to_stop())
            if last or stopping or is_due(self.step_number, run.checkpoint_every_steps):
                with self.metrics.timer("checkpoint"), self.parts.memory.trainer_present():
                    self.checkpoint(values.get("val/mean"))
            if stopping:
                raise Terminated(f"asked to stop: step {self.step_number} of {total} is saved, --resume continues")

    def validate(self) -> tuple[dict[str, float], list[ScoredSample] | None]:
        """Score the held-out prompts; returns the `val/...` figures and this rank's samples, None without prompts."""
        if self.parts.validator is None:
            return {}, None
        with self.metrics.timer("validate"):
            samples = self.parts.validator.run(self.metrics)
        return self.metrics.reduce(), samples

    def keep_samples(self, batch: RolloutBatch | None, held_out: list[ScoredSample] | None) -> None:
        """Write all ranks' samples: the step's when due, the held-out ones whenever there was a validation."""
        number, logging, records = self.step_number, self.config.logging, []
        limit = logging.rollouts_max_samples
        if batch is not None and is_due(number, logging.rollouts_every_steps):
            records = kept_records(self.samples, number, limit=limit, advantages=mean_advantages(batch))
        if held_out is not None and logging.rollouts_every_steps:
            records += kept_records(held_out, number, limit=limit, split="validation")
        if self.writer is not None and records:
            self.writer.write(number, records)

    def step(self) -> tuple[RolloutBatch, dict[str, float]]:
        """One training step; returns its batch and its reduced metrics."""
        parts, plan, timer, started = self.parts, self.plan, self.metrics.timer, self.metrics.clock.mark()
        with timer("generate"):
            batch = self.generate()
        parts.memory.train()  # what the engine holds for generation is training's now
        with timer("exchange"):
            batch = parts.exchange(batch, seed=self.batch_seed, metrics=self.metrics)
        self.metrics.muted = not counts_loss(parts.actor.model)  # its sequence group holds this batch more than once
        packed = self.pack(batch)
        if plan.old_log_prob:
            with timer("old_log_prob"):
                batch = self.old_log_prob(batch, packed)
        if parts.reference is not None:
            with timer("reference"):
                batch = self.reference(batch, packed, parts.reference)
        if parts.critic is not None:
            with timer("values"):
                batch = batch.with_(**parts.critic.values(batch, self.value_passes(batch, packed), self.metrics))
        with timer("advantage"):
            batch = parts.advantages(batch, self.metrics)
        if parts.critic is not None:
            with timer("update_critic"):
                self.update_critic(batch, packed)
        changed = self.step_number >= self.config.critic.warmup_steps or parts.critic is None
        if changed:
            with timer("update_actor"):
                self.update_actor(batch, packed)
        with timer("sync_weights"):
            self.sync_weights(changed)
        self.step_number += 1
        return batch, self.close_step(batch, started)

    def generate(self) -> RolloutBatch:
        """Prompts x samples, scored; dynamic sampling refills here."""
        a = self.config.algorithm
        refill = (
            RefillSettings(a.dynamic_sampling_metric, a.max_refills, a.on_exhausted) if a.dynamic_sampling else None
        )
        number = self.step_number + 1
        samples = fill_batch(
            self.parts.generator,
            self.take,
            self.config.rollout.num_prompts_per_step,
            step=number,
            refill=refill,
            metrics=self.metrics,
        )
        dtype = torch.float64 if self.config.run.dtype == "float64" else torch.float32
        self.samples = samples
        batch = build_batch(samples, dtype=dtype).to(self.parts.device)
        rollout_metrics(batch, self.metrics)
        if (peak := peak_flops(self.parts.device)) is not None:
            self.metrics.add_sum("perf/peak_flops", peak)
        if a.pf_ppo_mode != "none":
            drawn, batch = (
                batch,
                resampled(batch, a.pf_ppo_mode, a.pf_ppo_power, seed=self.config.run.seed, step=number),
            )
            self.metrics.add("data/resampled_distinct", batch.sample_id.unique().numel(), drawn.num_sequences)
        return batch

    def take(self, number: int) -> list[Prompt]:
        """The next prompts; at an epoch's end the ones that are left."""
        return self.parts.cursor.take_within_epoch(number)

    @property
    def batch_seed(self) -> int:
        """Orders the prompts of the current step into optimizer batches."""
        return sample_seed(self.config.run.seed, self.step_number + 1, 0, 0) % 2**31

    def pack(self, batch: RolloutBatch) -> Packed:
        """Optimizer batches by whole prompts in a seeded order, each in micro-batches that all passes share."""
        plans = plan_optimizer_batches(
            batch.group_id,
            num_updates=self.plan.updates_per_step,
            seed=self.batch_seed,
            all_group_id=all_gather_rows(batch.group_id),
        )
        return self.micro_batches(batch, plans)

    def micro_batches(self, batch: RolloutBatch, plans: list[Tensor], extra_row: Tensor | bool = False) -> Packed:
        """Each optimizer batch in micro-batches, equally many on every rank."""
        run = self.config.run
        made = [
            pack(
                batch,
                members,
                max_tokens=run.max_tokens_per_microbatch,
                share_prompts=run.share_prompts,
                extra_row=extra_row,
            )
            for members in plans
        ]
        rows = [micro.num_rows for micro_batches in made for micro in micro_batches]
        self.largest_microbatch = max([self.largest_microbatch, *rows])
        counts = all_reduce_max([len(micro_batches) for micro_batches in made])
        return [(members, fill_up(each, n, self.parts.device)) for members, each, n in zip(plans, made, counts)]

    def value_passes(self, batch: RolloutBatch, packed: Packed) -> list[MicroBatch]:
        """The micro-batches of the values pass; with bootstrapping, a row more per truncated response."""
        if not self.plan.bootstrap:
            return flatten(packed)
        return flatten(self.micro_batches(batch, [members for members, _ in packed], batch.finish_reason == 1))

    def old_log_prob(self, batch: RolloutBatch, packed: Packed) -> RolloutBatch:
        """Log-probs (with entropies and sums of squares if needed) before the first update on this batch."""
        want = {"want_entropy": self.plan.old_entropy, "want_sum_sq": self.plan.sum_sq}
        rows = self.parts.actor.log_prob(batch, flatten(packed), metrics=self.metrics, **want)
        return batch.with_(old_log_prob=rows["log_prob"], old_entropy=rows.get("entropy"), sum_sq=rows.get("sum_sq"))

    def reference(self, batch: RolloutBatch, packed: Packed, model: PolicyModel) -> RolloutBatch:
        """What the KL terms compare with: the reference's log-probs, or the KL over the vocabulary for the reward."""
        if self.plan.ref_log_prob:
            rows = model.log_prob(batch, flatten(packed), metrics=self.metrics)
            batch = batch.with_(ref_log_prob=rows["log_prob"])
        if self.plan.ref_kl:
            kl = FullKL(self.parts.actor, model).of_batch(flatten(packed), batch.need("rollout_log_prob"))
            batch = batch.with_(ref_kl=kl)
        return batch

    def members(self, batch: RolloutBatch, sequences: Tensor, mask: Tensor, update: int = 0) -> OptimizerBatch:
        """An optimizer batch, the `update`-th made from this rollout, with its scale from counts over all ranks."""
        a = self.config.algorithm
        factor = a.loss_scale_factor or float(self.config.rollout.max_response_tokens)
        return optimizer_batch(
            batch,
            sequences,
            mask,
            loss_agg_mode=self.plan.loss_agg_mode,
            loss_scale_factor=factor,
            entropy_coef=self.parts.entropy.value,
            num_updates_before=update,
            version=self.version,
        )

    def update_critic(self, batch: RolloutBatch, packed: Packed) -> None:
        """The critic's epochs over the batch; its loss is over all sampled tokens."""
        critic = self.parts.critic
        assert critic is not None
        mask = batch.response_mask & batch.need("valid")[batch.sequence_index]
        for _ in range(self.config.critic.num_epochs_per_batch or self.plan.epochs_per_batch):
            for sequences, micro_batches in packed:
                members = self.members(batch, sequences, mask)
                if members.num_tokens:
                    critic.update(members, remaining(micro_batches, mask), self.metrics)

    def update_actor(self, batch: RolloutBatch, packed: Packed) -> None:
        """The policy's epochs over the batch; the first forward of each token also gives the mismatch."""
        actor, mask = self.parts.actor, batch.need("loss_mask")
        first = torch.full_like(batch.need("advantages"), float("nan"))
        for epoch in range(self.plan.epochs_per_batch):
            for number, (sequences, micro_batches) in enumerate(packed, epoch * len(packed)):
                chosen, members = mask, self.members(batch, sequences, mask, number)
                if self.plan.selection and members.num_tokens:
                    members, chosen = select_tokens(self, members, micro_batches, mask, actor.optimizer.updates)
                if not members.num_tokens:
                    with self.metrics.counted():
                        self.metrics.add_sum("data/empty_updates", 1 / world_size())
                    continue
                kept = remaining(micro_batches, chosen)
                if actor.router is not None:
                    actor.router.count(kept)
                actor.update(members, kept, first if epoch == 0 else torch.empty_like(first), self.metrics)
        first = merge_seen(actor.model, first)
        mismatch_metrics(batch, first if batch.old_log_prob is None else batch.old_log_prob, self.metrics)

    def sync_weights(self, changed: bool) -> None:
        """Hand the weights to the engine if they are new, and its memory back to it."""
        self.version += changed
        self.parts.memory.generate(self.parts.actor.model, self.version, changed=changed)
        if changed and self.parts.probe is not None:
            with self.parts.memory.trainer_present():
                self.parts.probe.after_update(self.version, self.metrics)

    def close_step(self, batch: RolloutBatch, started: Any) -> dict[str, float]:
        """The log boundary: the step's metrics as numbers."""
        batch_metrics(batch, self.parts, self.metrics)
        self.metrics.muted = False
        self.metrics.add_span("time/step_s", started)
        values = self.metrics.reduce()
        self.parts.entropy.update(values.get("policy/entropy", float("nan")))
        return values


def is_due(step: int, every: int) -> bool:
    """True at multiples of `every`; 0 is never."""
    return every > 0 and step % every == 0


def flatten(packed: Packed) -> list[MicroBatch]:
    """All micro-batches, optimizer batch after optimizer batch."""
    return [micro for _, micro_batches in packed for micro in micro_batches]
