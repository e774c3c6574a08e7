"""Rules about estimators, losses, KL and corrections: names, options and what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastrl.config.findings import Finding, Rule, Subject, error, no_effect, warning
from fastrl.config.leaves import leaves
from fastrl.config.suggest import closest, did_you_mean
from fastrl.errors import ConfigError

# Keys of their own that the function gets when it has an option of that name.
SHARED_KEYS = {"advantage": ("gamma", "gae_lambda"), "policy_loss": ("clip_low", "clip_high", "dual_clip")}


def _entry(kind: str, name: str) -> Any | str:
    """The registered function, or what is wrong with its name."""
    from fastrl.algorithms.registry import get

    try:
        return get(kind, name)
    except ConfigError as problem:
        return str(problem)


def names_and_options(subject: Subject) -> Iterator[Finding]:
    """Estimator, loss and correction are known and take the options given."""
    algorithm = subject.config.algorithm
    for kind in ("advantage", "policy_loss", "correction"):
        name = getattr(algorithm, kind)
        options = getattr(algorithm, f"{kind}_options")
        if kind == "correction" and name == "none":
            if options:
                yield no_effect("algorithm.correction_options", "algorithm.correction = none")
            continue
        entry = _entry(kind, name)
        if isinstance(entry, str):
            yield error(f"algorithm.{kind}", text=entry)
            continue
        yield from _options(kind, entry, options, subject)


def _options(kind: str, entry: Any, options: dict[str, Any], subject: Subject) -> Iterator[Finding]:
    from fastrl.algorithms.registry import check_options

    prefix = f"algorithm.{kind}_options"
    shared: dict[str, Any] = {}
    for name in SHARED_KEYS.get(kind, ()):
        key = f"algorithm.{name}"
        value = getattr(subject.config.algorithm, name)
        if name in options:
            yield error(f"{prefix}.{name}", key, text=f"{prefix}.{name}: this option has a key of its own, write {key}")
        elif name in entry.options:
            if value is not None or leaves()[key].default is not None:
                shared[name] = value
        elif key in subject.set_keys and value is not None:
            yield no_effect(key, f"algorithm.{kind} = {entry.name} has no such option")
    own = {name: value for name, value in options.items() if name not in SHARED_KEYS.get(kind, ())}
    try:
        check_options(entry, {**shared, **own})
    except ConfigError as problem:
        for line in str(problem).splitlines():
            yield from _option_problem(line, prefix, shared)


def _option_problem(line: str, prefix: str, shared: dict[str, Any]) -> Iterator[Finding]:
    for name in shared:
        line = line.replace(f"{prefix}.{name}", f"algorithm.{name}")
    key = line.split(":")[0].split(" ")[0]
    yield error(key if key.startswith("algorithm.") else prefix, prefix, text=line)


def groups(subject: Subject) -> Iterator[Finding]:
    """Estimators that compare the samples of a prompt need at least two."""
    config = subject.config
    name, samples = config.algorithm.advantage, config.rollout.num_samples_per_prompt
    if samples > 1:
        return
    keys = ("rollout.num_samples_per_prompt", "algorithm.advantage")
    entry = _entry("advantage", name)
    if not isinstance(entry, str) and "group_id" in entry.data:
        yield warning(
            *keys,
            text=f"rollout.num_samples_per_prompt = 1, but algorithm.advantage = {name} compares samples of one "
            "prompt: use 2 or more, or algorithm.advantage = reinforce_plus_plus",
        )
    if config.algorithm.dynamic_sampling:
        yield error(
            "rollout.num_samples_per_prompt",
            "algorithm.dynamic_sampling",
            text="rollout.num_samples_per_prompt = 1, but algorithm.dynamic_sampling drops groups without spread, "
            "which is every group of one: use 2 or more",
        )


def aggregation(subject: Subject) -> Iterator[Finding]:
    """The loss is defined for the aggregation mode; the divisor belongs to one mode."""
    algorithm = subject.config.algorithm
    entry = _entry("policy_loss", algorithm.policy_loss)
    if (
        not isinstance(entry, str)
        and entry.only_loss_agg_modes
        and algorithm.loss_agg_mode is not None
        and algorithm.loss_agg_mode not in entry.only_loss_agg_modes
    ):
        yield error(
            "algorithm.loss_agg_mode",
            "algorithm.policy_loss",
            text=f"algorithm.loss_agg_mode = {algorithm.loss_agg_mode}, but "
            f"algorithm.policy_loss = {algorithm.policy_loss} is defined for {' or '.join(entry.only_loss_agg_modes)}",
        )
    mode = algorithm.loss_agg_mode or ("token-mean" if isinstance(entry, str) else entry.loss_agg_mode)
    if algorithm.loss_scale_factor is not None and mode != "seq-mean-token-sum-norm":
        yield no_effect("algorithm.loss_scale_factor", f"algorithm.loss_agg_mode = {mode}")


def kl_terms(subject: Subject) -> Iterator[Finding]:
    """KL kinds are known where a term has a weight; what tunes a term needs the term."""
    algorithm = subject.config.algorithm
    for key, coef in (("kl_loss_kind", algorithm.kl_loss_coef), ("kl_reward_kind", algorithm.kl_reward_coef)):
        kind = getattr(algorithm, key)
        entry = _entry("kl", kind)
        if isinstance(entry, str):
            yield error(f"algorithm.{key}", text=entry.replace("algorithm.kl_loss_kind", f"algorithm.{key}"))
        if f"algorithm.{key}" in subject.set_keys and coef == 0:
            yield no_effect(f"algorithm.{key}", f"algorithm.{key.replace('kind', 'coef')} = 0")
    if algorithm.kl_unbiased and algorithm.kl_loss_coef == 0:
        yield no_effect("algorithm.kl_unbiased", "algorithm.kl_loss_coef = 0")
    elif algorithm.kl_unbiased and algorithm.kl_loss_kind == "full":
        text = (
            "algorithm.kl_unbiased corrects an estimate from the sampled token, algorithm.kl_loss_kind = full is exact"
        )
        yield error("algorithm.kl_unbiased", "algorithm.kl_loss_kind", text=f"{text}: set one of them otherwise")
    if algorithm.kl_controller == "adaptive" and algorithm.kl_reward_coef == 0:
        text = "algorithm.kl_controller = adaptive starts from algorithm.kl_reward_coef, which is 0: set it above 0"
        yield error("algorithm.kl_controller", "algorithm.kl_reward_coef", text=text)
    for key in ("kl_target", "kl_horizon"):
        if f"algorithm.{key}" in subject.set_keys and algorithm.kl_controller != "adaptive":
            yield no_effect(f"algorithm.{key}", f"algorithm.kl_controller = {algorithm.kl_controller}")


def critic(subject: Subject) -> Iterator[Finding]:
    """critic.* keys need an estimator that reads values."""
    config = subject.config
    name = config.algorithm.advantage
    entry = _entry("advantage", name)
    if isinstance(entry, str):
        return
    key = subject.first_set("critic")
    reads_values = "values" in entry.needs_with(config.algorithm.advantage_options) or "values" in entry.data
    if key is not None and not reads_values:
        yield no_effect(key, f"algorithm.advantage = {name} needs no critic")
        return
    steps = config.optim.total_steps
    if reads_values and steps and config.critic.warmup_steps >= steps:
        yield warning(
            "critic.warmup_steps",
            "optim.total_steps",
            text=f"critic.warmup_steps = {config.critic.warmup_steps} leaves none of optim.total_steps = {steps} "
            "to the policy",
        )


def filters(subject: Subject) -> Iterator[Finding]:
    """Options of overlong masking, dynamic sampling and resampling need what they refine."""
    algorithm = subject.config.algorithm
    if algorithm.overlong_leaves_baseline and not algorithm.overlong_masking:
        text = "algorithm.overlong_leaves_baseline refines algorithm.overlong_masking, which is off: set it to true"
        yield error("algorithm.overlong_leaves_baseline", "algorithm.overlong_masking", text=text)
    for key in ("dynamic_sampling_metric", "max_refills", "on_exhausted"):
        if f"algorithm.{key}" in subject.set_keys and not algorithm.dynamic_sampling:
            yield no_effect(f"algorithm.{key}", "algorithm.dynamic_sampling = false")
    if algorithm.pf_ppo_mode != "none" and algorithm.advantage != "gae":
        yield error(
            "algorithm.pf_ppo_mode",
            "algorithm.advantage",
            text=f"algorithm.pf_ppo_mode = {algorithm.pf_ppo_mode} resamples the batch for algorithm.advantage = gae, "
            f"not {algorithm.advantage}: set it to none",
        )
    if "algorithm.pf_ppo_power" in subject.set_keys and algorithm.pf_ppo_mode != "pow":
        yield no_effect("algorithm.pf_ppo_power", f"algorithm.pf_ppo_mode = {algorithm.pf_ppo_mode}")


def reward_components(subject: Subject) -> Iterator[Finding]:
    """Components that an estimator or dynamic sampling names are among the reward functions."""
    from fastrl.rewards.pool import component_names

    algorithm = subject.config.algorithm
    known = component_names(subject.config.reward.functions)
    wanted: list[tuple[str, str, str]] = []
    weights = algorithm.advantage_options.get("weights")
    entry = _entry("advantage", algorithm.advantage)
    if not isinstance(entry, str) and "components" in entry.data and isinstance(weights, dict):
        key = "algorithm.advantage_options.weights"
        wanted += [(key, f"{key}.{name}", str(name)) for name in weights]
    if algorithm.dynamic_sampling and algorithm.dynamic_sampling_metric != "score":
        key, name = "algorithm.dynamic_sampling_metric", algorithm.dynamic_sampling_metric
        wanted.append((key, f"{key} = {name}", name))
    for key, shown, name in wanted:
        if name not in known:
            near = did_you_mean(closest(name, known))
            text = f"{shown}: reward.functions gives no component of that name{near} (components: {', '.join(known)})"
            yield error(key, "algorithm.advantage_options", "reward.functions", text=text)


RULES: tuple[Rule, ...] = (names_and_options, groups, aggregation, kl_terms, critic, filters, reward_components)
