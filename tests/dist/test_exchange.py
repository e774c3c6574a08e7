"""The exchange on 2 and 4 gloo ranks: every field arrives once, and the update is the one-rank update."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from exchange_scenarios import global_batch, rows_of
from same_update import same_update
from fresh_ranks import run_fresh

from fastrl.data.batch import concatenate
from fastrl.dist.exchange import exchange, gather_table

BODY = """
import exchange_scenarios as s
out = {"alone": None if size > 1 else s.moved(rank, size, "scattered")}
if size > 1:
    for how in ("scattered", "all to the last", "home"):
        out[how] = s.moved(rank, size, how)
    try:
        s.exchange(s.share_of(s.global_batch(), rank, size), s.gather_table(s.share_of(s.global_batch(), rank, size)),
                   torch.full((15,), size))
    except ValueError as error:
        out["error"] = str(error)
    lacking = s.share_of(s.global_batch(), rank, size)
    lacking = lacking.with_(scores=None) if rank == 0 else lacking
    table = s.gather_table(lacking)
    try:
        s.exchange(lacking, table, table.owner)
    except ValueError as error:
        out["lacking"] = str(error)
out["grpo"] = s.update(rank, size, "grpo", num_updates=2)
out["otb"] = s.update(rank, size, "optimal_token_baseline")
out["full"] = s.update(rank, size, "grpo", full_kl=True)
return out
"""


@pytest.fixture(scope="module")
def results():
    one, two, four = run_fresh(BODY, [1, 2, 4], imports="import exchange_scenarios")
    return {1: one, 2: two, 4: four}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["scattered", "all to the last", "home"])
def test_every_field_arrives_once(results, size, how):
    wanted = rows_of(global_batch())
    seen = []
    for rank in range(size):
        part = results[size][rank][how]
        assert part["rows"] == [wanted[n] for n in sorted(part["wanted"])], "ordered by sample id, with all fields"
        seen += part["wanted"]
        assert part["prompts"] == len({r["group_id"][1] for r in part["rows"]}), "each prompt once"
        if how == "home":
            assert part["sent"] == 0
    assert sorted(seen) == list(range(len(wanted)))


def test_bytes_by_hand(results):
    """2 ranks, all to rank 1: rank 0 sends its three groups (12 sequences' lengths below) and nothing else."""
    batch = global_batch()
    mine = batch.group_index % 2 == 0
    tokens, sequences = int(batch.lengths[mine].sum()), int(mine.sum())
    prompts = 4 + 3 + 7
    per_token = 8 + 1 + 3 * 8  # id, mask, three log-prob-like float64
    # length, group index, group id, sample id, version, scores, greedy, component a: 8; b: 4; finish reason, valid: 1
    per_sequence = 8 * 8 + 4 + 2
    assert results[2][0]["all to the last"]["sent"] == (
        8 * prompts + 3 * 8 + per_token * tokens + per_sequence * sequences
    )
    assert results[2][1]["all to the last"]["sent"] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_bad_destinations_and_missing_fields_are_named(results, size):
    for rank in range(size):
        assert results[size][rank]["error"] == f"destinations {size}..{size} for {size} places"
        assert results[size][rank]["lacking"] == "rank 0 has no scores of type torch.float64, other ranks do"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["grpo", "otb", "full"])
def test_the_update_is_that_of_one_rank(results, size, name):
    (one,), ranks = [r[name] for r in results[1]], [r[name] for r in results[size]]
    assert sum(r["sequences"] for r in ranks) == one["sequences"]
    same_update(one, ranks)
    assert ranks[0]["metrics"]["perf/padding"] == 0
    assert ranks[0]["metrics"]["perf/head_rows"] == one["metrics"]["perf/head_rows"]


def test_whole_groups_and_work_are_spread(results):
    held = [r["otb"]["groups"] for r in results[2]]
    assert not set(held[0]) & set(held[1]), "no group of the optimal token baseline is on two ranks"
    metrics = results[2][0]["grpo"]["metrics"]
    assert metrics["perf/imbalance"] <= metrics["perf/imbalance/generated"]
    assert any(r["grpo"]["metrics"]["perf/exchange_bytes"] > 0 for r in results[2])
    assert results[4][0]["grpo"]["metrics"]["perf/empty_microbatches"] >= 0


def test_one_rank_keeps_its_batch():
    batch = global_batch()
    table = gather_table(batch)
    assert exchange(batch, table, torch.zeros_like(table.owner))[0] is batch
    with pytest.raises(ValueError, match="0 destinations for 15 sequences"):
        exchange(batch, table, torch.zeros(0, dtype=torch.int64))


def test_concatenated_shares_are_the_batch():
    batch = global_batch()
    first = batch.select((batch.group_index < 2).nonzero().squeeze(1))
    rest = batch.select((batch.group_index >= 2).nonzero().squeeze(1))
    assert rows_of(concatenate([first, rest])) == rows_of(batch)
