"""Scales of optimizer batches, by hand; head rows under a mask."""

import pytest
import torch

from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import pack
from fastrl.trainer.normalizers import keep_rows, optimizer_batch, sequence_sums


def batch_of(lengths, groups, prompts):
    """Sequences of the given lengths; `groups` maps each to a prompt, `prompts` are prompt lengths."""
    total, count = sum(lengths), len(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    prompt_cu = torch.tensor([0, *torch.tensor(prompts).cumsum(0).tolist()])
    return RolloutBatch(
        prompt_ids=torch.arange(sum(prompts)) % 7,
        prompt_cu_seqlens=prompt_cu,
        response_ids=torch.arange(total) % 5,
        cu_seqlens=cu,
        group_index=torch.tensor(groups),
        group_id=torch.tensor(groups) + 10,
        sample_id=torch.arange(count),
        finish_reason=torch.zeros(count, dtype=torch.int8),
        policy_version=torch.zeros(count, dtype=torch.int64),
        response_mask=torch.ones(total, dtype=torch.bool),
    )


BATCH = batch_of([3, 1, 2], [0, 0, 1], [2, 4])
MASK = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)  # lengths in the loss: 2, 1, 2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 5, 1 / 5, 0, 1 / 5, 1 / 5, 1 / 5]),
        ("token-sum", [1, 1, 0, 1, 1, 1]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 0, 1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 24, 1 / 24, 0, 1 / 24, 1 / 24, 1 / 24]),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 0, 1 / 3, 1 / 6, 1 / 6]),
        ("prompt-mean", [1 / 6, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 4]),
    ],
)
def test_scale_of_each_mode(mode, expected):
    members = optimizer_batch(BATCH, torch.arange(3), MASK, loss_agg_mode=mode, loss_scale_factor=8.0)
    assert members.scale.tolist() == pytest.approx(expected, abs=1e-7)
    assert members.num_tokens == 5


def test_only_members_count():
    members = optimizer_batch(BATCH, torch.tensor([1, 2]), MASK, loss_agg_mode="token-mean", loss_scale_factor=None)
    assert members.scale.tolist() == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_everything_masked_gives_zero_scale():
    nothing = torch.zeros(6, dtype=torch.bool)
    members = optimizer_batch(BATCH, torch.arange(3), nothing, loss_agg_mode="token-mean", loss_scale_factor=None)
    assert members.num_tokens == 0 and not members.scale.any()


def test_sums_per_sequence_with_an_empty_one():
    batch = batch_of([2, 0, 1], [0, 0, 0], [1])
    assert sequence_sums(torch.tensor([1.5, 2.0, -1.0]), batch).tolist() == [3.5, 0.0, -1.0]


def test_masked_rows_leave_the_head():
    micro = pack(BATCH, max_tokens=100)[0]
    kept = keep_rows(micro, MASK)
    assert sorted(kept.token_index.tolist()) == [0, 1, 3, 4, 5]
    before = {t: int(micro.position_ids[r]) for t, r in zip(micro.token_index.tolist(), micro.head_index.tolist())}
    assert kept.position_ids[kept.head_index].tolist() == [before[t] for t in kept.token_index.tolist()]
    assert keep_rows(micro, torch.ones(6, dtype=torch.bool)) is micro
    assert keep_rows(micro, torch.zeros(6, dtype=torch.bool)) is None
