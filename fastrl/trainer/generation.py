"""The first stage: prompts to scored samples, as one ragged batch.

Samples are submitted for scoring as they finish; the batch is put together in the order of sample ids, so that nothing
depends on which finished first. With dynamic sampling, groups without spread are dropped and replaced by new prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastrl.algorithms.filters import informative_groups
from fastrl.algorithms.pf_ppo import Mode, resample
from fastrl.data.batch import FinishReason, RolloutBatch, cu_seqlens_of
from fastrl.data.prompts import Prompt
from fastrl.dist.collectives import all_reduce_sum, rank, world_size
from fastrl.errors import TrainingError
from fastrl.rewards import RewardPool, RewardSample
from fastrl.rewards.decode import response_text
from fastrl.rollout.engine import Engine, GenerationRequest, Sample, SamplingParams
from fastrl.rollout.seeds import sample_seed
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.normalizers import gather_own


@dataclass(frozen=True)
class ScoredSample:
    """One response with its prompt and score."""

    prompt: Prompt
    group_id: int
    sample_id: int
    sample: Sample
    text: str
    score: float
    valid: bool
    components: dict[str, float]
    greedy_score: float | None = None


@dataclass
class Generator:
    """Engine, tokenizer and rewards together: prompts in, scored samples out."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardPool
    params: SamplingParams
    num_samples: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    greedy: bool = False  # one extra greedy sample per prompt, scored as a baseline
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)
    abstained: int = 0  # samples that every reward function abstained from, since `record_rewards`
    clipped: int = 0  # scores moved to a bound, likewise
    length_penalties: list[float] = field(default_factory=list)  # of samples, likewise

    def run(self, prompts: Sequence[Prompt], *, step: int, first_group: int = 0) -> list[ScoredSample]:
        """Generate and score; this rank works on every world_size-th prompt. Sorted by sample id.

        Group ids count prompt occurrences over all ranks from `first_group`; the seed of a sample is a function of
        (run seed, step, group, index), never of the rank or of the batch around it.
        """
        mine = {first_group + i: p for i, p in enumerate(prompts) if i % world_size() == rank()}
        requests: list[GenerationRequest] = []
        for group, prompt in mine.items():
            seeds = [sample_seed(self.seed, step, group, i) for i in range(self.num_samples)]
            requests.append(GenerationRequest(2 * group, prompt.token_ids, self.num_samples, seeds))
            if self.greedy:
                requests.append(GenerationRequest(2 * group + 1, prompt.token_ids, 1, [0], temperature=0.0))
        total, drawn = sum(r.num_samples for r in requests), []
        for sample in self.engine.generate(requests, self.params):
            group, baseline = divmod(sample.request_id, 2)
            sample_id = -group - 1 if baseline else group * self.num_samples + sample.sample_index
            text = self.decode(sample)
            reason = FinishReason(sample.finish_reason).name
            self.rewards.submit(RewardSample(mine[group], text, tuple(sample.token_ids.tolist()), reason, sample_id))
            drawn.append((sample_id, group, sample, text))
            self.progress(len(drawn), total)
        return self.attach_scores(drawn, mine)

    def attach_scores(
        self, drawn: list[tuple[int, int, Sample, str]], prompts: dict[int, Prompt]
    ) -> list[ScoredSample]:
        """Samples with their scores, by sample id; greedy baselines become a field of their group's samples."""
        result = self.rewards.collect()
        rows = {sample_id: i for i, sample_id in enumerate(result.sample_ids)}
        scores, valid = result.scores.tolist(), result.valid.tolist()
        components = {name: column.tolist() for name, column in result.components.items()}
        self.abstained += result.num_abstained
        self.clipped += result.num_clipped
        penalties = result.length_penalties.tolist()
        self.length_penalties += [penalties[rows[sample_id]] for sample_id, *_ in drawn if sample_id >= 0]
        greedy = {group: rows[sample_id] for sample_id, group, _, _ in drawn if sample_id < 0}
        baseline = {group: scores[row] for group, row in greedy.items() if valid[row]}
        scored = []
        for sample_id, group, sample, text in sorted(drawn, key=lambda d: d[0]):
            if sample_id < 0:
                continue
            row = rows[sample_id]
            parts = {name: column[row] for name, column in components.items()}
            usable = valid[row] and (group in baseline or group not in greedy)
            against = baseline.get(group, 0.0) if group in greedy else None
            scored.append(
                ScoredSample(prompts[group], group, sample_id, sample, text, scores[row], usable, parts, against)
            )
        return scored

    def record_rewards(self, metrics: Metrics) -> None:
        """Count what the reward functions declined and what the bounds moved."""
        metrics.add_sum("reward/abstained", self.abstained)
        metrics.add_sum("reward/clipped", self.clipped)
        for judge in self.rewards.judges.values():
            metrics.add_sum("reward/model_tokens", judge.take_tokens())
        if self.rewards.shapes_length:
            penalties = torch.tensor(self.length_penalties, dtype=torch.float64)
            metrics.add_mean("reward/overlong_penalty", penalties)
            metrics.add_mean("reward/overlong_fraction", (penalties < 0).double())
        self.abstained = self.clipped = 0
        self.length_penalties = []

    def decode(self, sample: Sample) -> str:
        """Text of the sampled tokens, without the id that ended it."""
        return response_text(self.tokenizer, sample.token_ids.tolist(), self.stop_ids)


@dataclass(frozen=True)
class RefillSettings:
    """Dynamic sampling: which metric must vary inside a group, and what to do when refills run out."""

    metric: str = "score"
    max_refills: int = 3
    on_exhausted: str = "train"


def fill_batch(
    generator: Generator,
    take: Callable[[int], list[Prompt]],
    num_prompts: int,
    *,
    step: int,
    refill: RefillSettings | None,
    metrics: Metrics,
) -> list[ScoredSample]:
    """The samples of a step. Without `refill` one round; with it, rounds until `num_prompts` groups are informative.

    Surplus and uninformative groups are dropped and counted. When refills run out the step trains on the groups there
    are (none: an empty list), or raises TrainingError with `on_exhausted = stop`.
    """
    prompts = take(num_prompts)
    wanted, next_group = len(prompts), len(prompts)
    samples = generator.run(prompts, step=step)
    generator.record_rewards(metrics)
    if refill is None:
        return samples
    kept = informative(samples, refill.metric)
    found = count_groups(kept)
    dropped, rounds = wanted - found, 0
    while found < wanted and rounds < refill.max_refills:
        prompts = take(wanted - found)
        if not prompts:
            break
        fresh = informative(generator.run(prompts, step=step, first_group=next_group), refill.metric)
        generator.record_rewards(metrics)
        new = count_groups(fresh)
        next_group += len(prompts)
        dropped += len(prompts) - new
        found += new
        kept += fresh
        rounds += 1
    metrics.set("data/refills", rounds)
    metrics.set("data/dropped_groups", dropped)
    metrics.set("data/dropped_fraction", dropped / max(next_group, 1))
    metrics.set("data/exhausted", float(found < wanted))
    if found < wanted and refill.on_exhausted == "stop":
        raise TrainingError(
            f"step {step}: only {found} of {wanted} groups had rewards that differ after {rounds} refills: raise "
            "algorithm.max_refills or rollout.num_samples_per_prompt, mix in prompts of other difficulty, or set "
            "algorithm.on_exhausted=train"
        )
    return kept


def informative(samples: list[ScoredSample], metric: str) -> list[ScoredSample]:
    """The samples of groups whose metric (score or a component) varies among samples that could be scored."""
    if not samples:
        return []
    values = [s.score if metric == "score" else s.components.get(metric, float("nan")) for s in samples]
    column = torch.tensor(values, dtype=torch.float64)
    valid = torch.tensor([s.valid for s in samples]) & ~column.isnan()
    keep = informative_groups(column, torch.tensor([s.group_id for s in samples]), valid)
    return [sample for sample, kept in zip(samples, keep.tolist()) if kept]


def count_groups(samples: Sequence[ScoredSample]) -> int:
    """Distinct prompt occurrences among the samples of all ranks; a rank has whole groups."""
    return int(all_reduce_sum([torch.tensor(len({s.group_id for s in samples}))])[0])


def build_batch(samples: Sequence[ScoredSample], *, dtype: torch.dtype = torch.float32) -> RolloutBatch:
    """The ragged batch of scored samples, in their order; `dtype` is that of scores and log-probs."""
    groups: dict[int, int] = {}
    prompts: list[Prompt] = []
    for s in samples:
        if s.group_id not in groups:
            groups[s.group_id] = len(prompts)
            prompts.append(s.prompt)
    lengths = torch.tensor([len(s.sample.token_ids) for s in samples], dtype=torch.int64)
    response_ids = ragged([s.sample.token_ids for s in samples], torch.int64)
    names = sorted({name for s in samples for name in s.components})
    greedy = [s.greedy_score for s in samples]
    return RolloutBatch(
        prompt_ids=ragged([torch.tensor(p.token_ids) for p in prompts], torch.int64),
        prompt_cu_seqlens=cu_seqlens_of(torch.tensor([len(p.token_ids) for p in prompts], dtype=torch.int64)),
        response_ids=response_ids,
        cu_seqlens=cu_seqlens_of(lengths),
        group_index=integers([groups[s.group_id] for s in samples]),
        group_id=integers([s.group_id for s in samples]),
        sample_id=integers([s.sample_id for s in samples]),
        finish_reason=torch.tensor([int(s.sample.finish_reason) for s in samples], dtype=torch.int8),
        policy_version=integers([s.sample.policy_version for s in samples]),
        response_mask=torch.ones_like(response_ids, dtype=torch.bool),
        rollout_log_prob=ragged([s.sample.log_probs for s in samples], dtype),
        scores=torch.tensor([s.score for s in samples], dtype=dtype),
        valid=torch.tensor([s.valid for s in samples], dtype=torch.bool),
        components={n: torch.tensor([s.components.get(n, float("nan")) for s in samples], dtype=dtype) for n in names},
        greedy_scores=None if None in greedy or not greedy else torch.tensor(greedy, dtype=dtype),
    )


def resampled(batch: RolloutBatch, mode: Mode, power: float, *, seed: int, step: int) -> RolloutBatch:
    """PF-PPO: as many sequences as before, drawn with replacement by their scores over all ranks."""
    (scores, valid), own = gather_own([batch.need("scores"), batch.need("valid")])
    chosen = resample(scores, valid, seed=seed, update=step, mode=mode, power=power)
    local = own.to(torch.int64).cumsum(0) - 1
    return batch.select(local[chosen[own[chosen]]])


def ragged(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenation of 1-d tensors, empty for none."""
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)


def integers(values: list[int]) -> Tensor:
    """int64 tensor, also for an empty list."""
    return torch.tensor(values, dtype=torch.int64)
