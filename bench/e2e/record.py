"""Rollouts of a small chat model, kept so that two trainers can train on the very same responses."""

from __future__ import annotations

import json
from pathlib import Path

from fastrl.models.load import load_model, load_tokenizer
from fastrl.rollout.engine import GenerationRequest, SamplingParams
from fastrl.rollout.native import NativeEngine


def record(settings: dict, path: Path) -> None:
    """Sample `settings["steps"]` steps of `prompts` x `samples` responses of exactly `tokens` tokens into a file."""
    tokenizer, model = load_tokenizer(settings["model"]), load_model(settings["model"])
    engine = NativeEngine(model)
    params = SamplingParams(max_tokens=settings["tokens"], ignore_eos=True, seed=settings["seed"])
    prompts = [
        tokenizer.apply_chat_template(
            [*settings["system"], {"role": "user", "content": row["prompt"]}],
            tokenize=True, add_generation_prompt=True, return_dict=False,
        )
        for row in settings["rows"]
    ]  # fmt: skip
    steps, count = [], settings["prompts"]
    for first in range(0, settings["steps"] * count, count):
        requests = [GenerationRequest(first + i, prompts[first + i], settings["samples"]) for i in range(count)]
        groups = [{"prompt": list(request.prompt_ids), "responses": [], "log_probs": []} for request in requests]
        for sample in sorted(engine.generate(requests, params), key=lambda s: (s.request_id, s.sample_index)):
            group = groups[sample.request_id - first]
            group["responses"].append(sample.token_ids.tolist())
            group["log_probs"].append(sample.log_probs.tolist())
        steps.append(groups)
    path.write_text(json.dumps(steps))
