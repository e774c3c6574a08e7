"""Held-out prompts, each scored exactly once, with sampling settings of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastrl.algorithms.evaluation import evaluate
from fastrl.data.prompts import PromptSet
from fastrl.dist.collectives import all_gather_object
from fastrl.rewards.answers import last_number, marked_answer
from fastrl.rollout.engine import SamplingParams
from fastrl.trainer.generation import Generator, ScoredSample
from fastrl.trainer.metrics import Metrics

VALIDATION_STEP = 2**40  # keeps the seeds of validation samples apart from those of training


@dataclass
class Validator:
    """Scores the held-out prompts. The figures of a data source are over its prompts, mean@n first."""

    generator: Generator
    prompts: PromptSet
    params: SamplingParams
    num_samples: int
    prompts_per_call: int

    def run(self, metrics: Metrics) -> list[ScoredSample]:
        """Generate and score every held-out prompt; writes `val/...` into `metrics` and returns this rank's samples."""
        generator = replace(self.generator, params=self.params, num_samples=self.num_samples, greedy=False)
        samples: list[ScoredSample] = []
        for start in range(0, len(self.prompts), self.prompts_per_call):
            prompts = [self.prompts[i] for i in range(start, min(start + self.prompts_per_call, len(self.prompts)))]
            samples += generator.run(prompts, step=VALIDATION_STEP, first_group=start)
        everyone = [row for rows in all_gather_object([summary(s) for s in samples]) for row in rows]
        record(everyone, metrics)
        return samples


Row = tuple[int, str, float, bool, int, bool, str]  # group, data source, score, valid, length, truncated, answer


def summary(s: ScoredSample) -> Row:
    """What the figures need of one sample."""
    answer = marked_answer(s.text) or last_number(s.text) or s.text.strip()
    reason = s.sample.finish_reason
    return s.group_id, s.prompt.data_source, s.score, s.valid, len(s.sample.token_ids), reason == 1, answer


def record(rows: Sequence[Row], metrics: Metrics) -> None:
    """Figures over all sources and per source; an unscorable sample leaves its prompt's mean and is counted."""
    sources = sorted({source for _, source, *_ in rows})
    metrics.set("val/mean", mean_over_prompts(rows))
    metrics.set("val/prompts", len({group for group, *_ in rows}))
    metrics.set("val/samples", len(rows))
    metrics.set("val/unscorable", sum(not row[3] for row in rows))
    metrics.set("val/length/mean", sum(r[4] for r in rows) / max(len(rows), 1))
    metrics.set("val/truncated_fraction", sum(r[5] for r in rows) / max(len(rows), 1))
    for source in sources:
        own = [row for row in rows if row[1] == source]
        metrics.set(f"val/{source or 'all'}/length/mean", sum(row[4] for row in own) / len(own))
        metrics.set(f"val/{source or 'all'}/truncated_fraction", sum(row[5] for row in own) / len(own))
        groups = torch.tensor([row[0] for row in own])
        scores = torch.tensor([row[2] if row[3] else math.nan for row in own], dtype=torch.float64)
        for name, value in evaluate(scores, groups, [row[6] for row in own]).items():
            metrics.set(f"val/{source or 'all'}/{name}", value)


def mean_over_prompts(rows: Sequence[Row]) -> float:
    """Mean over prompts of the mean over their scorable samples; NaN when there is none."""
    totals: dict[int, tuple[float, int]] = {}
    for group, _, score, valid, *_ in rows:
        if valid:
            total, count = totals.get(group, (0.0, 0))
            totals[group] = (total + score, count + 1)
    means = [total / count for total, count in totals.values()]
    return sum(means) / len(means) if means else math.nan
