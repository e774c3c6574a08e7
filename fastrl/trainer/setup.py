"""From a configuration to the parts of a trainer. What the plan does not need is never loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.algorithms.kl import AdaptiveKL, FixedKL
from fastrl.algorithms.registry import Entry, check_options, get_advantage, get_correction, get_kl, get_policy_loss
from fastrl.config.schema import Config
from fastrl.data.prompts import PromptCursor, PromptSet, load_prompts
from fastrl.dist.fsdp import splits
from fastrl.dist.mesh import make_mesh
from fastrl.dist.sequence import sequence_groups
from fastrl.errors import ConfigError
from fastrl.models.cpu import keep_heap
from fastrl.models.flops import forward_flops
from fastrl.models.load import load_critic, load_tokenizer, stop_token_ids
from fastrl.rewards.pool import component_names
from fastrl.rollout.engine import SamplingParams
from fastrl.trainer.actor import Actor, PolicyModel
from fastrl.trainer.advantage import AdvantageStage
from fastrl.trainer.balancing import Exchange, cost_model
from fastrl.trainer.critic import Critic
from fastrl.trainer.engines import make_choreography, make_engine, make_probe, models_beside
from fastrl.trainer.fits import check_fits
from fastrl.trainer.full_kl import FullKL
from fastrl.trainer.generation import Generator
from fastrl.trainer.loop import Parts
from fastrl.trainer.losses import LossSettings
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.models import load_part, load_policy, load_trained_policy
from fastrl.trainer.optim import Schedule, total_updates
from fastrl.trainer.optimizers import actor_schedule, make_optimizer, number_of_steps
from fastrl.trainer.plan import Plan, check_engine, make_plan
from fastrl.trainer.precision import compute_dtype, resolve_device
from fastrl.trainer.reference import Reference, WithoutAdapters
from fastrl.trainer.rewards import make_judges, make_rewards
from fastrl.trainer.router_loss import RouterLoss
from fastrl.trainer.selection import EntropyController
from fastrl.trainer.sequence import share_rows
from fastrl.trainer.shared_engine import Sharing, share_weights
from fastrl.trainer.validation import Validator


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch; the trainer's own draws are addressed by (seed, step, ...) and need none."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build(
    config: Config, *, progress: Callable[[str, int, int], None] | None = None, metrics: Metrics | None = None
) -> Parts:
    """Load models and data and put the trainer's parts together. Raises a FastRLError that names the key to change."""
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    seed_everything(config.run.seed)
    plan, device, dtype = make_plan(config), resolve_device(config.run.device), compute_dtype(config.run.dtype)
    if device.type == "cpu":
        keep_heap()
    metrics = metrics or Metrics()
    metrics.watch(device)
    m = config.model
    tokenizer = load_tokenizer(
        m.tokenizer_path or m.path,
        revision=m.revision,
        trust_remote_code=m.trust_remote_code,
        chat_template=m.chat_template,
    )
    train, validation = load_data(config, tokenizer)
    cursor = PromptCursor(train, seed=config.run.seed, shuffle=config.data.shuffle)
    total_steps = number_of_steps(config, len(train))
    mesh = make_mesh(device, config.parallel.replicate, config.parallel.shard)
    model = load_trained_policy(config, dtype, device, mesh)
    check_fits(config, model, train, validation)
    sharing = share_weights(config, model)
    actor = make_actor(config, plan, model, sharing, total_steps, dtype)
    stop_ids = frozenset(stop_token_ids(model, tokenizer)) | frozenset(config.rollout.stop_token_ids)
    reference = make_reference(config, plan, model, dtype, device, mesh)
    add_row_terms(config, actor, reference, mesh)
    critic = make_critic(config, plan, dtype, device, total_steps, mesh)
    judges = make_judges(config, dtype, device, mesh)
    others = models_beside(critic, reference, judges.values())
    engine = make_engine(config, model, tokenizer, stop_ids, sharing, others)
    check_engine(config, engine)
    rewards = make_rewards(config, judges)
    generator = Generator(
        engine,
        tokenizer,
        rewards,
        sampling_params(config, stop_ids),
        config.rollout.num_samples_per_prompt,
        config.run.seed,
        stop_ids,
        plan.greedy,
    )
    if progress is not None:
        generator.progress = partial(progress, "generate")
    memory = make_choreography(config, engine, actor, critic, device, sharing)
    ranks = sequence_groups(config.parallel.sequence)
    for part in (actor, reference, critic):
        if part is not None:
            share_rows(part.model, ranks)
    return Parts(
        config=config,
        plan=plan,
        actor=actor,
        reference=reference,
        critic=critic,
        engine=engine,
        memory=memory,
        probe=make_probe(config, engine, actor, train),
        generator=generator,
        cursor=cursor,
        exchange=make_exchange(config, plan, model),
        advantages=advantage_stage(config),
        entropy=EntropyController(config.algorithm.entropy_coef, config.algorithm.entropy_target),
        validator=make_validator(config, generator, validation),
        metrics=metrics,
        device=device,
        total_steps=total_steps,
        num_overlong_prompts=train.num_dropped,
        sharing=sharing,
    )


def make_actor(
    config: Config, plan: Plan, model: PreTrainedModel, sharing: Sharing, total_steps: int, dtype: torch.dtype
) -> Actor:
    """The trained policy with its optimizer."""
    o, schedule = config.optim, actor_schedule(config, plan, total_steps)
    return Actor(
        model,
        make_optimizer(config, model, schedule, "policy", o.weight_decay, o.max_grad_norm, masters=sharing.masters),
        loss_settings(config),
        temperature=config.rollout.temperature,
        dtype=dtype,
        gradient_in_forward=plan.gradient_in_forward,
    )


def add_row_terms(config: Config, actor: Actor, reference: PolicyModel | None, mesh: DeviceMesh | None) -> None:
    """Terms of the loss that need more of a row than its log-prob, where the configuration has them."""
    refuse_full_kl(config, mesh)
    a = config.algorithm
    if reference is not None and a.kl_loss_coef > 0 and a.kl_loss_kind == "full":
        actor.full_kl = FullKL(actor, reference).rows
    if a.router_aux_coef > 0:
        actor.router = RouterLoss(actor, a.router_aux_coef)


def load_data(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts, rendered."""
    d = config.data
    shared: dict[str, Any] = {
        "prompt_column": d.prompt_column,
        "answer_column": d.answer_column,
        "source_column": d.source_column,
        "system_prompt": d.system_prompt,
        "prompt_template": d.prompt_template,
        "apply_chat_template": d.apply_chat_template,
        "max_prompt_tokens": d.max_prompt_tokens,
    }
    train = load_prompts(
        d.train, tokenizer, split="train", options=d.train_options, max_prompts=d.max_prompts, **shared
    )
    if d.validation is None:
        return train, None
    names = [d.validation] if isinstance(d.validation, str) else d.validation
    takes_options = any(name.startswith(("task:", "hub:")) for name in names)
    options = d.train_options | d.validation_options if takes_options else d.validation_options
    limit = config.run.validation_max_prompts
    held_out = load_prompts(d.validation, tokenizer, split="validation", options=options, max_prompts=limit, **shared)
    return train, held_out


def make_critic(
    config: Config,
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    total_steps: int,
    mesh: DeviceMesh | None = None,
) -> Critic | None:
    """The value model with its optimizer, or None."""
    if not plan.critic:
        return None
    c = config.critic
    model = load_part(load_critic, c.path or config.model.path, config, dtype, device, mesh)
    updates = total_updates(total_steps, plan.updates_per_step, c.num_epochs_per_batch or plan.epochs_per_batch)
    schedule = Schedule(c.lr, config.optim.schedule, c.lr_warmup_updates, updates, config.optim.min_lr_ratio)
    optimizer = make_optimizer(config, model, schedule, "critic", c.weight_decay, c.max_grad_norm)
    return Critic(model, optimizer, dtype=dtype, value_clip=c.value_clip, huber_delta=c.huber_delta)


def make_reference(
    config: Config,
    plan: Plan,
    policy: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> PolicyModel | None:
    """The frozen starting policy, or None; with adapters it is the policy with these off."""
    if not plan.reference:
        return None
    if config.model.lora_rank:
        return WithoutAdapters(policy, temperature=config.rollout.temperature, dtype=dtype)
    model = load_policy(config, dtype, device, mesh)
    model.requires_grad_(False)
    offload = config.parallel.offload != "none"
    return Reference(model, device, offload=offload, temperature=config.rollout.temperature, dtype=dtype)


def refuse_full_kl(config: Config, mesh: DeviceMesh | None) -> None:
    """The KL over the vocabulary runs both heads again in the backward pass: their weights must be whole and apart."""
    a = config.algorithm
    keys = (
        ("kl_loss_kind", a.kl_loss_coef > 0, a.kl_loss_kind),
        ("kl_reward_kind", a.kl_reward_coef > 0, a.kl_reward_kind),
    )
    for key, used, kind in keys:
        if used and kind == "full" and (splits(mesh) or config.model.lora_rank):
            change = "parallel.shard = 1" if splits(mesh) else "model.lora_rank = 0"
            raise ConfigError(
                f"algorithm.{key} = full needs whole models without adapters: set {change}, or {key} = k3"
            )


def make_exchange(config: Config, plan: Plan, model: nn.Module) -> Exchange:
    """The stage that balances sequences over ranks, by the work of this model's update."""
    return Exchange(
        cost_model(forward_flops(model)),
        num_updates=plan.updates_per_step,
        share_prompts=config.run.share_prompts,
        whole_groups=get_advantage(config.algorithm.advantage).whole_groups,
        num_copies=config.parallel.sequence,
    )


def sampling_params(config: Config, stop_ids: frozenset[int]) -> SamplingParams:
    """How training samples are drawn."""
    r = config.rollout
    return SamplingParams(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        max_tokens=r.max_response_tokens,
        stop=tuple(r.stop),
        stop_token_ids=tuple(sorted(stop_ids)),
        seed=config.run.seed,
    )


def make_validator(config: Config, generator: Generator, prompts: PromptSet | None) -> Validator | None:
    """Validation with its own sampling settings, or None without held-out prompts."""
    if prompts is None:
        return None
    run, rollout = config.run, config.rollout
    params = SamplingParams(
        temperature=run.validation_temperature,
        top_p=run.validation_top_p,
        max_tokens=rollout.max_response_tokens,
        stop=generator.params.stop,
        stop_token_ids=generator.params.stop_token_ids,
        seed=run.seed,
    )
    chunk = max(1, rollout.num_prompts_per_step * rollout.num_samples_per_prompt // run.validation_num_samples)
    return Validator(generator, prompts, params, run.validation_num_samples, prompts_per_call=chunk)


def options_of(entry: Entry, given: dict[str, Any], config: Config) -> dict[str, Any]:
    """Typed options of a registered function, with the shared keys of the algorithm section where it takes them."""
    a = config.algorithm
    options = check_options(entry, given)
    shared = {"gamma": a.gamma, "gae_lambda": a.gae_lambda, "clip_low": a.clip_low, "clip_high": a.clip_high}
    for name, value in shared.items():
        if name in entry.options and name not in options and value is not None:
            options[name] = value
    if "dual_clip" in entry.options and "dual_clip" not in options:
        options["dual_clip"] = a.dual_clip
    return options


def advantage_stage(config: Config) -> AdvantageStage:
    """The advantage stage of the run."""
    a = config.algorithm
    estimator = get_advantage(a.advantage)
    options = options_of(estimator, a.advantage_options, config)
    if "components" in estimator.data and "weights" in estimator.options and config.reward.weights is not None:
        options.setdefault("weights", dict(zip(component_names(config.reward.functions), config.reward.weights)))
    controller = (
        AdaptiveKL(a.kl_reward_coef, target=a.kl_target, horizon=a.kl_horizon)
        if a.kl_controller == "adaptive"
        else FixedKL(a.kl_reward_coef)
    )
    correction = get_correction(a.correction)
    return AdvantageStage(
        estimator=estimator,
        options=options,
        whiten=estimator.whitens(options),
        kl_controller=controller,
        kl=get_kl(a.kl_reward_kind),
        correction=None if a.correction == "none" else correction,
        correction_options=check_options(correction, a.correction_options),
        overlong_masking=a.overlong_masking,
        overlong_leaves_baseline=a.overlong_leaves_baseline,
    )


def loss_settings(config: Config) -> LossSettings:
    """The loss of the run."""
    a = config.algorithm
    loss = get_policy_loss(a.policy_loss)
    return LossSettings(
        policy_loss=loss,
        options=options_of(loss, a.policy_loss_options, config),
        kl=get_kl(a.kl_loss_kind) if a.kl_loss_coef > 0 else None,
        kl_coef=a.kl_loss_coef,
        kl_unbiased=a.kl_unbiased,
        correction=token_correction(config),
    )


def token_correction(config: Config) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Token weights for steps without an old pass: current against rollout log-probs, in the update's forward."""
    a = config.algorithm
    if a.correction == "none":
        return None
    entry = get_correction(a.correction)
    options = check_options(entry, a.correction_options)

    def weights(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
        data = {
            "old_log_prob": old_log_prob,
            "rollout_log_prob": rollout_log_prob,
            "response_mask": mask,
            "loss_mask": mask,
        }
        data["cu_seqlens"] = torch.tensor([0, mask.numel()], device=mask.device)
        return entry.call(data, options).weight

    return weights
