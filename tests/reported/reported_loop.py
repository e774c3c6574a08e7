"""Cases about rewards, prompts, validation, metrics, the optimizer, schedules and resume."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reported_data import numbers, tensor
from torch import nn

from fastrl.config.schema import Config
from fastrl.data.batch import FinishReason
from fastrl.data.prompts import Prompt, PromptCursor, PromptSet, load_prompts
from fastrl.errors import RewardError
from fastrl.rewards import decode, shaping
from fastrl.rewards.base import check_batch_scores, check_score, combine_outcomes
from fastrl.rollout.engine import Sample, SamplingParams
from fastrl.trainer.generation import ScoredSample, build_batch
from fastrl.trainer.metrics import Metrics
from fastrl.trainer.optim import Optimizer, Schedule, total_updates
from fastrl.trainer.optimizers import number_of_steps
from fastrl.trainer.plan import make_plan
from fastrl.trainer.validation import Validator


def reduce_metric(i: dict[str, Any]) -> dict[str, Any]:
    metrics, kind = Metrics(), i["kind"]
    for value, weight in zip(numbers(i["values"]), i["weights"]):
        if kind == "sum":
            metrics.add_sum("policy/x", value)
        elif kind in ("max", "min"):
            getattr(metrics, f"add_{kind}")("policy/x", value)
        else:
            metrics.add("policy/x", value * weight, weight)
    values = metrics.reduce()
    return {"value": values["policy/x"]} if "policy/x" in values else {}


def overlong_penalty(i: dict[str, Any]) -> dict[str, Any]:
    enabled = i.get("enabled", True)
    buffer = i["buffer"] if enabled else 0
    return {
        "penalty": [
            shaping.overlong_penalty(n, max_tokens=i.get("max_len"), buffer_tokens=buffer, factor=i.get("factor", 1.0))
            for n in i["lengths"]
        ]
    }


def overlong_penalty_from_mask(i: dict[str, Any]) -> dict[str, Any]:
    mask = torch.tensor(i.get("mask", i.get("action_mask")))
    return overlong_penalty(i | {"lengths": mask.sum(-1).tolist()})


def scored_tokens(i: dict[str, Any]) -> dict[str, Any]:
    ids, index = decode.scored_tokens(i["response_ids"], i["response_mask"])
    return {"scored_ids": ids, "reward_index": index}


def prompt_of(ids: list[int], number: int = 0) -> Prompt:
    return Prompt(prompt_id=number, token_ids=tuple(ids), text="", messages=None, data_source="", answer=None, extra={})


def scored(prompt: Prompt, group: int, index: int, ids: list[int], num_samples: int = 1) -> ScoredSample:
    sample = Sample(group, index, torch.tensor(ids), torch.zeros(len(ids)), FinishReason.stop, 0)
    return ScoredSample(prompt, group, group * num_samples + index, sample, "", 0.0, True, {})


def token_in_token_out(i: dict[str, Any]) -> dict[str, Any]:
    """The ids that the engine drew go into the batch as they are; the next prompt is all of that plus the suffix."""
    batch = build_batch([scored(prompt_of(i["prompt_ids"]), 0, 0, i["sampled_ids"])])
    spoken = batch.prompt_ids.tolist() + batch.response_ids.tolist()
    return {
        "next_prompt_ids": spoken + i["suffix_ids"],
        "trained_ids": batch.response_ids[batch.response_mask].tolist(),
    }


def generate_pairs(i: dict[str, Any]) -> dict[str, Any]:
    count = i.get("n", i.get("num_samples", i.get("samples_per_prompt", 1)))
    prompts = i.get("prompts", list(range(i.get("n_prompts", 0))))
    samples = [scored(prompt_of([k + 1], k), k, j, [1], count) for k in range(len(prompts)) for j in range(count)]
    batch = build_batch(samples)
    owners = batch.group_index.tolist()
    return {
        "prompt_index": owners,
        "pairs": [[prompts[k], j % count] for j, k in enumerate(owners)],
        "prompts": [prompts[k] for k in owners],
    }


class CountingTokenizer:
    """A tokenizer whose template adds a given number of tokens for each part of a prompt."""

    chat_template = "yes"
    bos_token_id = None

    def __init__(self, rows: list[dict[str, int]]) -> None:
        self.rows = rows

    def apply_chat_template(self, messages: Any, *, tools: Any, add_generation_prompt: bool, **_: Any) -> list[int]:
        row = self.rows[int(messages[0]["content"])]
        # the rows' tool schemas are always part of what is sent
        parts = ["content", "template", "tools", *(["generation_prompt"] if add_generation_prompt else [])]
        return list(range(1, 1 + sum(row.get(part, 0) for part in parts)))


def prompt_filter(i: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": str(k), "answer": k}) + "\n" for k in range(len(i["rows"]))))
        prompts = load_prompts(str(path), CountingTokenizer(i["rows"]), max_prompt_tokens=i["max_prompt"])
    kept = {prompt.answer for prompt in prompts}
    return {"keep": [k in kept or str(k) in kept for k in range(len(i["rows"]))]}


def combine_rewards(i: dict[str, Any]) -> dict[str, Any]:
    totals = [
        combine_outcomes([check_score("f", numbers(v) if v is not None else None) for v in row], i["weights"])
        for row in i["per_function"]
    ]
    return {"total": totals, "valid": [t is not None for t in totals]}


def reward_contract(i: dict[str, Any]) -> dict[str, Any]:
    raises = []
    for returned in i["returns"]:
        try:
            check_batch_scores("reward", returned, i["n_completions"])
            raises.append(False)
        except RewardError:
            raises.append(True)
    return {"raises": raises}


@dataclass
class ScriptedGenerator:
    """Hands out the case's scores in the place of generation."""

    scores: list[float]
    params: Any = None
    num_samples: int = 1
    greedy: bool = False
    calls: list[int] = field(default_factory=list)

    def run(self, prompts: Any, *, step: int, first_group: int = 0) -> list[ScoredSample]:
        self.calls.append(len(prompts))
        out = []
        for k, prompt in enumerate(prompts):
            one = scored(prompt, first_group + k, 0, [1])
            out.append(ScoredSample(**(vars(one) | {"score": self.scores[prompt.prompt_id]})))
        return out

    def record_rewards(self, metrics: Metrics) -> None:
        """Nothing was scored here."""


def eval_accuracy(i: dict[str, Any]) -> dict[str, Any]:
    prompts = PromptSet([prompt_of([1], k) for k in range(len(i["scores"]))], name="case")
    validator = Validator(
        ScriptedGenerator(i["scores"]), prompts, SamplingParams(), 1, i["batch_size"] * i["world_size"]
    )
    metrics = Metrics()
    validator.run(metrics)
    values = metrics.reduce()
    return {"mean": values["val/mean"], "n": int(values["val/samples"])}


def run_of(i: dict[str, Any]) -> tuple[Config, int]:
    """The configuration of a case's run, and how many steps it takes."""
    samples = i["prompts_per_rollout"] * i["samples_per_prompt"]
    config = Config(
        rollout={"num_prompts_per_step": i["prompts_per_rollout"], "num_samples_per_prompt": i["samples_per_prompt"]},
        algorithm={"num_updates_per_step": samples // i["mini_batch"], "num_epochs_per_batch": i["ppo_epochs"]},
        optim={"total_epochs": float(i["epochs"])},
    )
    return config, number_of_steps(config, i["n_prompts"])


KINDS = {
    "linear_to_zero": "linear",
    "linear": "linear",
    "linear_warmup": "constant",
    "constant": "constant",
    "cosine": "cosine",
}


def lr_schedule(i: dict[str, Any]) -> dict[str, Any]:
    config, steps = run_of(i)
    a = config.algorithm
    total = total_updates(steps, a.num_updates_per_step, a.num_epochs_per_batch)
    schedule = Schedule(i["lr"], KINDS[i["schedule"]], i.get("warmup", 0), total)
    wanted = i.get("updates", range(total + 1))
    return {"total_updates": total, "lr_after": {str(k): schedule.rate(k) for k in wanted}}


class Weights(nn.Module):
    """Parameters with given values."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(tensor(v)) for v in values])


def optimizer_of(module: nn.Module, i: dict[str, Any]) -> Optimizer:
    lr = i.get("lr", 1.0)
    sgd = torch.optim.SGD(module.parameters(), lr=lr)
    return Optimizer(module, Schedule(lr), name="policy", max_grad_norm=i["max_norm"], torch_optimizer=sgd)


def nan_grad_step(i: dict[str, Any]) -> dict[str, Any]:
    module = Weights(i["params"])
    optimizer = optimizer_of(module, i)
    after, skipped, steps = [], [], []
    for gradient in i["grads"]:
        module.parts[0].grad = tensor(gradient)
        _, applied = optimizer.step()
        after.append(module.parts[0].tolist())
        skipped.append(not applied)
        steps.append(optimizer.updates)
    return {"params_after": after, "skipped": skipped, "scheduler_steps": steps}


def grad_clip(i: dict[str, Any]) -> dict[str, Any]:
    shards = i.get("shards", i.get("grads"))
    module = Weights(*[[0.0] * len(s) for s in shards])
    for part, gradient in zip(module.parts, shards):
        part.grad = tensor(gradient)
    norm, _ = optimizer_of(module, i | {"lr": 1.0}).step()
    return {"norm": float(norm), "clipped": [(-part.detach()).tolist() for part in module.parts]}


def grad_clip_accumulated(i: dict[str, Any]) -> dict[str, Any]:
    micro = i.get("micro_grads", i.get("micro", i.get("grads")))
    module = Weights([0.0] * len(micro[0]))
    for gradient in micro:  # as micro-batches do: each backward adds
        (module.parts[0] * tensor(gradient)).sum().backward()
    norm, _ = optimizer_of(module, i | {"lr": 1.0}).step()
    return {"norm": float(norm), "clipped": (-module.parts[0].detach()).tolist()}


def bf16_update(i: dict[str, Any]) -> dict[str, Any]:
    module = Weights([i["weight"]])
    lr = abs(i["update"])
    optimizer = optimizer_of(module, {"lr": lr, "max_norm": 1.0})
    low = torch.tensor(i["weight"], dtype=torch.bfloat16)
    for _ in range(i["steps"]):
        module.parts[0].grad = torch.full((1,), -math.copysign(1.0, i["update"]))
        optimizer.step()
        low = low + torch.tensor(i["update"], dtype=torch.bfloat16)
    return {"master_fp32": float(module.parts[0].detach()), "pure_bf16": float(low)}


def resume_steps(i: dict[str, Any]) -> dict[str, Any]:
    prompts = PromptSet([prompt_of([k + 1], k) for k in range(i["n_rows"])], name="case")
    total = number_of_steps(
        Config(rollout={"num_prompts_per_step": i["batch"]}, optim={"total_epochs": float(i["epochs"])}), i["n_rows"]
    )
    cursor = PromptCursor(prompts, seed=0)
    for _ in range(i["save_at"]):
        cursor.take_within_epoch(i["batch"])
    resumed = PromptCursor(prompts, seed=0)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    steps = []
    for step in range(i["save_at"] + 1, total + 1):
        if resumed.take_within_epoch(i["batch"]):
            steps.append(step)
    return {"steps_after_resume": steps}


def resume_lr(i: dict[str, Any]) -> dict[str, Any]:
    schedule = Schedule(i["lr"], KINDS[i["schedule"]], i["warmup"])

    def fresh() -> tuple[Weights, Optimizer]:
        module = Weights([0.0])
        sgd = torch.optim.SGD(module.parameters(), lr=i["lr"])
        return module, Optimizer(module, schedule, name="policy", torch_optimizer=sgd)

    def update(module: Weights, optimizer: Optimizer) -> float:
        module.parts[0].grad = torch.ones(1)
        before = float(module.parts[0].detach())
        optimizer.step()
        return before - float(module.parts[0].detach())  # what the weight moved by: the rate that was really used

    module, optimizer = fresh()
    for _ in range(i["saved_after_updates"]):
        update(module, optimizer)
    other, resumed = fresh()
    resumed.load_state_dict(optimizer.state_dict())
    return {"next_lrs": [update(other, resumed) for _ in range(i.get("n_next", 4))]}


def config_check(i: dict[str, Any]) -> dict[str, Any]:
    """A window that does not end with its rollout makes a longer step here: whole rollouts, split into windows."""
    needs = []
    for case in i["configs"]:
        slices, window = case["slices_per_rollout"], case["accumulate"]
        rollouts = math.ceil(window / slices)
        updates = math.ceil(rollouts * slices / window)
        plan = make_plan(Config(algorithm={"advantage": "grpo", "num_updates_per_step": updates, "correction": "none"}))
        needs.append(plan.old_log_prob)
    return {"needs_old_logprobs": needs}
