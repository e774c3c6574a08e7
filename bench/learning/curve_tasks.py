"""What the learning curves are made on: the embedded task, and a reasoning-gym task with SmolLM2."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CurveTask:
    """One task: fastrl's runs of it, and what TRL is told about it."""

    title: str
    runs: dict[str, tuple[str, tuple[str, ...]]]  # name -> recipe of configs/ and keys changed in it
    prompts: int  # a step
    samples: int  # a prompt
    tokens: int  # a response, at most
    lr: float
    warmup: int  # updates
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    model: str | None = None  # None: the embedded one
    folder: str = "learning"  # under docs/runs

    def problems(self, model: str, seed: int, steps: int) -> list[dict[str, Any]]:
        """The prompts that the GRPO run sees under this seed, in its order, as token ids."""
        from fastrl.data.prompts import PromptCursor, load_prompts
        from fastrl.models.load import load_tokenizer

        prompts = load_prompts(
            self.source, load_tokenizer(model), options=self.options or None, system_prompt=self.system_prompt
        )
        cursor = PromptCursor(prompts, seed=seed, shuffle=True)
        taken = [p for _ in range(steps) for p in cursor.take_within_epoch(self.prompts)]
        return [
            {"prompt": f"problem {i}", "ids": list(p.token_ids), "answer": str(p.answer)} for i, p in enumerate(taken)
        ]


EMBEDDED = CurveTask(
    title="the embedded task",
    runs={name: (name, ()) for name in ("ppo", "grpo", "rloo")},
    prompts=32,
    samples=8,
    tokens=24,  # of the GRPO recipe; PPO's 64 x 4 are as many samples a step
    lr=1e-4,
    warmup=5,
    source="task:arithmetic",
)
# Both trainers score by the last number of the response: the exact reward, not the task's own with its partial credit.
CHAIN_SUM = CurveTask(
    title="reasoning-gym's chain_sum (two one-digit terms), SmolLM2-135M-Instruct",
    runs={
        "ppo": (
            "grpo_chain_sum",
            ("reward.functions=[exact]", "algorithm.advantage=gae", "critic.lr=1e-5", "critic.warmup_steps=2"),
        ),
        "grpo": ("grpo_chain_sum", ("reward.functions=[exact]",)),
        "rloo": (
            "grpo_chain_sum",
            ("reward.functions=[exact]", "algorithm.advantage=rloo", "algorithm.policy_loss=reinforce"),
        ),
    },
    prompts=4,
    samples=8,
    tokens=16,
    lr=1e-5,
    warmup=0,
    source="task:reasoning_gym/chain_sum",
    options={"size": 400, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    system_prompt="Answer with just the number.",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    folder="learning_chain_sum",
)
TASKS = {"embedded": EMBEDDED, "chain_sum": CHAIN_SUM}
