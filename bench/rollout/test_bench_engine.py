"""The embedded engine against `model.generate` and vLLM: the same model, prompts and number of tokens."""

from __future__ import annotations

import torch

from bench.harness.measure import Case
from bench.harness.variants import Inputs, Local
from bench.rollout.native_vs_generate import Generate, Native, prompts_of
from fastrl.models.cpu import keep_heap
from fastrl.models.load import load_model, load_tokenizer, stop_token_ids

PROMPTS, SAMPLES, TOKENS, GREEDY = 4, 8, 32, 32


class Sampling:
    """Sampled responses with a new seed at every call; `check` gives greedy tokens [prompts, tokens]."""

    def __init__(self, generator, prompts: list[list[int]]) -> None:
        self.generator, self.prompts, self.seed = generator, prompts, 0

    def __call__(self):
        self.seed += 1
        self.generator(self.prompts, SAMPLES, TOKENS, greedy=False, stop=False, seed=self.seed)

    def check(self) -> torch.Tensor:
        return torch.tensor(self.generator(self.prompts, 1, GREEDY, greedy=True, stop=False, seed=0))


def wrong_tokens(want: torch.Tensor):
    """Fraction of the greedy tokens that differ from the reference's."""

    def error(got: list[torch.Tensor]) -> float:
        return float((got[0] != want).double().mean()) if got[0].shape == want.shape else float("inf")

    return error


def test_engine(bench, peers, model_folder, smoke):
    if not smoke:
        keep_heap()  # as in training; this is the last benchmark of a session
    tokenizer, model = load_tokenizer(model_folder), load_model(model_folder)
    stop_ids = sorted(stop_token_ids(model, tokenizer))
    prompts = prompts_of(tokenizer, PROMPTS, seed=0)
    generate = Generate(model_folder, stop_ids)
    double = Generate(model_folder, stop_ids)
    double.model.double()
    want = Sampling(double, prompts).check()
    del double
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    inputs = Inputs(prompts=padded, lengths=torch.tensor([len(p) for p in prompts]))
    variants = {
        "fastrl": Local(Sampling(Native(model, stop_ids), prompts)),
        "generate": Local(Sampling(generate, prompts)),
        # its helper threads compute too
        "vllm": peers.variant(
            "vllm", "vllm_functions:generate", inputs, clock="process", model=model_folder, samples=SAMPLES,
            tokens=TOKENS, greedy=GREEDY,
        ),
    }  # fmt: skip
    rows = bench(
        Case(
            f"engine {PROMPTS}x{SAMPLES}x{TOKENS}",
            variants,
            error=wrong_tokens(want),
            tolerance=0.0,
            peak=False,
        )
    )
    for row in rows:
        if "ms_median" in row:
            row["tokens_per_s"] = round(1e3 * PROMPTS * SAMPLES * TOKENS / row["ms_median"], 1)
