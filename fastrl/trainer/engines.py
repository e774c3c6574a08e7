"""The engine of a run from its configuration: embedded, or vLLM in a child process or in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.config.schema import Config
from fastrl.data.prompts import PromptSet
from fastrl.dist.collectives import any_rank, rank, world_size
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.errors import ConfigError, EngineError
from fastrl.models.head import head_of
from fastrl.models.load import resolve_path
from fastrl.rewards.base import Judge
from fastrl.rollout.backend import BackendSettings
from fastrl.rollout.engine import Engine
from fastrl.rollout.external import ExternalEngine
from fastrl.rollout.kv_space import free_memory, kv_bytes, kv_bytes_per_token, wanted_kv_tokens
from fastrl.rollout.link import Link
from fastrl.rollout.native import NativeEngine
from fastrl.rollout.process_link import ProcessLink
from fastrl.rollout.shared_folder import SharedFolder
from fastrl.trainer.actor import Actor, PolicyModel
from fastrl.trainer.choreography import Choreography, movable_parts
from fastrl.trainer.critic import Critic
from fastrl.trainer.engine_choice import choose_engine
from fastrl.trainer.engine_links import make_link
from fastrl.trainer.engine_memory import ALONE, Beside, budget, device_bytes, engine_fraction, sleep_level
from fastrl.trainer.probe import DeliveryProbe
from fastrl.trainer.reference import Reference
from fastrl.trainer.reward_model import RewardModel
from fastrl.trainer.shared_engine import Sharing

if TYPE_CHECKING:
    from fastrl.trainer.loop import Parts

CPU_KV_FRACTION = 0.25  # of the free memory: the most that the key/value space takes on a CPU unless it is given


def make_engine(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: frozenset[int],
    sharing: Sharing | None = None,
    beside: Beside = ALONE,
) -> Engine:
    """The generation engine of the run; with `sharing` it may compute with the trainer's weights in place.

    `beside` are the run's other models, which leave it less of a GPU.
    """
    if choose_engine(config).name == "vllm":
        return make_vllm(config, model, stop_ids, sharing or Sharing(), beside)
    return NativeEngine(
        model,
        tokenizer=tokenizer,
        stop_token_ids=sorted(stop_ids),
        kv_budget_tokens=config.rollout.kv_budget_tokens,
        autocast_dtype=torch.bfloat16 if config.run.dtype == "bfloat16" else None,
    )


def make_vllm(
    config: Config, model: PreTrainedModel, stop_ids: frozenset[int], sharing: Sharing, beside: Beside
) -> ExternalEngine:
    """vLLM: one process per rank, or `rollout.tensor_parallel_size` ranks' processes as one engine."""
    size = config.rollout.tensor_parallel_size
    if world_size() % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {size} does not divide the {world_size()} processes of this run"
        )
    settings = backend_settings(config, model, in_place=sharing.weights is not None, beside=beside)
    engine_rank, gather, folder = rank() % size, None, None
    if size > 1:
        gather, folder = tensor_parallel_group(size)
        settings = replace(settings, tensor_parallel_rank=engine_rank, rendezvous=folder.rendezvous(0))
    link = make_link(config, model, settings, folder, sharing.weights)

    def before_restart(number: int) -> None:
        if folder is not None and isinstance(link, ProcessLink):
            link.settings = replace(link.settings, rendezvous=folder.rendezvous(number))
            link.mark = folder.mark(number)

    def delivered(refusal: EngineError) -> Link:
        sharing.give_up(str(refusal))
        return make_link(config, model, backend_settings(config, model, beside=beside), None)

    return ExternalEngine(
        link,
        model,
        vocabulary_size=int(head_of(model).weight.shape[0]),
        context=settings.max_sequence_tokens,
        stop_token_ids=stop_ids,
        any_rank=any_rank,
        gather=gather,
        engine_rank=engine_rank,
        before_restart=before_restart,
        on_close=None if folder is None else folder.close,
        instead=None if sharing.weights is None else delivered,
    )


def backend_settings(
    config: Config, model: PreTrainedModel, *, in_place: bool = False, beside: Beside = ALONE
) -> BackendSettings:
    """What the backend is started with; sizes are derived where the configuration leaves them open.

    Args:
        config: of the run.
        model: the policy.
        in_place: the backend computes with the trainer's own weights.
        beside: the run's other models.
    """
    r, m = config.rollout, config.model
    device = next(model.parameters()).device.type
    text = model.config.get_text_config()
    itemsize = 4 if config.run.dtype == "float32" else 2
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and r.max_response_tokens >= context:
        raise ConfigError(
            f"rollout.max_response_tokens = {r.max_response_tokens} leaves no place for a prompt: the context of "
            f"{m.path} is {context} tokens"
        )
    longest = longest if context is None else min(longest, context)  # a longer prompt is refused where it comes up
    tokens = r.kv_budget_tokens
    if tokens is None and device == "cpu":
        samples = -(-r.num_prompts_per_step * r.num_samples_per_prompt * r.tensor_parallel_size // world_size())
        wanted = wanted_kv_tokens(samples, r.max_running_samples, longest)
        per_token = kv_bytes_per_token(text, itemsize, r.tensor_parallel_size)
        tokens = max(longest, min(wanted, int(CPU_KV_FRACTION * free_memory() / world_size() / per_token)))
    space = None if tokens is None else kv_bytes(tokens, text, itemsize, r.tensor_parallel_size)
    fraction = r.gpu_memory_utilization
    if fraction is None and device == "cuda":
        fraction = engine_fraction(config, model, next(model.parameters()).device, in_place=in_place, beside=beside)
    return BackendSettings(
        model=resolve_path(m.path),
        tokenizer=resolve_path(m.tokenizer_path or m.path) if r.stop else None,
        revision=m.revision,
        trust_remote_code=m.trust_remote_code,
        dtype=config.run.dtype,
        device=device,
        max_sequence_tokens=longest,
        kv_bytes=space,
        memory_fraction=fraction,
        max_running=r.max_running_samples,
        tensor_parallel_size=r.tensor_parallel_size,
        timeout_s=r.engine_timeout_s,
        seed=config.run.seed % 2**31,
        sleep_mode=device == "cuda" and r.devices is None,
        options=dict(r.vllm_options),
    )


def tensor_parallel_group(size: int) -> tuple[Callable[[Any], list[Any]], SharedFolder]:
    """The trainer processes whose engine processes are one engine: a gather among them, and their shared folder."""
    mine = None
    for first in range(0, world_size(), size):
        members = list(range(first, first + size))
        group = torch_dist.new_group(members, backend="gloo")
        if rank() in members:
            mine = group
    assert mine is not None

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        torch_dist.all_gather_object(values, value, group=mine)
        return values

    own = SharedFolder() if rank() % size == 0 else None
    path = gather(None if own is None else str(own.path))[0]
    return gather, own or SharedFolder(path)


def make_choreography(
    config: Config,
    engine: Engine,
    actor: Actor,
    critic: Critic | None,
    device: torch.device,
    sharing: Sharing | None = None,
) -> Choreography:
    """Who holds the device's memory when; the embedded engine only has copies of weights to give back."""
    models = [part for part in (actor, critic) if part is not None]
    pairs = [(part.model, part.optimizer.torch_optimizer) for part in models]
    level: int | None = sleep_level(config, device) if choose_engine(config).name == "vllm" else 1
    offload = config.rollout.offload
    if isinstance(engine, ExternalEngine) and config.rollout.devices is not None:
        level, offload = None, "none"  # nobody waits for the memory of a GPU of its own
    memory = Choreography(engine, level, movable_parts(offload, pairs, device))
    if sharing is not None and sharing.weights is not None:
        memory.sleep_level = 0  # the weights are the trainer's: the engine has only keys and values to give back
        sharing.when_given_up = lambda: setattr(memory, "sleep_level", level)
    if isinstance(engine, ExternalEngine):
        engine.around_delivery = memory.trainer_present
    memory.begin(wait=device.type == "cuda" and config.rollout.devices is None)
    return memory


def models_beside(critic: Critic | None, reference: PolicyModel | None, judges: Iterable[Judge]) -> Beside:
    """What a rank holds beside the policy. A reference without adapters is the policy itself."""
    return Beside(
        trained=() if critic is None else (critic.model,),
        frozen=(reference.model,) if isinstance(reference, Reference) and not reference.offload else (),
        scoring=tuple(judge.model for judge in judges if isinstance(judge, RewardModel)),
    )


def make_probe(config: Config, engine: Engine, actor: Actor, prompts: PromptSet) -> DeliveryProbe | None:
    """A comparison of engine and trainer after updates; None where they share the weights."""
    if not isinstance(engine, ExternalEngine):
        return None
    return DeliveryProbe(engine, actor, prompts[0], VerifySchedule(config.rollout.verify_weights))


def engine_lines(parts: Parts) -> list[str]:
    """The engine that was started and what it does to memory; little about the embedded one."""
    engine, config = parts.engine, parts.config
    if not isinstance(engine, ExternalEngine):
        return parts.sharing.lines()
    info, settings = engine.ready(), engine.settings
    sizes = budget(
        config,
        parts.actor.model,
        kv_bytes=settings.kv_bytes,
        sleep_level=parts.memory.sleep_level or 0,
        total_bytes=device_bytes(parts.device),
        bucket_gib=config.rollout.bucket_gib,
        in_place=parts.sharing.weights is not None,
        beside=models_beside(parts.critic, parts.reference, parts.generator.rewards.judges.values()),
    )
    share = "" if settings.memory_fraction is None else f", at most {settings.memory_fraction:.2f} of the GPU"
    where = "in this process" if config.rollout.vllm_in_process else "in a process of its own"
    apart = config.rollout.devices is not None and settings.device != "cuda"
    return [
        f"engine        {info.name} {where}, {settings.dtype} on {settings.device}: {info.kv_tokens} tokens of keys "
        f"and values, context {info.context}{share}",
        *(f"              {warning}" for warning in info.warnings),
        *(["              rollout.devices: no GPUs here, the engine has the same CPU and never sleeps"] * apart),
        *parts.sharing.lines(),
        *sizes.lines(),
    ]
