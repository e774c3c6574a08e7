"""A step's samples as the records that `rollouts/` keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.rollout.records import RolloutRecord
from fastrl.trainer.generation import ScoredSample
from fastrl.trainer.normalizers import sequence_sums


def sample_records(
    samples: Sequence[ScoredSample], step: int, *, batch: RolloutBatch | None = None, split: str = "train"
) -> Iterator[RolloutRecord]:
    """One record per sample; advantages (mean over tokens) come from the finished batch."""
    means: list[float | None] = [None] * len(samples)
    if batch is not None and batch.advantages is not None and batch.num_sequences == len(samples):
        means = (sequence_sums(batch.advantages, batch) / batch.lengths.clamp(min=1)).tolist()
    for sample, advantage in zip(samples, means):
        yield RolloutRecord(
            step=step,
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            prompt=sample.prompt.text,
            response=sample.text,
            score=sample.score if sample.valid else None,
            finish_reason=FinishReason(sample.sample.finish_reason).name,
            length=len(sample.sample.token_ids),
            components={name: None if math.isnan(value) else value for name, value in sample.components.items()},
            advantage=advantage,
            policy_version=sample.sample.policy_version,
            data_source=sample.prompt.data_source,
            answer=sample.prompt.answer if isinstance(sample.prompt.answer, str | int | float) else None,
            split=split,
        )
