"""TRL's GRPOTrainer, one optimizer step per line read from standard input; a JSON line out for each.

Run by `grpo_step.py` with an interpreter that has TRL.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from datasets import Dataset
from tasks import even_sum, last_integer_matches, trl_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def score(completions, answer, **_):
    """Reward of a batch, TRL's signature (chat completions)."""
    return [last_integer_matches(c[0]["content"], a) for c, a in zip(completions, answer)]


def score_ids(completions, completion_ids, **_):
    """Reward of recorded responses."""
    return [even_sum(ids) for ids in completion_ids]


class Replay(GRPOTrainer):
    """A trainer whose generation gives recorded responses, step after step."""

    def __init__(self, *args, recorded, **kwargs):
        self.recorded = iter(recorded)
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *_, **__):
        groups = next(self.recorded)
        found = [(group["prompt"], response) for group in groups for response in group["responses"]]
        assert [list(ids) for ids in prompt_ids] == [prompt for prompt, _ in found], "another prompt than was recorded"
        return [response for _, response in found], None


class Gate(TrainerCallback):
    """Waits for a line before each step and reports after it."""

    def on_step_begin(self, args, state, control, **_):
        if sys.stdin.readline().strip() != "step":
            os._exit(0)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_):
        self.done = {"wall_s": time.perf_counter() - self.wall, "cpu_s": time.process_time() - self.cpu}

    def on_log(self, args, state, control, logs=None, **_):
        if not logs or "reward" not in logs:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = self.done | {
            "reward": logs["reward"],
            "mean_length": logs.get("completions/mean_length"),
            "loss": logs.get("loss"),
            "grad_norm": logs.get("grad_norm"),
            "peak_rss_gib": peak,
        }
        print(json.dumps(row), file=real_stdout, flush=True)


def vllm_arguments(settings: dict) -> dict:
    """vLLM inside TRL's process, with room for the case's sequences; nothing for TRL's own generation."""
    if settings.get("engine") != "vllm":
        return {}
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}


def main(settings: dict) -> None:
    """Build the trainer as `settings` say and run it, gated."""
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = [
        {"prompt": [*settings["system"], {"role": "user", "content": r["prompt"]}], "answer": r["answer"]}
        for r in settings["rows"]
    ]
    config = GRPOConfig(
        **trl_arguments(settings),
        gradient_accumulation_steps=1,
        num_iterations=1,
        lr_scheduler_type="constant",
        warmup_steps=0,
        generation_kwargs=settings.get("generation_kwargs") or None,
        **vllm_arguments(settings),
    )
    recorded = settings.get("recorded")
    make = partial(Replay, recorded=json.loads(Path(recorded).read_text())) if recorded else GRPOTrainer
    trainer = make(
        model=model,
        processing_class=tokenizer,
        reward_funcs=score_ids if recorded else score,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Gate()],
    )
    print(json.dumps({"ready": True, "trl": __import__("trl").__version__}), file=real_stdout, flush=True)
    trainer.train()


if __name__ == "__main__":
    real_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr; the protocol keeps stdout
    main(json.loads(sys.argv[1]))
