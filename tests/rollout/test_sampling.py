"""The sampler against exact probabilities worked out in NumPy."""

import numpy as np
import pytest
import torch

from fastrl.rollout.engine import SamplingParams
from fastrl.rollout.sampling import draw
from fastrl.rollout.seeds import uniforms


def exact(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution in float64, by sorting: temperature, top_k, top_p, min_p, renormalised after each."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    if min_p:
        p[p < min_p * p.max()] = 0
        p /= p.sum()
    return p


def draws(logits, count, params, *, temperature=None, dtype=torch.float32):
    """`count` samples from one row."""
    t = params.temperature if temperature is None else temperature
    u = uniforms(np.arange(count, dtype=np.int64), np.full(count, 3, np.int64))
    rows = np.zeros(count, np.int64)
    return draw(torch.tensor(np.array([logits]), dtype=dtype), rows, np.full(count, t), u, params)


CASES = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 9, "top_p": 0.6, "temperature": 1.3},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    "top_k 1": {"top_k": 1},
    "tiny top_p": {"top_p": 1e-6},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_frequencies_follow_the_exact_distribution(options):
    logits = np.random.default_rng(0).normal(size=23) * 1.5
    p = exact(logits, **options)
    count = 40_000
    tokens, log_probs = draws(logits, count, SamplingParams(**options))
    observed = np.bincount(tokens, minlength=23)
    assert observed[p == 0].sum() == 0
    kept = p > 0
    chi_square = ((observed[kept] - count * p[kept]) ** 2 / (count * p[kept])).sum()
    degrees = kept.sum() - 1
    assert chi_square < degrees + 4.5 * np.sqrt(2 * max(degrees, 1)) + 3
    np.testing.assert_allclose(log_probs, np.log(p[tokens]), atol=2e-6)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 7, 16, 97, 1000])
def test_tokens_are_the_inverse_of_the_cumulative_sum(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=vocabulary) * 3
    u = np.concatenate([rng.random(500), [0.0, 1 - 2**-53]])
    tokens, _ = draw(torch.tensor(logits[None]), np.zeros(len(u), np.int64), np.ones(len(u)), u, SamplingParams())
    expected = np.searchsorted(np.cumsum(exact(logits)), u, side="right")
    assert tokens.tolist() == np.minimum(expected, vocabulary - 1).tolist()


def test_tokens_without_mass_are_never_drawn():
    logits = np.full(50, -np.inf)
    logits[[7, 20, 33]] = 0.0
    u = np.array([0.0, 1e-300, 0.3333, 0.5, 0.99999999, 1 - 2**-53])
    for dtype in (torch.float32, torch.float64):
        tokens, log_probs = draw(
            torch.tensor(logits[None], dtype=dtype), np.zeros(6, np.int64), np.ones(6), u, SamplingParams()
        )
        assert tokens.tolist() == [7, 7, 7, 20, 33, 33]
        np.testing.assert_allclose(log_probs, np.log(1 / 3), atol=1e-6)


def test_rounding_does_not_lead_into_the_empty_tail_of_a_block():
    """Sums of blocks in float32 may exceed the float64 sum of their tokens; the last token with mass is taken then."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 1000))
    logits[:, 700:] = -np.inf
    u = np.full(300, 1 - 2**-53)
    rows = torch.tensor(logits, dtype=torch.float32)
    tokens, log_probs = draw(rows, np.arange(300), np.ones(300), u, SamplingParams())
    assert np.isfinite(log_probs).all()
    assert set(tokens.tolist()) <= {698, 699}


def test_greedy_takes_the_first_of_equals_with_the_plain_log_prob():
    logits = np.array([0.0, 2.0, 1.0, 2.0])
    tokens, log_probs = draws(logits, 2, SamplingParams(temperature=0.0, top_k=2))
    assert tokens.tolist() == [1, 1]
    np.testing.assert_allclose(log_probs, np.log(exact(logits)[1]), atol=1e-6)


def test_rows_and_temperatures_may_mix():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3, 40)) * 2
    rows = np.array([2, 0, 1, 0, 2, 0])
    temperatures = np.array([1.0, 0.0, 0.5, 1.0, 0.0, 0.5])
    u = rng.random(6)
    tokens, log_probs = draw(torch.tensor(logits), rows, temperatures, u, SamplingParams())
    for i in range(6):
        if temperatures[i] == 0:
            assert tokens[i] == logits[rows[i]].argmax()
            expected = exact(logits[rows[i]])
        else:
            expected = exact(logits[rows[i]], temperature=temperatures[i])
            assert tokens[i] == np.searchsorted(np.cumsum(expected), u[i], side="right")
        np.testing.assert_allclose(log_probs[i], np.log(expected[tokens[i]]), atol=1e-12)


def test_top_p_of_a_flat_distribution_looks_at_as_many_tokens_as_it_needs():
    logits = np.linspace(0, 1, 2000)
    p = exact(logits, top_p=0.5)
    assert 300 < (p > 0).sum() < 1900
    tokens, log_probs = draws(logits, 3000, SamplingParams(top_p=0.5), dtype=torch.float64)
    assert (p[tokens] > 0).all()
    np.testing.assert_allclose(log_probs, np.log(p[tokens]), atol=1e-9)
    assert tokens.min() < np.flatnonzero(p)[0] + 10


def test_ties_at_a_threshold_stay():
    tokens, log_probs = draws(np.array([1.0, 3.0, 1.0, 1.0, 0.0]), 400, SamplingParams(top_k=2))
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(log_probs[tokens == 1], 3 - np.log(np.exp(3) + 3 * np.e), atol=1e-6)
