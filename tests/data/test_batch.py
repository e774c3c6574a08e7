"""The ragged batch: indices by hand."""

import pytest
import torch

from fastrl.data.batch import RolloutBatch, cu_seqlens_of, ragged_index


@pytest.fixture
def batch():
    return RolloutBatch(
        prompt_ids=torch.tensor([10, 11, 20, 30, 31, 32]),
        prompt_cu_seqlens=torch.tensor([0, 2, 3, 6]),
        response_ids=torch.tensor([1, 2, 3, 4, 5, 6]),
        cu_seqlens=torch.tensor([0, 2, 3, 3, 6]),
        group_index=torch.tensor([0, 0, 1, 2]),
        group_id=torch.tensor([40, 40, 41, 42]),
        sample_id=torch.arange(4),
        finish_reason=torch.tensor([0, 1, 0, 1], dtype=torch.int8),
        policy_version=torch.zeros(4, dtype=torch.int64),
        response_mask=torch.ones(6, dtype=torch.bool),
        scores=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        components={"math": torch.tensor([0.0, 10.0, 20.0, 30.0])},
        advantages=torch.arange(6.0),
    )


def test_sizes(batch):
    assert (batch.num_sequences, batch.num_tokens, batch.num_groups) == (4, 6, 3)
    assert batch.lengths.tolist() == [2, 1, 0, 3]
    assert batch.prompt_lengths.tolist() == [2, 1, 3]
    assert batch.sequence_index.tolist() == [0, 0, 1, 3, 3, 3]


def test_select_follows_every_field(batch):
    part = batch.select(torch.tensor([3, 1, 2]))
    assert part.response_ids.tolist() == [4, 5, 6, 3]
    assert part.cu_seqlens.tolist() == [0, 3, 4, 4]
    assert part.group_index.tolist() == [2, 0, 1]
    assert part.prompt_ids.tolist() == [10, 11, 20, 30, 31, 32]
    assert part.scores.tolist() == [3.0, 1.0, 2.0]
    assert part.components["math"].tolist() == [30.0, 10.0, 20.0]
    assert part.advantages.tolist() == [3.0, 4.0, 5.0, 2.0]
    assert part.finish_reason.tolist() == [1, 1, 0]
    assert part.values is None


def test_select_leaves_unused_prompts_out(batch):
    part = batch.select(torch.tensor([3]))
    assert part.prompt_ids.tolist() == [30, 31, 32]
    assert part.prompt_cu_seqlens.tolist() == [0, 3]
    assert part.group_index.tolist() == [0]
    assert part.group_id.tolist() == [42]


def test_a_missing_field_says_so(batch):
    assert batch.need("scores") is batch.scores
    with pytest.raises(AttributeError, match=r"batch\.ref_log_prob has not been computed"):
        batch.need("ref_log_prob")
    assert batch.with_(ref_log_prob=batch.advantages).need("ref_log_prob") is batch.advantages


def test_indices():
    assert cu_seqlens_of(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert ragged_index(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 1, 0])).tolist() == [2, 3, 4, 0, 1]
    assert ragged_index(torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64)).tolist() == []
