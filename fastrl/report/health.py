"""Health lines: what is going wrong in plain words, and which key to change. One rule, one place in docs/metrics.md.

watch = HealthWatch()
for line in watch.check(step, values):      # ["37% of groups have equal rewards: raise ..."]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastrl.report.text import percent, short

Values = Mapping[str, float]
History = Sequence[Values]  # the steps before, oldest first

HISTORY_STEPS = 30
START_STEPS = 3  # the steps that say what the run began with
REPEAT_STEPS = 20  # a condition that stays is said again after so many steps


@dataclass(frozen=True)
class Rule:
    """One thing that can go wrong. `find` gives the line, or None; `why` and `what` are for the documentation."""

    anchor: str
    find: Callable[[Values, History, Values], str | None]  # (this step, steps before, start of the run)
    why: str
    what: str


def _equal_rewards(v: Values, past: History, start: Values) -> str | None:
    if v.get("rollout/samples", 0) < 2 or "reward/max" not in v or v["reward/max"] != v.get("reward/min"):
        return None
    return (
        f"all {v['rollout/samples']:.0f} rewards are {short(v['reward/max'])}, so nothing can be learned: look at "
        "`fastrl rollouts`, check reward.functions, or take prompts of another difficulty in data.train"
    )


def _zero_variance(v: Values, past: History, start: Values) -> str | None:
    fraction = v.get("reward/zero_variance_fraction", 0.0)
    has_critic = "value/loss" in v  # advantages then come from values, not from the group
    if fraction <= 0.3 or has_critic or _equal_rewards(v, past, start):
        return None
    low, high, mean = v.get("reward/min", 0.0), v.get("reward/max", 1.0), v.get("reward/mean", 0.5)
    kind = "harder" if mean > (low + high) / 2 else "easier"
    return (
        f"{percent(fraction)} of groups have equal rewards: raise rollout.num_samples_per_prompt, mix in {kind} "
        "prompts, or set algorithm.dynamic_sampling=true"
    )


def _truncation(v: Values, past: History, start: Values) -> str | None:
    fraction = v.get("rollout/truncated_fraction", 0.0)
    if fraction <= 0.3:
        return None
    return (
        f"{percent(fraction)} of responses were cut at the limit: raise rollout.max_response_tokens, or set "
        "algorithm.overlong_masking=true or reward.overlong_buffer_tokens"
    )


def _empty(v: Values, past: History, start: Values) -> str | None:
    fraction = v.get("rollout/empty_responses", 0.0) / max(v.get("rollout/samples", 0.0), 1.0)
    if fraction <= 0.1:
        return None
    return (
        f"{percent(fraction)} of responses are empty: check model.chat_template and data.prompt_template (the prompt "
        "may end the turn), or lower optim.lr"
    )


def _entropy_collapse(v: Values, past: History, start: Values) -> str | None:
    entropy, first = v.get("policy/entropy"), start.get("policy/entropy")
    if entropy is None or not first or entropy > 0.2 * first or len(past) < 10:
        return None
    recent = [p["reward/mean"] for p in past[-5:] if "reward/mean" in p]
    before = [p["reward/mean"] for p in past[-10:-5] if "reward/mean" in p]
    # A policy that has learned the task is sure of itself too: only low entropy without progress is a problem.
    if not recent or not before or sum(recent) / len(recent) > sum(before) / len(before) + 0.01:
        return None
    low, high = v.get("reward/min", 0.0), v.get("reward/max", 0.0)
    if v.get("reward/mean", 0.0) >= high - 0.05 * (high - low):
        return None
    return (
        f"entropy fell from {short(first)} to {short(entropy)} and the reward no longer rises: raise "
        "algorithm.entropy_coef, algorithm.clip_high or rollout.temperature"
    )


def _entropy_explosion(v: Values, past: History, start: Values) -> str | None:
    entropy, first = v.get("policy/entropy"), start.get("policy/entropy")
    if entropy is None or first is None or len(past) < START_STEPS or entropy < max(3 * first, first + 1.0):
        return None
    return f"entropy rose from {short(first)} to {short(entropy)}: lower optim.lr or algorithm.entropy_coef"


def _mismatch(v: Values, past: History, start: Values) -> str | None:
    k3, weights = v.get("mismatch/k3/mean", 0.0), v.get("mismatch/ess", 1.0)
    if k3 <= 1e-2 and weights >= 0.8:
        return None
    return (
        f"trainer and engine disagree about the sampled tokens (k3 {short(k3)} nats, effective sample size "
        f"{percent(weights)}): use run.dtype=float32 or the same precision in both, keep rollout.top_p=1, and keep "
        "algorithm.correction=token_truncate"
    )


def _clip(v: Values, past: History, start: Values) -> str | None:
    sides = v.get("policy/clip_fraction/low", 0.0) + v.get("policy/clip_fraction/high", 0.0)
    fraction = max(sides, v.get("policy/clip_fraction", 0.0))
    if fraction <= 0.3:
        return None
    return (
        f"{percent(fraction)} of tokens were clipped: lower optim.lr, algorithm.num_updates_per_step or "
        "algorithm.num_epochs_per_batch, or raise algorithm.clip_high"
    )


def _unscorable(v: Values, past: History, start: Values) -> str | None:
    failed = v.get("reward/unscorable", 0.0)
    if failed <= 0:
        return None
    return (
        f"{failed:.0f} of {v.get('rollout/samples', failed):.0f} responses could not be scored and were left out: the "
        "causes are in log.txt; raise reward.timeout_s or fix the function in reward.functions"
    )


def _skipped(v: Values, past: History, start: Values) -> str | None:
    skipped = v.get("optim/skipped_updates", 0.0) + v.get("optim/critic_skipped_updates", 0.0)
    if skipped <= 0:
        return None
    return (
        f"{skipped:.0f} updates were skipped because loss or gradient was not finite: lower optim.lr (or critic.lr), "
        "or use run.dtype=float32"
    )


def _nan_values(v: Values, past: History, start: Values) -> str | None:
    number = v.get("perf/nan_values", 0.0)
    if number <= 0 or _skipped(v, past, start):
        return None
    return (
        f"{number:.0f} values were NaN and left out of the means: the weights are damaged, so go back to an earlier "
        "checkpoint and lower optim.lr (or critic.lr)"
    )


def _drift(v: Values, past: History, start: Values) -> str | None:
    kl = max(v.get("kl/reference", 0.0), v.get("kl/reward", 0.0))
    if kl <= 0.5:
        return None
    return (
        f"the policy is {short(kl)} nats per token away from the reference model: raise algorithm.kl_loss_coef or "
        "algorithm.kl_reward_coef, or lower optim.lr"
    )


def _critic(v: Values, past: History, start: Values) -> str | None:
    recent = [p["value/explained_variance"] for p in (*past[-9:], v) if "value/explained_variance" in p]
    if len(recent) < 10 or max(recent) >= 0:
        return None
    return (
        f"the critic explains less than a constant would (explained variance {short(recent[-1])}): raise critic.lr, "
        "critic.num_epochs_per_batch or critic.warmup_steps"
    )


def _exhausted(v: Values, past: History, start: Values) -> str | None:
    if v.get("data/exhausted", 0.0) <= 0:
        return None
    return (
        f"dynamic sampling dropped {v.get('data/dropped_groups', 0.0):.0f} groups and ran out of refills: raise "
        "algorithm.max_refills or take prompts of another difficulty in data.train"
    )


def _memory(v: Values, past: History, start: Values) -> str | None:
    total = v.get("memory/device_total_gib", 0.0)
    used = v.get("memory/device_peak_gib", 0.0)
    if not total or used < 0.93 * total:
        return None
    return (
        f"device memory reached {used:.1f} of {total:.1f} GiB: lower run.max_tokens_per_microbatch or "
        "rollout.kv_budget_tokens, or set model.gradient_checkpointing=true"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "skipped-updates",
        _skipped,
        "A loss or gradient that is not finite would destroy the weights, so all ranks skip that update together.",
        "Seen in the first steps: the rate is too high. Seen rarely, late: 16-bit overflow. Training stops after "
        "optim.max_skipped_updates in a row.",
    ),
    Rule(
        "nan-values",
        _nan_values,
        "Log-probs, entropies or values that are NaN come from weights that are, whatever the other figures say.",
        "Training again from such a checkpoint cannot help. It began with a rate too high or an overflow.",
    ),
    Rule(
        "unscorable",
        _unscorable,
        "A reward function raised, ran too long or returned something that is not a number. Such a sample leaves the "
        "baseline and the loss; it never counts as 0.",
        "Each distinct cause is in log.txt once. The run stops above reward.max_failure_fraction.",
    ),
    Rule(
        "equal-rewards",
        _equal_rewards,
        "Every advantage is 0 when all rewards are equal: the step changes nothing.",
        "All 0: the reward may never match the format the model writes. All 1: the task is solved, or the check is too "
        "easy.",
    ),
    Rule(
        "zero-variance",
        _zero_variance,
        "A group whose samples all score alike has advantage exactly 0; its tokens were generated for nothing.",
        "More samples per prompt make it rarer; dynamic sampling replaces such groups; prompts of middling difficulty "
        "have the fewest.",
    ),
    Rule(
        "truncation",
        _truncation,
        "A response cut at the limit is scored on half an answer, and the policy is taught to be short or to ramble.",
        "Rising over the run: the policy grows longer. From the start: the limit is too low for the task.",
    ),
    Rule(
        "empty-responses",
        _empty,
        "The first sampled token ended the response.",
        "Usually a prompt that already ends the assistant's turn.",
    ),
    Rule(
        "entropy-collapse",
        _entropy_collapse,
        "The policy gives nearly all probability to one continuation and the reward does not rise any more: it has "
        "stopped exploring.",
        "The line stays away while the reward still rises or is at its maximum.",
    ),
    Rule(
        "entropy-explosion",
        _entropy_explosion,
        "The policy drifts towards noise, mostly from a rate that is too high or an entropy bonus that is too strong.",
        "Compare with kl/old_k3: large movements inside a step point to the rate.",
    ),
    Rule(
        "mismatch",
        _mismatch,
        "The engine sampled from one distribution and the trainer computes gradients for another; the correction "
        "weights hide part of it.",
        "In float32 with the embedded engine mismatch/k3/mean is rounding noise. Above 1e-2 look for a different "
        "precision, filtered sampling, or weights that were not handed over.",
    ),
    Rule(
        "clip-saturation",
        _clip,
        "Most of the batch has left the trust region, so the later updates of the step see few gradients.",
        "A healthy run clips some percent of the tokens.",
    ),
    Rule(
        "kl-drift",
        _drift,
        "The policy has moved far from the reference model; it may have lost abilities that the reward does not see.",
        "Read some samples with `fastrl rollouts` before changing anything.",
    ),
    Rule(
        "critic",
        _critic,
        "For ten steps the critic's values have been further from the returns than their mean is: noisy advantages.",
        "Usual in the first steps, when the value head starts at 0.",
    ),
    Rule(
        "refills",
        _exhausted,
        "Dynamic sampling could not fill the step with groups whose rewards differ.",
        "algorithm.on_exhausted decides whether such a step trains on what there is or stops.",
    ),
    Rule(
        "device-memory",
        _memory,
        "The next longer batch may run out of memory.",
        "run.max_tokens_per_microbatch bounds activations; rollout.kv_budget_tokens bounds generation.",
    ),
)


class HealthWatch:
    """Applies the rules step by step and remembers what it has said.

    Args:
        repeat_steps: a condition that persists is repeated after so many steps; one that went away is said at once
            when it comes back after as many.
    """

    def __init__(self, *, repeat_steps: int = REPEAT_STEPS) -> None:
        self.repeat_steps = repeat_steps
        self._past: deque[Values] = deque(maxlen=HISTORY_STEPS)
        self._start: list[Values] = []
        self._said: dict[str, int] = {}

    def check(self, step: int, values: Values) -> list[str]:
        """The lines to show for this step, each with its place in docs/metrics.md."""
        start = _means(self._start)
        lines = []
        for rule in RULES:
            text = rule.find(values, list(self._past), start)
            if text is not None and step - self._said.get(rule.anchor, step - self.repeat_steps) >= self.repeat_steps:
                self._said[rule.anchor] = step
                lines.append(f"{text} (docs/metrics.md#{rule.anchor})")
        self.remember(values)
        return lines

    def remember(self, values: Values) -> None:
        """Takes a step into the history without a word (steps before a resume)."""
        self._past.append(dict(values))
        if len(self._start) < START_STEPS and "policy/entropy" in values:
            self._start.append(dict(values))


def _means(rows: Sequence[Values]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(column) / len(column) for name, column in columns.items()}
