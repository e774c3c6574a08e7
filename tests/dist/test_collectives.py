"""Collectives: the identity on one process, exact on two gloo ranks with uneven rows."""

import sys
from pathlib import Path

import torch

from fastrl.dist import collectives

sys.path.insert(0, str(Path(__file__).parent))
from two_ranks import run_ranks


def test_without_a_process_group_everything_is_the_identity():
    tensors = {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    assert collectives.all_reduce_sum(tensors) is tensors
    rows = torch.arange(6).view(3, 2)
    assert collectives.all_gather_rows(rows) is rows
    assert collectives.any_rank(True) is True
    assert collectives.any_rank(False) is False
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.all_gather_object("x") == ["x"]
    assert collectives.broadcast_object(5) == 5
    collectives.barrier()


BODY = """
from fastrl.dist import collectives as c
out = {"rank": c.rank(), "size": c.world_size()}
big = 2**52 + rank  # exact in float64, not in float32
given = {"f32": torch.tensor([0.5, 1.5 + rank]), "f64": torch.tensor(1e-17 if rank else 0.0, dtype=torch.float64),
         "int": torch.tensor([[big - 2**51, -3 * rank]]), "bf16": torch.ones(2, dtype=torch.bfloat16)}
before = {k: v.clone() for k, v in given.items()}
summed = c.all_reduce_sum(given)
assert all(torch.equal(before[k], given[k]) for k in given), "arguments were changed"
assert all(summed[k].dtype == given[k].dtype and summed[k].shape == given[k].shape for k in given)
out["sum"] = {k: v.tolist() for k, v in summed.items()}
out["list"] = [v.item() for v in c.all_reduce_sum([torch.tensor(1), torch.tensor(rank)])]
out["nothing"] = c.all_reduce_sum({})
rows = torch.arange(3, dtype=torch.int64).view(3, 1) if rank == 0 else torch.full((1, 1), 7)
out["rows"] = c.all_gather_rows(rows).tolist()
out["none"] = c.all_gather_rows(torch.empty(0, dtype=torch.float32) if rank == 0 else torch.tensor([2.5])).tolist()
out["bool"] = c.all_gather_rows(torch.tensor([True, False]) if rank == 0 else torch.tensor([True])).tolist()
out["bool_dtype"] = str(c.all_gather_rows(torch.tensor([True])).dtype)
out["all_empty"] = list(c.all_gather_rows(torch.empty(0, 4)).shape)
out["any"] = [c.any_rank(rank == 1), c.any_rank(False), c.any_rank(True)]
out["objects"] = c.all_gather_object({"r": rank})
out["broadcast"] = c.broadcast_object(rank * 10 + 1)
return out
"""


def test_two_gloo_ranks():
    first, second = run_ranks(BODY)
    assert (first.pop("rank"), second.pop("rank")) == (0, 1)
    assert first == second, "every rank must see the same"
    assert first["size"] == 2
    assert first["sum"] == {
        "f32": [1.0, 4.0],
        "f64": 1e-17,
        "int": [[2**52 + 1, -3]],
        "bf16": [2.0, 2.0],
    }
    assert first["list"] == [2, 1]
    assert first["nothing"] == {}
    assert first["rows"] == [[0], [1], [2], [7]]
    assert first["none"] == [2.5]
    assert first["bool"] == [True, False, True]
    assert first["bool_dtype"] == "torch.bool"
    assert first["all_empty"] == [0, 4]
    assert first["any"] == [True, False, True]
    assert first["objects"] == [{"r": 0}, {"r": 1}]
    assert first["broadcast"] == 1
