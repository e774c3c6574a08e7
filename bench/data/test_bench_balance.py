"""Balancing sequences over ranks and packing them into micro-batches: time, and how good the result is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.harness.measure import Case, once_in_smoke
from bench.harness.variants import Inputs, Local
from bench.models.packed_forward import batch_of
from fastrl.data.balance import balance
from fastrl.data.packing import pack

SAMPLES = 8


def lengths_of(prompts: int, longest: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """[S] prompt and response lengths and groups; responses are log-normal, as trained models' are."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.integers(longest // 32, longest // 4, prompts), SAMPLES)
    response = np.clip(rng.lognormal(np.log(longest / 6), 0.9, prompts * SAMPLES), 1, longest).astype(np.int64)
    group = np.repeat(np.arange(prompts), SAMPLES)
    return {k: torch.from_numpy(v) for k, v in (("prompts", prompt), ("lengths", response), ("groups", group))}


def rows_per_rank(owner: torch.Tensor, d: dict[str, torch.Tensor], ranks: int, shared: bool) -> torch.Tensor:
    """Rows that each rank computes: responses, and a prompt per sequence or per group that it holds a part of."""
    rows = torch.zeros(ranks).index_add_(0, owner, d["lengths"].float())
    if not shared:
        return rows.index_add_(0, owner, d["prompts"].float())
    pairs, first = np.unique((owner * 10**6 + d["groups"]).numpy(), return_index=True)
    return rows.index_add_(0, torch.from_numpy(pairs // 10**6), d["prompts"][torch.from_numpy(first)].float())


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("prompts", [128, 512])
def test_balance(bench, peers, smoke, prompts, ranks):
    once_in_smoke(smoke, (prompts, ranks) == (128, 8))
    prompts, ranks = (8, 2) if smoke else (prompts, ranks)
    d = lengths_of(prompts, 4096)
    lists = [d[name].tolist() for name in ("prompts", "lengths", "groups")]
    count = prompts * SAMPLES

    def summary(name: str, got: list[torch.Tensor]) -> dict:
        rows = rows_per_rank(got[0], d, ranks, shared=name == "fastrl")
        return {
            "imbalance": round(float(rows.max() / rows.mean()) - 1, 4),
            "heaviest_rank_rows": int(rows.max()),
        }

    def error(got: list[torch.Tensor]) -> float:
        fits = got[0].shape == (count,) and int(got[0].min()) >= 0 and int(got[0].max()) < ranks
        return 0.0 if fits else float("inf")

    per_rank = -(-count // ranks)
    bench(
        Case(
            f"balance {count} sequences over {ranks} ranks",
            {
                "fastrl": Local(lambda: torch.tensor(balance(*lists, ranks).rank)),
                "verl": peers.variant("verl", "verl_functions:balance", Inputs(**d), ranks=ranks),
                "in order": Local(lambda: torch.arange(count) // per_rank),
            },
            error=error,
            tolerance=0.0,
            summary=summary,
            peak=False,
        )
    )


@pytest.mark.parametrize("prompts", [64])
def test_packing(bench, peers, smoke, prompts):
    prompts, budget = (4, 2048) if smoke else (prompts, 16384)
    d = lengths_of(prompts, budget // 8, seed=1)
    rng = np.random.default_rng(0)
    token = lambda n: rng.integers(0, 1000, n).tolist()  # noqa: E731
    groups = [[token(int(n)) for n in d["lengths"][g * SAMPLES : (g + 1) * SAMPLES]] for g in range(prompts)]
    batch = batch_of([token(int(d["prompts"][g * SAMPLES])) for g in range(prompts)], groups)
    total = d["prompts"] + d["lengths"]
    per_batch = budget // int(total.max())  # padded micro-batches of one shape

    def packed(share: bool):
        def run():
            micros = pack(batch, max_tokens=budget, share_prompts=share)
            owner = torch.empty(batch.num_sequences, dtype=torch.int64)
            for number, micro in enumerate(micros):
                owner[micro.sequences] = number
            return owner, torch.tensor([micro.num_rows for micro in micros])

        return run

    def rows_of(name: str, got: list[torch.Tensor]) -> torch.Tensor:
        if len(got) == 2:
            return got[1]
        if name == "padded":
            return torch.full((int(got[0].max()) + 1,), int(total.max()) * per_batch)
        return torch.zeros(int(got[0].max()) + 1).index_add_(0, got[0], total.float()).long()

    def summary(name: str, got: list[torch.Tensor]) -> dict:
        rows = rows_of(name, got)
        return {
            "micro_batches": len(rows),
            "rows": int(rows.sum()),
            "fill": round(float(rows.sum()) / len(rows) / budget, 3),
        }

    def error(got: list[torch.Tensor]) -> float:
        return 0.0 if got[0].shape == (batch.num_sequences,) and int(got[0].min()) == 0 else float("inf")

    bench(
        Case(
            f"packing {batch.num_sequences} sequences into {budget} rows",
            {
                "fastrl": Local(packed(True)),
                "fastrl, prompts repeated": Local(packed(False)),
                "verl": peers.variant("verl", "verl_functions:micro_batches", Inputs(**d), max_tokens=budget),
                "padded": Local(lambda: torch.arange(batch.num_sequences) // per_batch),
            },
            error=error,
            tolerance=0.0,
            summary=summary,
            peak=False,
        )
    )
