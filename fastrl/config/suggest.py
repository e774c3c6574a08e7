"""Did you mean ...? Nearest names, the right section for a misplaced key, and what other trainers call our keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastrl.config.leaves import leaves, sections

# Names that people bring along from other trainers, and the key that means the same here.
FOREIGN_NAMES: dict[str, tuple[str, ...]] = {
    "adam_beta1": ("optim.betas",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "attn_implementation": ("model.attention",),
    "batch_size": ("rollout.num_prompts_per_step",),
    "beta": ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef"),
    "clip_grad": ("optim.max_grad_norm",),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_high": ("algorithm.clip_high",),
    "clip_ratio_low": ("algorithm.clip_low",),
    "cliprange": ("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange_value": ("critic.value_clip",),
    "dataset": ("data.train",),
    "epochs": ("optim.total_epochs",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "eval_steps": ("run.validation_every_steps",),
    "experiment_name": ("run.name",),
    "gradient_accumulation_steps": ("run.max_tokens_per_microbatch",),
    "group_size": ("rollout.num_samples_per_prompt",),
    "init_kl_coef": ("algorithm.kl_reward_coef",),
    "kl_coef": ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef"),
    "lam": ("algorithm.gae_lambda",),
    "lambda": ("algorithm.gae_lambda",),
    "learning_rate": ("optim.lr", "critic.lr"),
    "loss_type": ("algorithm.policy_loss", "algorithm.loss_agg_mode"),
    "lr_scheduler_type": ("optim.schedule",),
    "max_completion_length": ("rollout.max_response_tokens",),
    "max_new_tokens": ("rollout.max_response_tokens",),
    "max_prompt_length": ("data.max_prompt_tokens",),
    "max_response_length": ("rollout.max_response_tokens",),
    "max_steps": ("optim.total_steps",),
    "micro_batch_size": ("run.max_tokens_per_microbatch",),
    "mini_batch_size": ("algorithm.num_updates_per_step",),
    "model_name_or_path": ("model.path",),
    "n": ("rollout.num_samples_per_prompt",),
    "num_generations": ("rollout.num_samples_per_prompt",),
    "num_iterations": ("algorithm.num_epochs_per_batch",),
    "num_train_epochs": ("optim.total_epochs",),
    "output_dir": ("run.dir",),
    "per_device_train_batch_size": ("run.max_tokens_per_microbatch", "rollout.num_prompts_per_step"),
    "ppo_epochs": ("algorithm.num_epochs_per_batch",),
    "ppo_mini_batch_size": ("algorithm.num_updates_per_step",),
    "project_name": ("logging.project",),
    "report_to": ("logging.trackers",),
    "reward_funcs": ("reward.functions",),
    "reward_weights": ("reward.weights",),
    "rollout_batch_size": ("rollout.num_prompts_per_step",),
    "save_freq": ("run.checkpoint_every_steps",),
    "save_steps": ("run.checkpoint_every_steps",),
    "save_total_limit": ("run.keep_last_checkpoints",),
    "steps": ("optim.total_steps",),
    "test_freq": ("run.validation_every_steps",),
    "train_batch_size": ("rollout.num_prompts_per_step",),
    "train_files": ("data.train",),
    "val_files": ("data.validation",),
    "vf_coef": ("critic.lr",),
    "warmup_steps": ("optim.lr_warmup_updates", "critic.warmup_steps"),
}


def closest(word: str, choices: Iterable[str], limit: int = 1, cutoff: float = 0.6) -> list[str]:
    """The choices most like `word` (letter case ignored), best first."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[match] for match in difflib.get_close_matches(word.lower(), list(by_lower), limit, cutoff)]


def suggest_key(section: str | None, key: str) -> tuple[str, ...]:
    """The keys that somebody may have meant by `section.key`, best first; empty when nothing is near.

    Looked for in this order: the same section, the same name in another section, a name of another trainer, a near name
    in any section.
    """
    known = leaves()
    section = section if section in sections() else None
    own = [leaf.key for leaf in known.values() if leaf.section == section]
    if section and (near := closest(key, own, cutoff=0.75)):
        return (f"{section}.{near[0]}",)
    if moved := _named(key):
        return moved
    foreign = tuple(name for name in FOREIGN_NAMES.get(key.lower(), ()) if name in known)
    if foreign:
        return foreign
    if section and (near := closest(key, own)):
        return (f"{section}.{near[0]}",)
    if near := closest(key, [leaf.key for leaf in known.values()], cutoff=0.8):
        return _named(near[0])
    return ()


def _named(key: str) -> tuple[str, ...]:
    """Every `section.key` with this key, the critic's last: the policy's is meant more often."""
    names = [name for name, leaf in leaves().items() if leaf.key == key]
    return tuple(sorted(names, key=lambda name: name.startswith("critic.")))


def did_you_mean(options: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing without options."""
    text = " or ".join(options)
    return f"; did you mean {text}?" if text else ""
