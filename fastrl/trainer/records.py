"""A step's samples as the records that `rollouts/` keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.dist.collectives import all_gather_rows
from fastrl.rollout.records import RolloutRecord
from fastrl.trainer.generation import ScoredSample
from fastrl.trainer.normalizers import sequence_sums


def mean_advantages(batch: RolloutBatch) -> dict[int, float]:
    """Mean advantage over the tokens of each sample, by sample id, of all ranks (every rank calls this)."""
    if batch.advantages is None:
        return {}
    means = sequence_sums(batch.advantages, batch) / batch.lengths.clamp(min=1)
    return dict(zip(all_gather_rows(batch.sample_id).tolist(), all_gather_rows(means).tolist()))


def sample_records(
    samples: Sequence[ScoredSample], step: int, *, advantages: dict[int, float] | None = None, split: str = "train"
) -> Iterator[RolloutRecord]:
    """One record per sample; `advantages` are those of the finished step by sample id (`mean_advantages`)."""
    for sample in samples:
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
            advantage=(advantages or {}).get(sample.sample_id),
            policy_version=sample.sample.policy_version,
            data_source=sample.prompt.data_source,
            answer=sample.prompt.answer if isinstance(sample.prompt.answer, str | int | float) else None,
            split=split,
        )
