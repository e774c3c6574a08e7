"""A whole run of TRL's GRPOTrainer: reward and seconds after every step go to FOLDER/curve.json.

    python bench/learning/trl_curve.py SETTINGS.json

Run by `curves.py` with an interpreter that has TRL. Prompts come as token ids, so that no tokenizer adds anything.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.e2e.tasks import last_integer_matches, trl_arguments


def score(completions, answer, **_):
    """1 where the last integer of the text is the answer."""
    return [last_integer_matches(text, a) for text, a in zip(completions, answer)]


class Prompted(GRPOTrainer):
    """A trainer that looks prompts up by their name."""

    def __init__(self, *args, prompt_ids, **kwargs):
        self.prompt_ids = prompt_ids
        super().__init__(*args, **kwargs)

    def _tokenize_prompts(self, prompts):
        return [list(self.prompt_ids[name]) for name in prompts], None, {}


class Curve(TrainerCallback):
    """Seconds of training steps and the reward of each."""

    def __init__(self):
        self.seconds, self.rewards, self.total = [], [], 0.0

    def on_step_begin(self, args, state, control, **_):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.total += time.perf_counter() - self.started

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "reward" in logs:
            self.seconds.append(round(self.total, 3))
            self.rewards.append(logs["reward"])


def main(settings: dict) -> None:
    """Train and write the curve."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    config = GRPOConfig(
        **trl_arguments(settings),
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup"],
    )
    curve = Curve()
    trainer = Prompted(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": r["prompt"], "answer": r["answer"]} for r in settings["rows"]]),
        callbacks=[curve],
        prompt_ids={row["prompt"]: row["ids"] for row in settings["rows"]},
    )
    trainer.train()
    (Path(settings["folder"]) / "curve.json").write_text(
        json.dumps({"seconds": curve.seconds, "reward": curve.rewards})
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
