"""gae and discounted_returns against float64 loops."""

import kernel_oracles as oracle
import numpy as np
import pytest
import torch
from kernel_cases import LENGTHS, TRITON, close, cu, mask_of, normal, offsets_of, poisoned, seen

from fastrl.kernels import discounted_returns, gae

T = sum(LENGTHS)


@pytest.fixture(autouse=True, params=["auto"] if TRITON else ["auto", "reference"])
def implementation(request, monkeypatch):
    """On a CPU both the fast scan and the plain one."""
    if not TRITON:
        monkeypatch.setenv("FASTRL_KERNELS", request.param)


def case(seed, dtype=torch.float32, keep=0.7, lengths=LENGTHS):
    total = sum(lengths)
    mask = mask_of(total, seed, keep)
    return poisoned(normal(total, seed + 1), mask, dtype), poisoned(normal(total, seed + 2), mask, dtype), mask


@pytest.mark.parametrize(
    ("gamma", "lam", "keep"), [(1.0, 1.0, 0.7), (0.99, 0.95, 0.7), (0.9, 0.0, 0.5), (0.0, 0.9, 0.9), (0.97, 0.9, 1.0)]
)
def test_ragged_equals_the_loop(gamma, lam, keep):
    rewards, values, mask = case(3, keep=keep)
    got = gae(rewards, values, torch.from_numpy(mask), gamma=gamma, gae_lambda=lam, cu_seqlens=cu(LENGTHS))
    want = oracle.gae(seen(rewards), seen(values), mask, offsets_of(LENGTHS), gamma, lam)
    close(got[0], want[0])
    close(got[1], want[1])
    assert not got[0][~torch.from_numpy(mask)].any() and not got[1][~torch.from_numpy(mask)].any()


def test_lambda_and_bootstrap_per_sequence_with_int64_offsets():
    rewards, values, mask = case(5)
    lam, boot = np.linspace(0.2, 1.0, len(LENGTHS)), normal(len(LENGTHS), 9)
    got = gae(
        rewards,
        values,
        torch.from_numpy(mask).to(torch.int32),
        gamma=0.98,
        gae_lambda=torch.from_numpy(lam).float(),
        bootstrap_values=torch.from_numpy(boot).float(),
        cu_seqlens=cu(LENGTHS, torch.int64),
    )
    want = oracle.gae(seen(rewards), seen(values), mask, offsets_of(LENGTHS), 0.98, lam, boot)
    close(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.parametrize("columns", [1, 7, 65])
def test_padded_rows_strided_and_transposed(columns):
    rows = 3
    mask = mask_of(rows * columns, 11).reshape(rows, columns)
    mask[1] = False  # a fully masked row
    rewards, values = (
        normal(rows * columns, 12).reshape(rows, columns),
        normal(rows * columns, 13).reshape(rows, columns),
    )
    want = oracle.gae(rewards.ravel(), values.ravel(), mask.ravel(), offsets_of([columns] * rows), 0.95, 0.9)
    wide = torch.full((rows, columns + 5), float("nan"))
    wide[:, 2 : 2 + columns] = torch.from_numpy(rewards)
    transposed = torch.from_numpy(values).float().t().contiguous().t()
    got = gae(wide[:, 2 : 2 + columns], transposed, torch.from_numpy(mask), gamma=0.95, gae_lambda=0.9)
    close(got[0], want[0].reshape(rows, columns))
    close(got[1], want[1].reshape(rows, columns))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_float32(dtype):
    rewards, values, mask = case(21, dtype)
    got = gae(rewards, values, torch.from_numpy(mask), gamma=0.99, gae_lambda=0.95, cu_seqlens=cu(LENGTHS))
    want = oracle.gae(seen(rewards), seen(values), mask, offsets_of(LENGTHS), 0.99, 0.95)
    assert got[0].dtype == got[1].dtype == torch.float32
    close(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.skipif(TRITON, reason="float64 always takes the reference")
def test_float64_stays_float64_and_gradcheck():
    rewards, values, mask = case(31, torch.float64)
    got = gae(rewards, values, torch.from_numpy(mask), gamma=0.99, gae_lambda=0.95, cu_seqlens=cu(LENGTHS))
    want = oracle.gae(seen(rewards), seen(values), mask, offsets_of(LENGTHS), 0.99, 0.95)
    assert got[0].dtype == torch.float64
    close(got[0], want[0], torch.float64)
    close(got[1], want[1], torch.float64)
    from fastrl.kernels.gae.reference import gae_reference

    lengths = [3, 0, 4]
    r, v = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    boot = torch.randn(3, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([1, 1, 0, 1, 0, 1, 1])
    torch.autograd.gradcheck(lambda r, v, b: gae_reference(r, v, keep, b, None, cu(lengths), 0.9, 0.8), (r, v, boot))


def test_no_gradient_flows_and_hand_worked_values():
    # masked tool tokens in the middle: carries pass through; worked out by hand
    values = torch.tensor([0.2, 0.4, 9.0, 9.0, 0.6], requires_grad=True)
    advantages, returns = gae(
        torch.tensor([0.0, 0, 0, 0, 1]), values, torch.tensor([1, 1, 0, 0, 1]), gamma=0.9, gae_lambda=0.8,
        cu_seqlens=torch.tensor([0, 5]),
    )  # fmt: skip
    close(advantages, [0.46816, 0.428, 0, 0, 0.4])
    close(returns, [0.66816, 0.828, 0, 0, 1.0])
    assert not advantages.requires_grad


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_to_do(lengths):
    empty = torch.zeros(0)
    advantages, returns = gae(empty, empty, gamma=1.0, gae_lambda=1.0, cu_seqlens=cu(lengths))
    assert advantages.shape == returns.shape == (0,)
    assert discounted_returns(empty, gamma=1.0, cu_seqlens=cu(lengths)).shape == (0,)
    assert gae(torch.zeros(0, 4), torch.zeros(0, 4), gamma=1.0, gae_lambda=1.0)[0].shape == (0, 4)
    assert gae(torch.zeros(3, 0), torch.zeros(3, 0), gamma=1.0, gae_lambda=1.0)[0].shape == (3, 0)


def test_a_bad_value_stays_in_its_sequence():
    lengths = [4, 3, 5]
    rewards, values = torch.ones(12), torch.zeros(12)
    rewards[5] = float("nan")
    advantages, _ = gae(rewards, values, gamma=0.9, gae_lambda=0.9, cu_seqlens=cu(lengths))
    assert advantages.isnan().tolist() == [False] * 4 + [True, True, False] + [False] * 5
    returns = discounted_returns(rewards, gamma=0.9, cu_seqlens=cu(lengths))
    assert returns.isnan().tolist() == [False] * 4 + [True, True, False] + [False] * 5


@pytest.mark.skipif(TRITON, reason="the scan on a CPU")
@pytest.mark.parametrize("keep", [1.0, 0.8])
@pytest.mark.parametrize("lengths", [[4, 0, 16, 17, 1, 33, 250, 3], [9000] + [2, 5] * 40, [700, 0, 1300]])
def test_a_sequence_gets_the_same_bits_in_any_batch_and_layout(lengths, keep, monkeypatch):
    if max(lengths) < 9000:  # several groups of sequences; the others together are too uneven for rows of equal length
        monkeypatch.setattr("fastrl.kernels.scan_cpu.GROUP", 600)
    total, sequences = sum(lengths), len(lengths)
    mask = mask_of(total, 61, keep)
    rewards, values = (poisoned(normal(total, seed), mask) for seed in (62, 63))
    boot = normal(sequences, 64)
    trained, after = torch.from_numpy(mask), torch.from_numpy(boot).float()
    options = {"gamma": 0.99, "gae_lambda": 0.95}
    got = gae(rewards, values, trained, bootstrap_values=after, cu_seqlens=cu(lengths), **options)
    want = oracle.gae(seen(rewards), seen(values), mask, offsets_of(lengths), 0.99, 0.95, boot)
    for x, y in zip(got, want, strict=True):
        close(x, y)
    borders = offsets_of(lengths)
    for s in [i for i, n in enumerate(lengths) if n][:12]:
        part, n = slice(int(borders[s]), int(borders[s + 1])), lengths[s]
        mine = [x[part] for x in (rewards, values, trained)]
        alone = gae(*mine, bootstrap_values=after[s : s + 1], cu_seqlens=cu([n]), **options)
        beyond = [float("nan")] * 2 + [0] if s % 2 else [0] * 3
        padded = [torch.nn.functional.pad(x, (0, 5 + s), value=y)[None] for x, y in zip(mine, beyond, strict=True)]
        in_row = gae(*padded, bootstrap_values=after[s : s + 1], **options)
        for x, y, z in zip(got, alone, in_row, strict=True):
            assert torch.equal(x[part], y) and torch.equal(x[part], z[0, :n]) and not z[0, n:].any()


@pytest.mark.skipif(TRITON, reason="the scan on a CPU")
def test_no_value_finds_its_way_into_another_group(monkeypatch):
    monkeypatch.setattr("fastrl.kernels.scan_cpu.GROUP", 64)
    rewards = torch.from_numpy(normal(5 * 90, 65)).float().view(5, 90)
    rewards[3, 40] = float("inf")
    got, _ = gae(rewards, torch.zeros(5, 90), gamma=1.0, gae_lambda=0.9)
    assert got.isfinite().sum() == 5 * 90 - 41 and not got[3, :41].isfinite().any()


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns_equal_the_loop(gamma):
    mask = mask_of(T, 41)
    rewards = poisoned(normal(T, 42), mask)
    got = discounted_returns(rewards, torch.from_numpy(mask), gamma=gamma, cu_seqlens=cu(LENGTHS))
    close(got, oracle.discounted_returns(seen(rewards), mask, offsets_of(LENGTHS), gamma))
    padded = rewards[:246].reshape(3, 82)
    got = discounted_returns(padded, torch.from_numpy(mask[:246]).reshape(3, 82), gamma=gamma)
    want = oracle.discounted_returns(seen(rewards[:246]), mask[:246], offsets_of([82] * 3), gamma)
    close(got, want.reshape(3, 82))


@pytest.mark.parametrize(
    "total", [700 if TRITON else 20011, pytest.param(3000 if TRITON else 131072, marks=pytest.mark.slow)]
)
def test_a_long_row(total):
    # few rows, long: the split path; underflow of gamma^T must not matter
    rewards, values = normal(total, 51), normal(total, 52)
    mask = mask_of(total, 53, 0.8)
    got = gae(
        poisoned(rewards, mask)[None],
        poisoned(values, mask)[None],
        torch.from_numpy(mask)[None],
        gamma=0.9,
        gae_lambda=0.7,
    )
    want = oracle.gae(rewards, values, mask, [0, total], 0.9, 0.7)
    close(got[0][0], want[0])
    close(got[1][0], want[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, r"gamma = 1.5: a finite number in \[0, 1\]"),
        ({"gae_lambda": -0.1}, r"gae_lambda = -0.1"),
        ({"gae_lambda": torch.ones(3)}, r"gae_lambda has shape \[3\]: \[2\] is needed"),
        ({"cu_seqlens": None}, r"give \[T\] with cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, r"cu_seqlens\[2\] = 2 is below cu_seqlens\[1\]"),
        ({"cu_seqlens": torch.tensor([-1, 3, 5])}, r"cu_seqlens\[0\] = -1: offsets start at 0"),
        ({"cu_seqlens": torch.tensor([0, 3, 9])}, r"cu_seqlens\[-1\] = 9: it has to equal the number of tokens, 5"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens has dtype float32"),
        ({"values": torch.ones(4)}, r"values has shape \[4\]: \[5\] is needed"),
        ({"mask": torch.ones(6)}, r"mask has shape \[6\]"),
        ({"rewards": torch.ones(5, dtype=torch.int64)}, r"rewards has dtype int64"),
        ({"bootstrap_values": torch.ones(1)}, r"bootstrap_values has shape \[1\]"),
        ({"values": torch.ones(5, device="meta")}, r"values is on meta, the other tensors on cpu: move it there"),
        ({"values": [0.0] * 5}, r"values = \[0.0, 0.0, 0.0, 0.0, 0.0\]: a torch.Tensor is needed"),
        ({"mask": torch.ones(5).to_sparse()}, r"mask has layout torch.sparse_coo: a dense"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "rewards": torch.ones(5),
        "values": torch.ones(5),
        "mask": None,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "cu_seqlens": torch.tensor([0, 3, 5]),
    } | change
    with pytest.raises(ValueError, match=message):
        gae(**arguments)
