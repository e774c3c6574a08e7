"""Addressed randomness: pure, distinct, uniform."""

import numpy as np

from fastrl.rollout.seeds import sample_seed, sample_seeds, uniforms

MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(x):
    x = (x ^ (x >> 30)) * FIRST & MASK
    x = (x ^ (x >> 27)) * SECOND & MASK
    return x ^ (x >> 31)


def by_hand(*counters):
    """The hash in Python's integers."""
    state = mixed(GOLDEN)
    for counter in counters:
        state = mixed((state * FIRST & MASK) ^ mixed((counter + GOLDEN) & MASK))
    return state


def test_uniforms_are_the_hash_of_seed_and_position():
    seeds = np.array([0, 5, 2**62 + 17], np.int64)
    positions = np.array([0, 3, 1000], np.int64)
    expected = [(by_hand(int(s), int(p)) >> 11) * 2.0**-53 for s, p in zip(seeds, positions)]
    assert uniforms(seeds, positions).tolist() == expected


def test_a_uniform_does_not_depend_on_its_neighbours():
    seeds = np.arange(50, dtype=np.int64) * 7919
    positions = np.arange(50, dtype=np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_uniforms_are_uniform_and_positions_uncorrelated():
    seeds = np.array([sample_seed(1, 2, g, i) for g in range(100) for i in range(20)], np.int64)
    u = np.stack([uniforms(seeds, np.full(len(seeds), p, np.int64)) for p in range(20)])  # [20, 2000]
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    chi_square = ((counts - u.size / 50) ** 2 / (u.size / 50)).sum()
    assert chi_square < 86  # 49 degrees of freedom: 0.1 % of fair draws are above
    correlation = np.corrcoef(u)[np.triu_indices(20, 1)]
    assert abs(correlation).max() < 4.5 / np.sqrt(2000)


def test_sample_seeds_differ_in_every_part_and_fit_63_bits():
    addresses = [(a, b, c, d) for a in range(4) for b in range(4) for c in range(10) for d in range(10)]
    seeds = [sample_seed(*address) for address in addresses]
    assert len(set(seeds)) == len(addresses)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seeds(3, 1, 4, 5) == [sample_seed(3, 1, 4, i) for i in range(5)]
    assert sample_seed(3, 1, 4, 1) == by_hand_seed(3, 1, 4, 1)


def by_hand_seed(seed, *rest):
    state = mixed((seed + GOLDEN) & MASK)
    for counter in rest:
        state = mixed((state * FIRST & MASK) ^ mixed((counter + GOLDEN) & MASK))
    return state & ((1 << 63) - 1)
