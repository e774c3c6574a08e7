"""The reward components of a run: the pool of functions, and the reward models that it asks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fastrl.config.schema import Config
from fastrl.models.load import load_reward_model, load_tokenizer
from fastrl.rewards import RewardPool
from fastrl.rewards.pool import MODEL, component_names
from fastrl.trainer.models import load_part
from fastrl.trainer.reward_model import RewardModel


def make_judges(
    config: Config, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
) -> dict[str, RewardModel]:
    """The reward models among the reward functions, frozen, sharded as the reference is."""
    judges = {}
    for function, name in zip(config.reward.functions, component_names(config.reward.functions)):
        if function.startswith(MODEL) and function not in judges:
            path = function.removeprefix(MODEL)
            judges[function] = RewardModel(
                load_part(load_reward_model, path, config, dtype, device, mesh),
                load_tokenizer(path, trust_remote_code=config.model.trust_remote_code),
                device,
                name=name,
                dtype=dtype,
                offload=config.parallel.offload != "none",
                max_tokens=config.reward.model_max_tokens,
                max_tokens_per_microbatch=config.run.max_tokens_per_microbatch,
            )
    return judges


def make_rewards(config: Config, judges: dict[str, RewardModel]) -> RewardPool:
    """The reward components of the run."""
    r = config.reward
    return RewardPool(
        r.functions,
        r.weights,
        timeout_s=r.timeout_s,
        num_workers=r.num_workers,
        max_failure_fraction=r.max_failure_fraction,
        regex_pattern=r.regex_pattern,
        answer_pattern=r.answer_pattern,
        overlong_buffer_tokens=r.overlong_buffer_tokens,
        overlong_penalty=r.overlong_penalty,
        max_response_tokens=config.rollout.max_response_tokens,
        clip_min=r.clip_min,
        clip_max=r.clip_max,
        judges=judges,
    )
