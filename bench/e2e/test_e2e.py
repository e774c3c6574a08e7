"""End to end on a small chat model: the train phase alone against TRL's, and our own ideas one by one.

    pytest bench/e2e -m e2e --model DIR [--trl-python PATH]

`grpo_step.py` times whole steps, generation included.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.e2e.grpo_step import settings_of
from bench.e2e.ladder import Rungs
from bench.e2e.record import record
from bench.e2e.steps import Step
from bench.harness.measure import Case
from bench.harness.variants import Local
from bench.models.packed_forward import batch_of
from fastrl.models.load import load_model

pytestmark = pytest.mark.e2e
ROUNDS = 5


def train_settings(model: str, case: str, folder) -> dict:
    """The case's problems with recorded responses; one step for the gate, one per round."""
    options = argparse.Namespace(
        model=model, case=case, steps=ROUNDS, warmup=1, seed=0, no_correction=True, trl_python=None, engine="native"
    )
    settings = settings_of(options, str(folder)) | {"reward": "python:bench.e2e.tasks:even_sum", "ignore_eos": True}
    for message in settings["system"]:
        message["content"] = message["content"].strip()  # as the configuration reads it
    path = folder / "rollouts.json"
    record(settings, path)
    return settings | {"recorded": str(path), "generation_kwargs": None}


@pytest.mark.parametrize("case", ["sums", "long"])
def test_train_phase(bench, peers, model_folder, tmp_path, case):
    """Scoring, log-probs, loss, backward, optimizer and whatever else a step does apart from generating."""
    settings = train_settings(model_folder, case, tmp_path)
    variants = {"fastrl": Step(sys.executable, "ours_worker.py", settings)}
    if peers.find("trl") is not None:
        python = next(p for p in peers.interpreters("trl"))
        variants["trl"] = Step(python, "trl_worker.py", settings)

    def exact() -> list[torch.Tensor]:
        wide = copy.deepcopy(settings)
        wide["overrides"] = [*wide["overrides"], "run.dtype=float64"]
        reference = Step(sys.executable, "ours_worker.py", wide)
        try:
            return reference.result()[0]
        finally:
            reference.close()

    bench(
        Case(
            f"train phase {case}",
            variants,
            expected=exact,
            view=lambda t: t[1:],  # the gradient norm; what the loss is reported as differs between trainers
            tolerance=2e-3,  # TRL adds 1e-4 to the standard deviation, fastrl 1e-6
            rounds=ROUNDS,
        )
    )


@pytest.mark.parametrize("prompts,prompt,response", [(1, 96, 48), (4, 45, 10)], ids=["long", "sums"])
def test_ladder(bench, full, model_folder, prompts, prompt, response):
    """Rungs on random tokens; every gradient of the model is compared."""
    if prompts > 1 and not full:
        pytest.skip("the larger rollout: --full")
    rng = random.Random(0)
    tokens = lambda count: [rng.randrange(10, 1000) for _ in range(count)]  # noqa: E731
    batch = batch_of(
        [tokens(prompt) for _ in range(prompts)],
        [[tokens(rng.randint(response // 2, response)) for _ in range(8)] for _ in range(prompts)],
    )
    torch.manual_seed(0)
    advantages = torch.randn(batch.num_sequences)[batch.sequence_index]
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    rungs = Rungs(plain, load_model(model_folder), batch, advantages).all()

    def exact() -> list[torch.Tensor]:
        double = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
        return Rungs(double, double, batch, advantages.double()).all()["padded"][0]()

    bench(
        Case(
            f"ladder {prompts} x 8, P {prompt} R {response}",
            {name: Local(run) for name, (run, _, _) in rungs.items()},
            expected=exact,
            notes={name: {"rows": rows, "head_rows": head} for name, (_, rows, head) in rungs.items()},
        )
    )
