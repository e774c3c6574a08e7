"""Which passes a step runs, and why: the union of what the estimator, the loss, the correction and the config need.

A pass that nobody needs does not run; what is skipped is said in `describe`, which is printed before step 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastrl.algorithms.registry import Entry, get_advantage, get_correction, get_policy_loss
from fastrl.config.schema import Config
from fastrl.errors import ConfigError
from fastrl.rollout.engine import Engine
from fastrl.trainer.engine_choice import choose_engine
from fastrl.trainer.roles import Role, inputs_of, needs_critic, needs_reference, roles_of

ENGINES = {
    "native": "embedded: samples from the policy's own module",
    "vllm": "vLLM, given the weights after every update",
}


@dataclass(frozen=True)
class Plan:
    """The passes of a step. `reasons` maps a pass to the words for why it runs."""

    old_log_prob: bool  # a forward of the policy before the first update on a batch
    old_entropy: bool  # ... that also gives entropies
    sum_sq: bool  # ... and sums of squared probabilities
    reference: bool  # the frozen reference is loaded
    ref_log_prob: bool  # ... and gives log-probs, in a forward before the first update
    ref_kl: bool  # ... and the KL over the vocabulary, for the reward
    critic: bool  # values before, value update after
    bootstrap: bool  # one extra head row per truncated response
    greedy: bool  # one extra greedy sample per prompt
    selection: bool  # a no-gradient pass at the start of each optimizer batch
    correction: bool  # rollout correction weights
    gradient_in_forward: bool  # token-level loss: the head's gradient is made in its forward
    loss_agg_mode: str  # the configured one, else the loss's own
    updates_per_step: int
    epochs_per_batch: int
    roles: frozenset[Role]
    reasons: dict[str, str] = field(default_factory=dict)


def make_plan(config: Config) -> Plan:
    """The plan of a validated configuration."""
    a = config.algorithm
    advantage, loss = get_advantage(a.advantage), get_policy_loss(a.policy_loss)
    correction = get_correction(a.correction)
    reasons = old_log_prob_reasons(config, advantage, loss, correction)
    needs = inputs_of(advantage, a.advantage_options) | inputs_of(loss, a.policy_loss_options)
    selection = loss.select is not None or a.entropy_quantile is not None
    bootstrap = bool(a.advantage_options.get("bootstrap_truncated", False))
    return Plan(
        old_log_prob=bool(reasons),
        old_entropy="old_entropy" in needs or a.entropy_quantile is not None,
        sum_sq="sum_sq" in needs,
        reference=needs_reference(config),
        ref_log_prob="ref_log_prob" in needs or any(coef > 0 and kind != "full" for coef, kind in kl_terms(config)),
        ref_kl=a.kl_reward_coef > 0 and a.kl_reward_kind == "full",
        critic=needs_critic(config),
        bootstrap=bootstrap,
        greedy="greedy_scores" in needs,
        selection=selection,
        correction=a.correction != "none",
        gradient_in_forward=loss.level != "sequence",
        loss_agg_mode=a.loss_agg_mode or loss.loss_agg_mode,
        updates_per_step=a.num_updates_per_step,
        epochs_per_batch=a.num_epochs_per_batch,
        roles=roles_of(config),
        reasons={"old_log_prob": "; ".join(reasons)},
    )


def check_engine(config: Config, engine: Engine) -> None:
    """Raise ConfigError when something that is asked for reads log-probs that this engine does not give."""
    a = config.algorithm
    if getattr(engine, "gives_log_probs", True):
        return
    readers = {
        "correction": (get_correction(a.correction), a.correction_options),
        "policy_loss": (get_policy_loss(a.policy_loss), a.policy_loss_options),
    }
    for key, (entry, options) in readers.items():
        if "rollout_log_prob" in entry.needs_with(options) and not (key == "correction" and a.correction == "none"):
            other = "none" if key == "correction" else "clip"
            raise ConfigError(
                f"algorithm.{key} = {entry.name} reads the log-probs of sampled tokens, which "
                f"rollout.engine = {config.rollout.engine} does not give: set algorithm.{key}={other} or another engine"
            )


def kl_terms(config: Config) -> list[tuple[float, str]]:
    """Weight and kind of the KL in the loss and in the reward."""
    a = config.algorithm
    return [(a.kl_loss_coef, a.kl_loss_kind), (a.kl_reward_coef, a.kl_reward_kind)]


def old_log_prob_reasons(config: Config, advantage: Entry, loss: Entry, correction: Entry) -> list[str]:
    """Every reason to run the policy once before the first update; empty means the pass is skipped."""
    a = config.algorithm
    updates = a.num_updates_per_step * a.num_epochs_per_batch
    reasons = []
    if updates > 1:
        reasons.append(f"{updates} updates per rollout batch")
    if a.kl_reward_coef > 0 and a.kl_reward_kind != "full":
        reasons.append("KL in the reward")
    chosen = (
        ("advantage", advantage, a.advantage_options),
        ("policy_loss", loss, a.policy_loss_options),
        ("correction", correction, a.correction_options),
    )
    for what, entry, options in chosen:
        needs = entry.needs_with(options) if what != "advantage" else inputs_of(entry, options)
        for need in sorted(needs & {"old_log_prob", "old_entropy", "sum_sq", "pre_update_pass"}):
            reasons.append(f"{what} = {entry.name} needs {need}")
    if a.entropy_quantile is not None:
        reasons.append("entropy_quantile selects tokens before the update")
    return reasons


def describe(config: Config) -> list[str]:
    """The plan in plain words, one line per stage."""
    plan, a, r = make_plan(config), config.algorithm, config.rollout
    engine = choose_engine(config)
    total = r.num_prompts_per_step * r.num_samples_per_prompt
    extra = " + 1 greedy sample per prompt" if plan.greedy else ""
    made = "made in the forward" if plan.gradient_in_forward else "recomputed (the loss needs whole sequences)"
    prompts = "computed once per group" if config.run.share_prompts else "repeated for each response"
    updates = f"{plan.updates_per_step} x {plan.epochs_per_batch} updates"
    old = f"runs: {plan.reasons['old_log_prob']}" if plan.old_log_prob else "skipped: one update, ratio is exactly 1"
    why = "KL to the reference has a weight" if a.kl_loss_coef or a.kl_reward_coef else f"{a.policy_loss} reads it"
    reference = f"runs: {why}" if plan.reference else "not loaded: no KL term"
    if a.kl_loss_coef > 0 and a.kl_loss_kind == "full":
        reference += ", over the vocabulary inside the update"
    stages = {
        "generate": f"{r.num_prompts_per_step} prompts x {r.num_samples_per_prompt} samples = {total} responses "
        f"of up to {r.max_response_tokens} tokens{extra}",
        "engine": f"{ENGINES[engine.name]} ({engine.reason})",
        "old log-prob": old,
        "reference": reference,
        "values": f"critic runs: {a.advantage} needs values" if plan.critic else f"no critic: {a.advantage} needs none",
        "reward": " + ".join(config.reward.functions),
        "advantage": a.advantage,
        "update": f"{a.policy_loss}, {plan.loss_agg_mode}, {updates}",
        "head": f"response rows only, gradient {made}; prompts {prompts}",
    }
    if plan.critic and config.critic.warmup_steps:
        stages["warm-up"] = f"only the critic learns in the first {config.critic.warmup_steps} steps"
    if plan.correction:
        stages["correction"] = a.correction
    return [f"{name:13s} {text}" for name, text in stages.items()]
