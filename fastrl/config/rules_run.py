"""Rules about the length of training, generation, micro-batches, validation, checkpoints and logging."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from fastrl.config.findings import Finding, Rule, Subject, error, no_effect, warning

TRACKER_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "mlflow": "mlflow"}


def training_length(subject: Subject) -> Iterator[Finding]:
    """Exactly one of optim.total_steps and optim.total_epochs."""
    optim = subject.config.optim
    keys = ("optim.total_steps", "optim.total_epochs")
    if optim.total_steps is None and optim.total_epochs is None:
        yield error(*keys, text="how long to train? set optim.total_steps or optim.total_epochs")
    elif optim.total_steps is not None and optim.total_epochs is not None:
        both = f"optim.total_steps = {optim.total_steps} and optim.total_epochs = {optim.total_epochs:g}"
        yield error(*keys, text=f"{both} are both set: keep one (null unsets the other)")


def optimizer(subject: Subject) -> Iterator[Finding]:
    """Moment decay rates below 1; a final rate needs a schedule that falls."""
    optim = subject.config.optim
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield error("optim.betas", text=f"optim.betas = {list(optim.betas)}: both must be >= 0 and < 1")
    if optim.min_lr_ratio > 0 and optim.schedule == "constant":
        yield no_effect("optim.min_lr_ratio", "optim.schedule = constant never falls; use linear or cosine")
    algorithm = subject.config.algorithm
    updates = (optim.total_steps or 0) * algorithm.num_updates_per_step * algorithm.num_epochs_per_batch
    if 0 < updates < optim.lr_warmup_updates:
        yield warning(
            "optim.lr_warmup_updates",
            "optim.total_steps",
            text=f"optim.lr_warmup_updates = {optim.lr_warmup_updates} is more than the {updates} updates of the run: "
            "the rate never reaches optim.lr",
        )


def truncated_sampling(subject: Subject) -> Iterator[Finding]:
    """Sampling from a part of the distribution biases the ratio, so it must be asked for."""
    rollout = subject.config.rollout
    if rollout.allow_truncated_sampling:
        return
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0), ("min_p", rollout.min_p, 0.0)):
        if value != off:
            yield error(
                f"rollout.{key}",
                text=f"rollout.{key} = {value:g} samples from a part of the distribution, which biases the policy "
                f"ratio and its corrections by the kept mass: set rollout.{key} = {off:g}, or "
                "rollout.allow_truncated_sampling = true",
            )


def stops(subject: Subject) -> Iterator[Finding]:
    """An empty stop string is in every text; ids count from 0."""
    rollout = subject.config.rollout
    for index, text in enumerate(rollout.stop):
        if not text:
            yield error(
                f"rollout.stop[{index}]", text=f"rollout.stop[{index}] is empty: name text that ends a response"
            )
    for index, token in enumerate(rollout.stop_token_ids):
        if token < 0:
            yield error(
                f"rollout.stop_token_ids[{index}]",
                text=f"rollout.stop_token_ids[{index}] = {token}: token ids are 0 or more",
            )


def updates_fit_prompts(subject: Subject) -> Iterator[Finding]:
    """Each optimizer update needs at least one prompt."""
    updates, prompts = subject.config.algorithm.num_updates_per_step, subject.config.rollout.num_prompts_per_step
    if updates > prompts:
        yield error(
            "algorithm.num_updates_per_step",
            "rollout.num_prompts_per_step",
            text=f"algorithm.num_updates_per_step = {updates} splits a batch of "
            f"rollout.num_prompts_per_step = {prompts} prompts: use {prompts} or fewer",
        )


def token_budgets(subject: Subject) -> Iterator[Finding]:
    """A whole sequence should fit the micro-batch and the key/value cache."""
    config = subject.config
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    parts = (
        f"data.max_prompt_tokens = {config.data.max_prompt_tokens} plus "
        f"rollout.max_response_tokens = {config.rollout.max_response_tokens}"
    )
    if config.run.max_tokens_per_microbatch < longest:
        yield warning(
            "run.max_tokens_per_microbatch",
            text=f"run.max_tokens_per_microbatch = {config.run.max_tokens_per_microbatch} is less than one sequence "
            f"may have ({parts}): a longer one gets a micro-batch of its own, over the budget",
        )
    budget = config.rollout.kv_budget_tokens
    if budget is not None and budget < longest:
        yield error(
            "rollout.kv_budget_tokens",
            text=f"rollout.kv_budget_tokens = {budget} does not hold one sequence ({parts}): use {longest} or more",
        )


def validation(subject: Subject) -> Iterator[Finding]:
    """What validates needs held-out prompts; several greedy samples are one sample."""
    config = subject.config
    run = config.run
    if config.data.validation is None:
        for key, wanted in (
            ("run.validation_every_steps", run.validation_every_steps > 0),
            ("run.keep_best_checkpoint", run.keep_best_checkpoint),
        ):
            if wanted:
                text = f"{key} is set, but data.validation names no held-out prompts"
                yield error(key, "data.validation", text=text)
        for key in ("validation_before_training", "validation_num_samples", "validation_max_prompts"):
            if f"run.{key}" in subject.set_keys and getattr(run, key):
                yield no_effect(f"run.{key}", "data.validation names no held-out prompts")
        return
    if run.validation_num_samples > 1 and run.validation_temperature == 0:
        yield warning(
            "run.validation_num_samples",
            "run.validation_temperature",
            text=f"run.validation_num_samples = {run.validation_num_samples} greedy responses are all the same: "
            "set run.validation_temperature above 0, or take 1",
        )


def checkpoints(subject: Subject) -> Iterator[Finding]:
    """The best checkpoint is found among those that were both saved and validated."""
    run = subject.config.run
    if run.keep_best_checkpoint and subject.config.data.validation is not None:
        for key in ("checkpoint_every_steps", "validation_every_steps"):
            if getattr(run, key) == 0:
                yield warning(
                    "run.keep_best_checkpoint",
                    f"run.{key}",
                    text=f"run.keep_best_checkpoint has only the last step to choose from while run.{key} = 0",
                )
    if run.name is not None and (run.name in {"", ".", ".."} or re.search(r"[/\\\0]", run.name)):
        yield error("run.name", text=f"run.name = {run.name!r} is no folder name; run.dir says where run folders go")


def device(subject: Subject) -> Iterator[Finding]:
    """auto, cpu, cuda or cuda:N."""
    name = subject.config.run.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        yield error("run.device", text=f"run.device = {name!r}: must be auto, cpu, cuda or cuda:N")


def layers_of_the_model(subject: Subject) -> Iterator[Finding]:
    """Options of recomputation and adapters need these to be on."""
    model = subject.config.model
    for key, on, why in (
        ("gradient_checkpointing_every", model.gradient_checkpointing, "model.gradient_checkpointing = false"),
        ("gradient_checkpointing_keep", model.gradient_checkpointing, "model.gradient_checkpointing = false"),
        ("lora_alpha", model.lora_rank > 0, "model.lora_rank = 0 trains the whole model"),
        ("lora_targets", model.lora_rank > 0, "model.lora_rank = 0 trains the whole model"),
    ):
        if f"model.{key}" in subject.set_keys and not on:
            yield no_effect(f"model.{key}", why)
    if model.lora_rank and importlib.util.find_spec("peft") is None:
        text = "model.lora_rank: peft is not installed: pip install 'fastrl[lora]'"
        yield Finding(("model.lora_rank",), text, "missing_package")


def seed(subject: Subject) -> Iterator[Finding]:
    """What torch takes as a seed."""
    number = subject.config.run.seed
    if number >= 2**63:
        yield error("run.seed", text=f"run.seed = {number}: must be below 2^63 = {2**63}")


def trackers(subject: Subject) -> Iterator[Finding]:
    """Every tracker's package is installed."""
    for name in subject.config.logging.trackers:
        if importlib.util.find_spec(TRACKER_MODULES[name]) is None:
            text = f"logging.trackers: {name} is not installed: pip install 'fastrl[{name}]'"
            yield Finding(("logging.trackers",), text, "missing_package")


RULES: tuple[Rule, ...] = (
    training_length,
    optimizer,
    truncated_sampling,
    stops,
    updates_fit_prompts,
    token_budgets,
    validation,
    checkpoints,
    device,
    layers_of_the_model,
    seed,
    trackers,
)
