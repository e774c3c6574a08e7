"""The problems both trainers see: same prompts, same order, same scoring."""

from __future__ import annotations

import random
import re

SUM_TEMPLATE = "What is {a} + {b}? Answer with just the number."
FILLER = (
    "You are a careful assistant that solves small arithmetic problems for a school. Read the question twice, "
    "do the sum in your head, check it once more, and give the result without any explanation or unit. "
)


def sums(held_out: bool) -> list[dict]:
    """One-digit sums 1..9: every fifth one (by a + 9 b) is held out."""
    rows = []
    for a in range(1, 10):
        for b in range(1, 10):
            if (((a - 1) + 9 * (b - 1)) % 5 == 0 and held_out) or (((a - 1) + 9 * (b - 1)) % 5 and not held_out):
                rows.append({"prompt": SUM_TEMPLATE.format(a=a, b=b), "answer": str(a + b)})
    return rows


def order(count: int, per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Which rows each step uses: a new shuffle per epoch."""
    rng, queue, plan = random.Random(seed), [], []
    for _ in range(steps):
        while len(queue) < per_step:
            fresh = list(range(count))
            rng.shuffle(fresh)
            queue += fresh
        plan.append([queue.pop(0) for _ in range(per_step)])
    return plan


def last_integer_matches(text: str, answer: str) -> float:
    """1 when the last integer of the text is the answer."""
    found = re.findall(r"-?\d+", text)
    return float(bool(found) and int(found[-1]) == int(answer))


def even_sum(response_ids) -> float:
    """1 when the response's token ids add up to an even number: varies inside a group, needs no decoding."""
    return float(sum(response_ids) % 2 == 0)


def trl_arguments(settings: dict) -> dict:
    """What every run of TRL's GRPOTrainer beside ours is told: float32, no KL, plain sampling, no files."""
    return dict(  # noqa: C408
        output_dir=settings["folder"],
        per_device_train_batch_size=settings["prompts"] * settings["samples"],
        num_generations=settings["samples"],
        max_steps=settings["steps"],
        max_completion_length=settings["tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=settings["lr"],
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
        remove_unused_columns=False,
    )
