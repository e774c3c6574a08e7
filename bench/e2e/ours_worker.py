"""fastrl, one training step per line read from standard input; a JSON line out for each. Run by `grpo_step.py`."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fastrl.config.load import load_config
from fastrl.trainer.loop import Trainer
from fastrl.trainer.reporter import Silent
from fastrl.trainer.setup import build


def overrides(settings: dict, data: str) -> list[str]:
    """The run of `settings` as keys of the configuration."""
    system = settings["system"][0]["content"] if settings["system"] else None
    lines = [
        f"model.path={settings['model']}",
        f"data.train={data}",
        "data.shuffle=false",
        f"reward.functions=[{settings.get('reward', 'exact')}]",
        f"rollout.num_prompts_per_step={settings['prompts']}",
        f"rollout.num_samples_per_prompt={settings['samples']}",
        f"rollout.max_response_tokens={settings['tokens']}",
        "algorithm.advantage=grpo",
        f"optim.lr={settings['lr']}",
        f"optim.total_steps={settings['steps']}",
        "run.num_threads=1",
        f"run.seed={settings['seed']}",
        "run.device=cpu",
        f"run.max_tokens_per_microbatch={settings.get('max_tokens_per_microbatch', 1024)}",
        *settings.get("overrides", []),
    ]
    return lines + ([f"data.system_prompt={system}"] if system else [])


def replay(engine, path: str) -> None:
    """Let the engine give recorded responses, call after call, in place of new ones."""
    import torch

    from fastrl.data.batch import FinishReason
    from fastrl.rollout.engine import Sample

    steps = iter(json.loads(Path(path).read_text()))

    def generate(requests, params):
        groups = next(steps)
        for request, group in zip(requests, groups, strict=True):
            assert list(request.prompt_ids) == group["prompt"], "another prompt than was recorded"
            for i, (ids, log_probs) in enumerate(zip(group["responses"], group["log_probs"])):
                yield Sample(request.request_id, i, torch.tensor(ids), torch.tensor(log_probs), FinishReason.length, 0)

    engine.generate = generate


def main(settings: dict) -> None:
    """Build the trainer as `settings` say and run it, gated."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in settings["rows"]))
        loaded = load_config([], overrides(settings, str(data)))
        parts = build(loaded.config)
        if settings.get("ignore_eos"):
            from dataclasses import replace

            parts.generator.params = replace(parts.generator.params, ignore_eos=True, stop_token_ids=())
        if settings.get("recorded"):
            replay(parts.engine, settings["recorded"])
        trainer = Trainer(parts, Silent(), None, lambda score: None)
        print(json.dumps({"ready": True}), file=real_stdout, flush=True)
        for line in sys.stdin:
            if line.strip() != "step":
                break
            wall, cpu = time.perf_counter(), time.process_time()
            _, values = trainer.step()
            row = {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "reward": values.get("reward/mean"),
                "mean_length": values.get("rollout/length/mean"),
                "loss": values.get("policy/total_loss"),
                "grad_norm": values.get("optim/grad_norm"),
                "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "parts": {k: v for k, v in values.items() if k.startswith("time/")},
                "unique_tokens": values.get("perf/unique_tokens"),
                "head_rows": values.get("perf/head_rows"),
            }
            print(json.dumps(row), file=real_stdout, flush=True)
        parts.generator.rewards.close()


if __name__ == "__main__":
    real_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]))
