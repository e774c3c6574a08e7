"""Micro-batches split over 2 and 4 gloo ranks give the numbers of the unsplit path: fp64, losses, gradients, metrics."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fresh_ranks import run_fresh
from same_update import same_update

from fastrl.errors import ConfigError, ModelError
from fastrl.models.sequence_parallel import Heads, SequenceGroup, deal_heads

# 4 query heads, 2 key/value heads: at 4 ranks each key head is on two. gemma2 has windows and score caps.
BODY = """
import exchange_scenarios as s
out = {}
for family in ("llama", "gemma2", "gpt2"):
    out[family] = s.update(rank, size, family=family, sequence=size)
out["gspo"] = s.update(rank, size, loss="gspo", sequence=size)
out["full KL"] = s.update(rank, size, loss="gspo", sequence=size, full_kl=True)
out["checkpointing"] = s.update(rank, size, sequence=size, checkpointing=True)
out["values"] = s.values(rank, size, size)
if size == 4:
    out["two by two"] = s.update(rank, size, "optimal_token_baseline", num_updates=2, sequence=2)
    try:
        s.sequence_groups(3)
    except Exception as error:
        out["error"] = [type(error).__name__, str(error)]
else:
    out["two by two"] = s.update(rank, size, "optimal_token_baseline", num_updates=2)
return out
"""


@pytest.fixture(scope="module")
def results():
    one, two, four = run_fresh(BODY, [1, 2, 4], imports="import exchange_scenarios")
    return {1: one, 2: two, 4: four}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gspo", "full KL", "checkpointing", "values"])
def test_equal_to_the_unsplit_path(results, size, name):
    one, ranks = results[1][0][name], [r[name] for r in results[size]]
    assert [r["sequences"] for r in ranks] == [one["sequences"]] * size, "all ranks hold all sequences"
    same_update(one, ranks)
    for metric in ("perf/unique_tokens", "perf/model_flops", "perf/microbatches"):
        if metric in one["metrics"]:
            assert ranks[0]["metrics"][metric] == one["metrics"][metric], "counted once"
    if name == "values":
        for rank in ranks:
            assert rank["bootstrap"] == {k: pytest.approx(v, rel=1e-9) for k, v in one["bootstrap"].items()}


def test_two_places_of_two_ranks(results):
    one, ranks = results[1][0]["two by two"], [r["two by two"] for r in results[4]]
    same_update(one, ranks)
    assert ranks[0]["groups"] == ranks[1]["groups"] and ranks[2]["groups"] == ranks[3]["groups"]
    assert not set(ranks[0]["groups"]) & set(ranks[2]["groups"])


def test_a_size_that_does_not_divide_the_ranks_is_refused(results):
    for rank in results[4]:
        kind, text = rank["error"]
        assert kind == ConfigError.__name__
        assert text.startswith("parallel.sequence = 3 does not divide the 4 ranks of this run")


def test_heads_by_hand():
    assert deal_heads(4, 2, 2) == [Heads(0, 2, (0,)), Heads(2, 4, (1,))]
    assert deal_heads(4, 2, 4) == [Heads(0, 1, (0,)), Heads(1, 2, (0,)), Heads(2, 3, (1,)), Heads(3, 4, (1,))]
    assert deal_heads(8, 4, 2) == [Heads(0, 4, (0, 1)), Heads(4, 8, (2, 3))]
    # 9 heads, 3 read each key head: 4 and 5 heads read theirs unequally often, so each gets a copy of its own
    assert deal_heads(9, 3, 2) == [Heads(0, 4, (0, 0, 0, 1)), Heads(4, 9, (1, 1, 2, 2, 2))]
    with pytest.raises(ModelError, match="parallel.sequence = 8: the model has 4 attention heads"):
        deal_heads(4, 2, 8)


def test_rows_are_dealt_like_cards():
    ranks = [SequenceGroup(None, r, 3) for r in range(3)]
    rows = torch.arange(8)
    assert [g.own(rows).tolist() for g in ranks] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [g.count(8, g.rank) for g in ranks] == [3, 3, 2]
    index = torch.tensor([7, 7, 2, 4])
    assert ranks[1].owned(index).tolist() == [True, True, False, True]
    assert [g.own(rows)[g.local(index[g.owned(index)])].tolist() for g in ranks] == [[], [7, 7, 4], [2]]
