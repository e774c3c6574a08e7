"""The generation layouts and the cache against attention written out row by row in float64."""

import numpy as np
import pytest
import torch

from fastrl.rollout.decode import DecodeLayout
from fastrl.rollout.kv_cache import KVCache, similar_lengths
from fastrl.rollout.prefill import PackedPrompts, PrefillLayout

CPU = torch.device("cpu")
HEADS, KV_HEADS, KEY, VALUE, SCALING = 6, 2, 5, 3, 0.4


class Attention(torch.nn.Module):
    layer_idx = 0


def one_query(q, keys, values, *, window=None, softcap=None, sinks=None):
    """q [Hq, D] at the position of the last key; keys [K, Hkv, D], values [K, Hkv, Dv] -> [Hq, Dv]."""
    out = np.zeros((HEADS, VALUE))
    start = 0 if window is None else max(0, len(keys) - window)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[start:, group] @ q[head] * SCALING
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        extra = [] if sinks is None else [sinks[head]]
        weights = np.exp(np.concatenate([scores, extra]))
        out[head] = (weights / weights.sum())[: len(scores)] @ values[start:, group]
    return out


def test_packed_prompts_are_a_prefix_tree():
    packed = PackedPrompts([[5, 6, 7], [1, 2, 3, 4], [1, 2], [1, 2, 9], [5, 6, 8, 8]])
    # sorted: 1 2 | 1 2 3 4 | 1 2 9 | 5 6 7 | 5 6 8 8
    assert packed.tokens.tolist() == [1, 2, 3, 4, 9, 5, 6, 7, 8, 8]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 2, 3]
    assert [i.tolist() for i in packed.index] == [[5, 6, 7], [0, 1, 2, 3], [0, 1], [0, 1, 4], [5, 6, 8, 9]]
    assert packed.last.tolist() == [7, 3, 1, 4, 9]


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 100},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"window": 2, "softcap": 2.0, "sinks": True},
}


def keywords(options, sinks):
    return {
        "sliding_window": options.get("window"),
        "softcap": options.get("softcap"),
        "sinks": torch.tensor(sinks) if "sinks" in options else None,
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_prefill_and_decode_attend_to_the_whole_path(options):
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8], [9], [1, 2, 3, 4], [9] + [3] * 60]
    sinks = rng.normal(size=HEADS)
    reference = {**options, "sinks": sinks if "sinks" in options else None}
    packed = PackedPrompts(prompts)
    layout = PrefillLayout(packed, CPU)
    size = len(packed.tokens)
    q, k, v = (rng.normal(size=(size, h, d)) for h, d in ((HEADS, KEY), (KV_HEADS, KEY), (KV_HEADS, VALUE)))
    hf = [torch.tensor(x).transpose(0, 1)[None] for x in (q, k, v)]
    out = layout.attend(Attention(), *hf, scaling=SCALING, **keywords(options, sinks))[0].numpy()
    for path in packed.index:
        for i, row in enumerate(path):
            np.testing.assert_allclose(
                out[row], one_query(q[row], k[path[: i + 1]], v[path[: i + 1]], **reference), atol=1e-12
            )

    # Rows of several groups in several pools, entering at different times, parting and leaving.
    cache = KVCache()
    cache.add_prompts([layout.kv[0]], packed.index, [10, 11, 12, 13, 14])
    assert len(cache.pools) > 1
    decode = DecodeLayout(cache, CPU)
    history: list[list[tuple[np.ndarray, np.ndarray]]] = []
    steps = [
        ([-1, -1, -1], [10, 12, 14]),
        ([0, 1, 2, 0, 2, 2], [10, 12, 14, 10, 14, 14]),
        ([0, 1, 2, 3, 4, 5], [10, 12, 14, 10, 14, 14]),
        ([5, 1, 3, -1, -1], [14, 12, 10, 11, 13]),
        ([4, 1], [13, 12]),
    ]
    for source, groups in steps:
        history = [list(history[s]) if s >= 0 else [] for s in source]
        cache.set_rows(np.array(source), np.array(groups))
        cache.drop_prompts({10, 11, 12, 13, 14} - set(groups) if len(groups) == 2 else set())
        positions = decode.begin()
        assert positions.tolist() == [len(prompts[g - 10]) + len(h) for g, h in zip(groups, history)]
        rows = len(groups)
        q, k1, v1 = (rng.normal(size=(rows, h, d)) for h, d in ((HEADS, KEY), (KV_HEADS, KEY), (KV_HEADS, VALUE)))
        hf = [torch.tensor(x).transpose(0, 1)[None] for x in (q, k1, v1)]
        out = decode.attend(Attention(), *hf, scaling=SCALING, **keywords(options, sinks))[0].numpy()
        decode.end()
        for row, group in enumerate(groups):
            history[row].append((k1[row], v1[row]))
            path = packed.index[group - 10]
            keys = np.concatenate([k[path], [key for key, _ in history[row]]])
            values = np.concatenate([v[path], [value for _, value in history[row]]])
            np.testing.assert_allclose(out[row], one_query(q[row], keys, values, **reference), atol=1e-12)


def test_many_pools_are_merged():
    cache = KVCache()
    for group in range(7):
        cache.add_prompts([torch.randn(2, 1, 4, 2)], [np.arange(3 + group % 2)], [group])
        cache.merge_pools()
    assert len(cache.pools) < 5
    assert sorted(g for pool in cache.pools for g in pool.groups) == list(range(7))


def test_similar_lengths_bound_the_padding():
    lengths = [5, 500, 7, 30, 480, 9000, 33, 1]
    parts = similar_lengths(lengths)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert len(parts) == 3
    for part in parts:
        chosen = [lengths[i] for i in part]
        assert max(chosen) <= 1.33 * min(chosen) + 32
