"""Every metric a run can write: name -> what it is, its unit, and how it is reduced over micro-batches and ranks."""

# ruff: noqa: E501  (one metric a line, so that a search shows all of it)
from __future__ import annotations

import re
from collections.abc import Iterable

METRICS: dict[str, str] = {
    # reward: what the samples scored
    "reward/mean": "score after weights and shaping, reward units; mean over samples that could be scored",
    "reward/std": "spread of the scores, reward units; standard deviation (ddof 1) over samples",
    "reward/min": "lowest score, reward units; minimum over samples",
    "reward/max": "highest score, reward units; maximum over samples",
    "reward/zero_variance_fraction": "groups whose scores are all equal (they teach nothing), fraction; mean over groups of two or more",
    "reward/group_of_one": "groups with a single sample that counts (advantage 0 under group estimators), groups; sum",
    "reward/unscorable": "samples whose reward raised, timed out or was not a number (left out, never 0), samples; sum",
    "reward/abstained": "component values that a reward function declined to give, values; sum",
    "reward/model_tokens": "tokens that the reward models scored, prompts and templates included, tokens; sum over ranks",
    "reward/clipped": "scores moved to reward.clip_min or reward.clip_max, samples; sum",
    "reward/overlong_penalty": "soft length penalty added to the scores (0 or less), reward units; mean over samples",
    "reward/overlong_fraction": "samples in the soft penalty zone, fraction; mean over samples",
    "reward/moved_to_sampled": "rewards on tokens that were not sampled, moved to the last sampled token before them, rewards; sum",
    "reward/moved_nowhere": "rewards on tokens that no sampled token precedes (left out), rewards; sum",
    "reward/kl_penalty": "KL taken off the rewards, reward units; mean over samples of the sum over tokens",
    # rollout: what was generated
    "rollout/length/mean": "response length, tokens; mean over samples",
    "rollout/length/max": "longest response, tokens; maximum over samples",
    "rollout/length/min": "shortest response, tokens; minimum over samples",
    "rollout/length/std": "spread of response lengths, tokens; standard deviation (ddof 1) over samples",
    "rollout/truncated_fraction": "responses cut at the token limit, fraction; mean over samples",
    "rollout/empty_responses": "responses with no token, samples; sum",
    "rollout/aborted": "responses that the engine gave up, samples; sum",
    "rollout/tokens": "response tokens generated, tokens; sum over ranks",
    "rollout/prompt_tokens": "prompt tokens, each prompt occurrence once, tokens; sum over ranks",
    "rollout/samples": "responses generated, samples; sum over ranks",
    "rollout/groups": "prompt occurrences, groups; sum over ranks",
    "rollout/policy_version": "weight updates the engine had seen when it sampled, updates; mean over samples",
    "rollout/policy_version/min": "oldest policy that sampled a response of this step, updates; minimum over samples",
    "rollout/engine_restarts": "engine processes that died and were started again, restarts; sum over ranks",
    "rollout/log_prob/mean": "log-probability of sampled tokens as the engine gave it, nats; mean over tokens",
    # policy: the actor's update
    "policy/loss": "policy loss that was optimised, with its aggregation mode, loss units; mean over updates",
    "policy/total_loss": "policy loss plus entropy and KL terms, loss units; mean over updates",
    "policy/entropy": "entropy of the next-token distribution at the sampling temperature, nats; mean over tokens in the loss",
    "policy/entropy_coef": "weight of the entropy bonus, pure number; value at the end of the step",
    "policy/entropy_kept_fraction": "tokens kept by the entropy quantile, fraction; mean over tokens",
    "policy/router_loss": "load-balancing loss of a mixture-of-experts model before its coefficient (the experts per token when they are even), pure number; sum over micro-batches and updates",
    "policy/ratio/mean": "new over old probability of the sampled token, ratio; mean over tokens in the loss",
    "policy/ratio/max": "largest ratio, ratio; maximum over tokens in the loss",
    "policy/ratio/min": "smallest ratio, ratio; minimum over tokens in the loss",
    "policy/clip_fraction": "tokens whose gradient was cut by clipping, fraction; mean over tokens in the loss",
    "policy/clip_fraction/high": "tokens held at 1 + clip_high, fraction; mean over tokens in the loss",
    "policy/clip_fraction/low": "tokens held at 1 - clip_low, fraction; mean over tokens in the loss",
    "policy/clip_fraction/dual": "tokens held at dual_clip, fraction; mean over tokens in the loss",
    "policy/advantage/mean": "advantage, advantage units; mean over tokens in the loss",
    "policy/advantage/std": "spread of advantages, advantage units; standard deviation (ddof 1) over tokens in the loss",
    "policy/advantage/min": "smallest advantage, advantage units; minimum over tokens in the loss",
    "policy/advantage/max": "largest advantage, advantage units; maximum over tokens in the loss",
    "policy/loss_tokens": "tokens that entered the loss, tokens; sum",
    "policy/masked_tokens": "sampled tokens taken out of the loss by filters and rejections, tokens; sum",
    "policy/masked_fraction": "sampled tokens taken out of the loss by filters and rejections, fraction; mean over sampled tokens",
    "policy/overlong_masked": "responses that overlong masking took out of the loss, samples; sum",
    "policy/masked_sequences": "sequences with no token left in the loss, sequences; sum",
    # value: the critic
    "value/loss": "value loss that was optimised, squared reward units; mean over updates",
    "value/clip_fraction": "tokens whose value was held by value_clip, fraction; mean over tokens",
    "value/mean": "critic's estimate before its update, reward units; mean over sampled tokens",
    "value/std": "spread of the critic's estimates, reward units; standard deviation (ddof 1) over sampled tokens",
    "value/min": "lowest estimate, reward units; minimum over sampled tokens",
    "value/max": "highest estimate, reward units; maximum over sampled tokens",
    "value/return/mean": "return the critic is trained on, reward units; mean over sampled tokens",
    "value/return/std": "spread of returns, reward units; standard deviation (ddof 1) over sampled tokens",
    "value/return/min": "lowest return, reward units; minimum over sampled tokens",
    "value/return/max": "highest return, reward units; maximum over sampled tokens",
    "value/explained_variance": "1 - Var(return - value)/Var(return), pure number (1 is perfect, 0 is a constant); over sampled tokens of the step",
    # kl: distances between policies
    "kl/reference": "KL of the policy to the reference model by the estimator of the loss, nats; mean over tokens in the loss",
    "kl/reference/max": "largest per-token estimate against the reference, nats; maximum over tokens in the loss",
    "kl/old_k1": "movement of the policy inside the step, old minus new log-prob (k1), nats; mean over tokens in the loss",
    "kl/old_k3": "movement of the policy inside the step (k3, never negative), nats; mean over tokens in the loss",
    "kl/reward": "KL of the old policy to the reference as used in the rewards, nats; mean over samples of the mean over tokens",
    "kl/reward_coef": "weight of the KL in the rewards, pure number; value that served this step",
    "kl/loss_coef": "weight of the KL in the loss, pure number; value that served this step",
    # mismatch: trainer against engine, log w = old_log_prob - rollout_log_prob
    "mismatch/k1/mean": "log w itself: trainer minus engine log-prob (k1, near 0), nats; mean over sampled tokens",
    "mismatch/k3/mean": "w - 1 - log w: KL of the engine to the trainer (k3, never negative), nats; mean over sampled tokens",
    "mismatch/k3/max": "largest w - 1 - log w of a token, nats; maximum over sampled tokens",
    "mismatch/abs/mean": "absolute difference of the two log-probs, nats; mean over sampled tokens",
    "mismatch/max": "largest absolute difference of the two log-probs, nats; maximum over sampled tokens",
    "mismatch/probe": "difference of engine and trainer log-probs on a greedy response after an update, nats; mean over its tokens, maximum over updates and ranks",
    "mismatch/ess": "effective sample size of the correction weights, fraction of the tokens (1 is ideal); over the step",
    "mismatch/ppl_ratio": "perplexity under the trainer over perplexity under the engine, ratio; mean over samples",
    "mismatch/chi2": "chi-squared divergence E[w^2] - 1, pure number; mean over sampled tokens",
    "mismatch/chi2/sequence": "chi-squared divergence of sequence weights, pure number; mean over samples",
    "mismatch/pearson": "correlation of the token probabilities under trainer and engine, pure number; over the step",
    "mismatch/prob_diff/max": "largest absolute difference of a token's probability, probability; maximum over sampled tokens",
    "mismatch/prob_diff/mean": "absolute difference of a token's probability, probability; mean over sampled tokens",
    "mismatch/weight/mean": "correction weight before truncation, ratio; mean over sampled tokens",
    "mismatch/weight/std": "spread of the correction weight, ratio; standard deviation (ddof 1) over sampled tokens",
    "mismatch/weight/max": "largest correction weight before truncation, ratio; maximum over sampled tokens",
    "mismatch/weight/min": "smallest correction weight, ratio; minimum over sampled tokens",
    "mismatch/applied_weight/mean": "correction weight as it multiplies the loss, ratio; mean over sampled tokens",
    "mismatch/missing_fraction": "sampled tokens without an engine log-prob (weight 1), fraction; mean over sampled tokens",
    "mismatch/clipped_fraction": "tokens whose correction weight was truncated or masked, fraction; mean over sampled tokens",
    "mismatch/clipped_tokens": "tokens whose correction weight was truncated or masked, tokens; sum",
    "mismatch/rejected_fraction": "tokens taken out of the loss by rejection, fraction; mean over sampled tokens",
    "mismatch/rejected_tokens": "tokens taken out of the loss by rejection, tokens; sum",
    "mismatch/rejected_sequences": "sequences taken out of the loss by rejection, sequences; sum",
    "mismatch/missing_log_probs": "sampled tokens without an engine log-prob (weight 1), tokens; sum",
    # optim
    "optim/lr": "learning rate of the policy, pure number; value used by the step's last update",
    "optim/grad_norm": "global gradient norm of the policy before clipping, loss units; mean over finite updates",
    "optim/updates": "optimizer updates of the policy in this step, updates; value (equal on all ranks)",
    "optim/total_updates": "optimizer updates of the policy so far, updates; value (equal on all ranks)",
    "optim/skipped_updates": "updates skipped because loss or gradient was not finite, updates; value (equal on all ranks)",
    "optim/critic_lr": "learning rate of the critic, pure number; value used by the step's last update",
    "optim/critic_grad_norm": "global gradient norm of the critic before clipping, loss units; mean over finite updates",
    "optim/critic_updates": "optimizer updates of the critic in this step, updates; value (equal on all ranks)",
    "optim/critic_skipped_updates": "critic updates skipped because loss or gradient was not finite, updates; value (equal on all ranks)",
    # perf
    "perf/tokens_per_s": "response tokens per second of the whole step, all ranks, tokens/s; tokens over the slowest rank's time",
    "perf/generate_tokens_per_s": "response tokens per second of generation alone, all ranks, tokens/s; tokens over the slowest rank's time",
    "perf/samples_per_s": "responses per second of the whole step, all ranks, samples/s; samples over the slowest rank's time",
    "perf/train_tokens_per_s": "response tokens per second of the training phases (old_log_prob, reference, values, update_critic, update_actor), all ranks, tokens/s; tokens over the slowest rank's time",
    "perf/model_flops": "operations of the forward and backward passes over this step's batch, from row, key and head-row counts (docs/distributed.md), recomputation left out, FLOPs; sum over ranks",
    "perf/flops_per_s": "model_flops per second of the training phases, all ranks, FLOPs/s; sum over the slowest rank's time",
    "perf/peak_flops": "dense 16-bit peak of the GPUs by their data sheets (absent on a CPU or an unknown GPU), FLOPs/s; sum over ranks",
    "perf/mfu": "model FLOPs utilisation: flops_per_s over peak_flops, fraction; over the step",
    "perf/unique_tokens": "tokens the trunk computed in one pass over the batch (each prompt once when shared), tokens; sum over ranks",
    "perf/microbatches": "forward and backward passes of the policy, passes; sum over ranks",
    "perf/empty_microbatches": "passes without a row, taken by ranks that had fewer micro-batches than another, passes; sum over ranks",
    "perf/padding": "rows of the passes of the policy that hold no token of a sequence (0 by construction), rows; sum over ranks",
    "perf/imbalance": "work of the heaviest rank over the mean of the ranks less 1, each summed over the step's optimizer batches, fraction; value (equal on all ranks)",
    "perf/imbalance/generated": "the same if every rank had trained on the sequences it generated, fraction; value (equal on all ranks)",
    "perf/split_groups": "groups whose sequences train on more than one rank, groups; value (equal on all ranks)",
    "perf/exchange_bytes": "bytes of sequences that moved to another rank after generation, bytes; sum over ranks",
    "perf/exchange_table_bytes": "bytes of the table of ids and lengths that the assignment is made from, bytes; sum over ranks",
    "perf/head_rows": "rows that went through the vocabulary head, rows; sum over ranks",
    "perf/nan_values": "values left out of this step's means because they were NaN, values; sum",
    # time: wall seconds, on a GPU between events of its own queue; nothing waits for the device; the slowest rank
    "time/step_s": "whole step, seconds; maximum over ranks",
    "time/total_s": "since the run started, time before a resume included, seconds; maximum over ranks",
    "time/generate_s": "generation, rewards that overlap with it included, seconds; maximum over ranks",
    "time/exchange_s": "assigning sequences to ranks and moving them, seconds; maximum over ranks",
    "time/reward_s": "waiting for rewards after generation, seconds; maximum over ranks",
    "time/old_log_prob_s": "log-probs before the first update, seconds; maximum over ranks",
    "time/reference_s": "log-probs of the reference model, seconds; maximum over ranks",
    "time/values_s": "values of the critic, seconds; maximum over ranks",
    "time/advantage_s": "correction, KL in reward, advantages and returns, seconds; maximum over ranks",
    "time/update_critic_s": "update of the critic, seconds; maximum over ranks",
    "time/update_actor_s": "update of the policy, seconds; maximum over ranks",
    "time/sync_weights_s": "handing the new weights to the engine, seconds; maximum over ranks",
    "time/checkpoint_s": "saving, seconds; maximum over ranks",
    "time/validate_s": "validation, seconds; maximum over ranks",
    # memory
    "memory/rss_gib": "resident memory of the process, GiB; maximum over ranks",
    "memory/peak_rss_gib": "highest resident memory since the process started, GiB; maximum over ranks",
    "memory/device_gib": "device memory in use by tensors, GiB; maximum over ranks",
    "memory/device_peak_gib": "highest device memory in use by tensors during the step, GiB; maximum over ranks",
    "memory/device_total_gib": "device memory there is, GiB; maximum over ranks",
    # data
    "data/epoch": "passes over the training prompts so far, epochs; value (equal on all ranks)",
    "data/position": "prompts taken from the current epoch, prompts; value (equal on all ranks)",
    "data/overlong_prompts": "prompts dropped at load because they exceed max_prompt_tokens, prompts; value (equal on all ranks)",
    "data/dropped_groups": "groups dropped by dynamic sampling, groups; value (equal on all ranks)",
    "data/dropped_fraction": "groups dropped by dynamic sampling, fraction of the groups generated; value (equal on all ranks)",
    "data/resampled_distinct": "different samples in the batch that PF-PPO resampled, fraction of the samples generated; mean over samples",
    "data/refills": "further generation rounds that dynamic sampling used, rounds; value (equal on all ranks)",
    "data/empty_updates": "optimizer batches without a token in the loss (no update is made), batches; value (equal on all ranks)",
    "data/exhausted": "steps trained on fewer groups than asked for because refills ran out, steps; value (equal on all ranks)",
    # val: held-out prompts
    "val/mean": "mean@n over all held-out samples, reward units; mean over prompts",
    "val/prompts": "held-out prompts, prompts; sum over ranks",
    "val/samples": "held-out responses, samples; sum over ranks",
    "val/unscorable": "held-out responses that could not be scored, samples; sum over ranks",
    "val/length/mean": "length of held-out responses, tokens; mean over samples",
    "val/truncated_fraction": "held-out responses cut at the token limit, fraction; mean over samples",
}

PATTERNS: dict[str, str] = {
    "reward/component/<name>/mean": "one reward component before weights, its own units; mean over samples where it did not abstain",
    "reward/component/<name>/weight": "weight of the component, pure number; value",
    "policy/stat/<name>": "a quantity that a user-defined loss reports per token; mean over tokens in the loss",
    "mismatch/rejected_tokens/<rule>": "sampled tokens taken out of the loss by one rejection rule, fraction; mean over sampled tokens",
    "mismatch/rejected_sequences/<rule>": "sequences taken out of the loss by one rejection rule, fraction; mean over sequences",
    "val/<source>/<stat>": "a held-out figure of one data source (mean, pass@k, maj@k, best, worst, each with /low and /high of its 95 % interval, length/mean, truncated_fraction); over prompts",
    "memory/peak/<phase>_gib": "highest memory in use during a phase (device memory on a GPU; on a CPU resident memory: its peak where it was the highest so far, else the larger of begin and end), GiB; maximum over ranks",
    "time/<phase>/<part>_s": "a part of a phase, seconds; maximum over ranks",
}

_REGEXES: dict[str, re.Pattern[str]] = {
    "reward/component/<name>/mean": re.compile(r"reward/component/[^/]+/mean"),
    "reward/component/<name>/weight": re.compile(r"reward/component/[^/]+/weight"),
    "policy/stat/<name>": re.compile(r"policy/stat/.+"),
    "mismatch/rejected_tokens/<rule>": re.compile(r"mismatch/rejected_tokens/[^/]+"),
    "mismatch/rejected_sequences/<rule>": re.compile(r"mismatch/rejected_sequences/[^/]+"),
    "val/<source>/<stat>": re.compile(r"val/[^/]+/.+"),
    "memory/peak/<phase>_gib": re.compile(r"memory/peak/[^/]+_gib"),
    "time/<phase>/<part>_s": re.compile(r"time/[^/]+/[^/]+_s"),
}


def is_known(name: str) -> bool:
    """True when `name` is in METRICS or fits one of PATTERNS."""
    return name in METRICS or any(regex.fullmatch(name) for regex in _REGEXES.values())


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """The names that are neither in METRICS nor fit a pattern, sorted; empty when all is well."""
    return sorted(name for name in names if not is_known(name))


def describe(name: str) -> str:
    """What a metric means, with unit and reduction; raises KeyError for an unknown name."""
    if name in METRICS:
        return METRICS[name]
    for pattern, regex in _REGEXES.items():
        if regex.fullmatch(name):
            return PATTERNS[pattern]
    raise KeyError(f"unknown metric {name!r}")


def policy_stat(stat: str) -> str:
    """Metric name of a per-token quantity reported by a loss: `policy/<stat>` if known, else `policy/stat/<stat>`."""
    return f"policy/{stat}" if f"policy/{stat}" in METRICS else f"policy/stat/{stat}"
