"""A step's samples as the records that `rollouts/` keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.dist.collectives import all_gather_rows, gather_objects
from fastrl.rollout.records import RolloutRecord
from fastrl.trainer.generation import ScoredSample
from fastrl.trainer.normalizers import sequence_sums


def mean_advantages(batch: RolloutBatch) -> dict[int, float]:
    """Mean advantage over the tokens of each sample, by sample id, of all ranks (every rank calls this)."""
    if batch.advantages is None:
        return {}
    means = sequence_sums(batch.advantages, batch) / batch.lengths.clamp(min=1)
    return dict(zip(all_gather_rows(batch.sample_id).tolist(), all_gather_rows(means).tolist()))


def kept_records(
    samples: Sequence[ScoredSample],
    step: int,
    *,
    limit: int,
    advantages: Mapping[int, float] | None = None,
    split: str = "train",
) -> list[RolloutRecord]:
    """The first `limit` records of all ranks by sample id, on rank 0; every rank calls this, the others get none.

    Only what is kept travels, so that rank 0 holds `limit` records however many ranks there are.
    """
    ids = all_gather_rows(torch.tensor([s.sample_id for s in samples], dtype=torch.int64)).sort().values[:limit]
    last = int(ids[-1]) if len(ids) else -1
    own = [sample for sample in samples if sample.sample_id <= last]
    parts = gather_objects(list(sample_records(own, step, advantages=advantages, split=split)))
    return sorted((record for part in parts for record in part), key=lambda record: record.sample_id)


def sample_records(
    samples: Sequence[ScoredSample], step: int, *, advantages: Mapping[int, float] | None = None, split: str = "train"
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
