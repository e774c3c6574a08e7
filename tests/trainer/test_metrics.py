"""Metrics: every statistic against values worked out by hand; two ranks give the numbers of one."""

import gc
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from fastrl.trainer.metrics import METRICS, PATTERNS, Metrics, describe, memory_gib, policy_stat, unknown_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from two_ranks import run_ranks


def test_token_weighted_mean():
    # Per-micro-batch means 1, 3, 2, 6 of 10, 10, 20, 20 tokens: (10 + 30 + 40 + 120)/60.
    metrics = Metrics(strict=True)
    for mean, tokens in zip([1.0, 3.0, 2.0, 6.0], [10, 10, 20, 20]):
        metrics.add("policy/loss", torch.tensor(mean * tokens), tokens)
    assert metrics.reduce()["policy/loss"] == pytest.approx(200 / 60)


def test_nan_leaves_the_mean_and_is_counted():
    metrics = Metrics(strict=True)
    for value in (0.2, math.nan, 0.4, math.nan, 0.9):
        metrics.add("reward/component/format/mean", value, 1)
    metrics.add_mean("reward/mean", torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([True, True, False]))
    metrics.add("policy/loss", torch.tensor(math.nan), torch.tensor(3))
    values = metrics.reduce()
    assert values["reward/component/format/mean"] == pytest.approx(0.5)
    assert values["reward/mean"] == 1.0
    assert "policy/loss" not in values, "a mean over nothing is left out"
    assert values["perf/nan_values"] == 4


def test_masked_statistics():
    metrics = Metrics(strict=True)
    values = torch.tensor([1.0, 5.0, math.inf, 2.0])
    mask = torch.tensor([True, True, False, True])
    metrics.add_mean("policy/entropy", values, mask)
    metrics.add_max("policy/ratio/max", values, mask)
    metrics.add_min("policy/ratio/min", values, mask)
    metrics.add_max("rollout/length/max", 7)
    metrics.add_max("rollout/length/max", torch.tensor(5))
    metrics.add_mean("kl/reference", values, torch.zeros(4, dtype=torch.bool))
    metrics.add_max("kl/reference/max", torch.empty(0))
    metrics.add_sum("rollout/tokens", torch.tensor(3))
    metrics.add_sum("rollout/tokens", 4)
    out = metrics.reduce()
    assert out["policy/entropy"] == pytest.approx(8 / 3)
    assert (out["policy/ratio/max"], out["policy/ratio/min"]) == (5.0, 1.0)
    assert out["rollout/length/max"] == 7
    assert out["rollout/tokens"] == 7
    assert "kl/reference" not in out
    assert "kl/reference/max" not in out
    assert set(metrics.reduce()) == {"perf/nan_values"}, "reduce starts afresh"


def test_moments_in_chunks_equal_the_whole():
    # 1, 2, 4, 9 + 1e6: mean 4 + 1e6, squared deviations 9 + 4 + 0 + 25 = 38, variance 38/3.
    metrics = Metrics(strict=True)
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64) + 1e6
    metrics.add_moments("reward", values[:1])
    metrics.add_moments("reward", values[1:], torch.tensor([True, True, True]))
    metrics.add_moments("reward", torch.empty(0))
    out = metrics.reduce()
    assert out["reward/mean"] == pytest.approx(1e6 + 4, rel=1e-15)
    assert out["reward/std"] == pytest.approx(math.sqrt(38 / 3), rel=1e-9)
    assert (out["reward/min"], out["reward/max"]) == (1e6 + 1, 1e6 + 9)


def test_moments_of_equal_values_have_no_spread_and_only_known_parts_are_shown():
    metrics = Metrics(strict=True)
    metrics.add_moments("policy/advantage", torch.full((7,), 0.1))
    metrics.add_moments("mismatch/prob_diff", torch.tensor([0.5]))
    out = metrics.reduce()
    assert out["policy/advantage/std"] == 0.0
    assert "mismatch/prob_diff/min" not in out
    assert "mismatch/prob_diff/std" not in out, "one value has no standard deviation"
    assert out["mismatch/prob_diff/max"] == 0.5


def test_effective_sample_size_correlation_and_explained_variance():
    metrics = Metrics(strict=True)
    metrics.add_ess("mismatch/ess", torch.tensor([1.0, 1.0]))
    metrics.add_ess("mismatch/ess", torch.tensor([2.0, 9.0]), torch.tensor([True, False]))
    # x = 1 2 3, y = 1 2 6: Sxx 2, Syy 14, Sxy 5.
    metrics.add_pearson("mismatch/pearson", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    metrics.add_pearson("mismatch/pearson", torch.tensor([3.0, math.nan]), torch.tensor([6.0, 1.0]))
    # target 1 2 3 (squares 2), error 0 0 1 (deviations 2/3): 1 - 1/3.
    metrics.add_explained_variance(
        "value/explained_variance",
        torch.tensor([1.0, 2.0, 3.0, 8.0]),
        torch.tensor([1.0, 2.0, 2.0, 0.0]),
        torch.tensor([True, True, True, False]),
    )
    out = metrics.reduce()
    assert out["mismatch/ess"] == pytest.approx(16 / (3 * 6))
    assert out["mismatch/pearson"] == pytest.approx(5 / math.sqrt(28))
    assert out["value/explained_variance"] == pytest.approx(2 / 3)


def test_statistics_without_spread_are_left_out():
    metrics = Metrics(strict=True)
    metrics.add_pearson("mismatch/pearson", torch.tensor([0.1] * 3), torch.tensor([0.2] * 3))
    metrics.add_explained_variance("value/explained_variance", torch.tensor([0.1] * 3), torch.rand(3))
    out = metrics.reduce()
    assert "value/explained_variance" not in out
    assert not math.isnan(out.get("mismatch/pearson", 0.0))


def test_timer_measures_and_names_the_phase():
    seen = []
    metrics = Metrics(strict=True, on_phase=seen.append)
    with metrics.timer("generate"):
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), metrics.timer("generate"):
        raise ZeroDivisionError
    out = metrics.reduce()
    assert 0.02 <= out["time/generate_s"] < 1.0
    assert seen == ["generate", "generate"]


def test_rates_follow_from_totals():
    metrics = Metrics(strict=True)
    metrics.add_sum("rollout/tokens", 600)
    metrics.add_seconds("time/step_s", 3.0)
    metrics.add_seconds("time/generate_s", 2.0)
    out = metrics.reduce()
    assert out["perf/tokens_per_s"] == 200
    assert out["perf/generate_tokens_per_s"] == 300


def test_unknown_names_are_refused_when_strict():
    metrics = Metrics(strict=True)
    for call in (lambda: metrics.add_sum("policy/lose", 1), lambda: metrics.add_moments("reword", torch.ones(2))):
        with pytest.raises(KeyError, match="unknown metric"):
            call()
    metrics.add("reward/component/my_fn/mean", 1.0, 1)
    metrics.set("val/gsm8k/pass@4", 0.5)
    metrics.add_mean("policy/stat/my_stat", torch.ones(1))
    Metrics().add_sum("policy/lose", 1)
    assert unknown_metrics(["policy/lose", "reward/mean", "val/gsm8k/mean", "time/step_s"]) == ["policy/lose"]
    assert policy_stat("clip_fraction/high") == "policy/clip_fraction/high"
    assert policy_stat("my_stat") == "policy/stat/my_stat"


def test_one_name_has_one_meaning():
    metrics = Metrics()
    metrics.add_sum("rollout/tokens", 1)
    with pytest.raises(ValueError, match=r"rollout/tokens.*sum.*mean"):
        metrics.add("rollout/tokens", 1.0, 1)


def test_every_metric_says_unit_and_reduction():
    phases = {name.split("/")[0] for name in METRICS}
    assert phases == set("reward rollout policy value kl mismatch optim perf time memory data val".split())  # noqa: SIM905
    how = r"; (mean|sum|maximum|minimum|standard deviation|value|over|tokens over|responses over|samples over)"
    for name, text in {**METRICS, **PATTERNS}.items():
        assert name.split("/")[0] in phases
        assert re.search(how, text), f"{name}: {text}"
        if name.startswith("time/"):
            assert "seconds" in text
    assert describe("reward/component/x/mean") == PATTERNS["reward/component/<name>/mean"]
    with pytest.raises(KeyError):
        describe("nothing/like/it")


def test_memory_is_plausible():
    found = memory_gib()
    assert 0.05 < found["rss"] <= found["peak_rss"] * 1.05 < 64


def test_no_graph_is_kept():
    metrics = Metrics()
    x = torch.ones(4, requires_grad=True)
    counts = []
    for step in range(1, 31):
        y = x * step
        metrics.add_mean("policy/loss", y)
        metrics.add("policy/total_loss", y.sum(), 4)
        metrics.add_max("policy/ratio/max", y)
        metrics.add_moments("policy/advantage", y)
        del y
        if step in (10, 30):
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[0] == counts[1]
    assert all(
        not s.requires_grad for _, slots in metrics._slots.values() for s in slots if isinstance(s, torch.Tensor)
    )


RANKS = """
from fastrl.trainer.metrics import Metrics
import math
m = Metrics(strict=True)
out = []
for step in range(2):
    x = torch.tensor([1.0, 2.0, 4.0, 9.0, 5.0])
    mine = x[:4] if rank == 0 else x[4:]
    m.add_mean("policy/entropy", mine)
    m.add_moments("reward", mine)
    m.add_sum("rollout/tokens", mine.numel())
    m.add_max("policy/ratio/max", mine)
    m.add_min("policy/ratio/min", mine)
    m.add_ess("mismatch/ess", mine)
    m.add_seconds("time/step_s", 1.0 + rank)
    m.set("optim/lr", 0.5)
    if rank == 1:
        m.add("val/mean", 3.0, 2)       # a name that only one rank has
        m.add("policy/loss", math.nan, 1)
    if step == 1 and rank == 0:
        m.set("data/epoch", 2)
    calls = []
    real = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *a, **k: (calls.append(1), real(*a, **k))
    values = m.reduce()
    torch.distributed.all_gather = real
    out.append([values, len(calls)])
m.add_sum("rollout/tokens", 1)
calls = []
torch.distributed.all_gather = lambda *a, **k: (calls.append(1), real(*a, **k))
out.append([m.reduce(), len(calls)])
torch.distributed.all_gather = real
return out
"""


def test_two_ranks_give_the_numbers_of_one():
    first, second = run_ranks(RANKS)
    assert first == second
    values, _ = first[0]
    # 1 2 4 9 5: mean 4.2, squared deviations 10.24 + 4.84 + 0.04 + 23.04 + 0.64 = 38.8.
    assert values["policy/entropy"] == pytest.approx(4.2)
    assert values["reward/mean"] == pytest.approx(4.2)
    assert values["reward/std"] == pytest.approx(math.sqrt(38.8 / 4))
    assert (values["reward/min"], values["reward/max"]) == (1, 9)
    assert (values["policy/ratio/min"], values["policy/ratio/max"]) == (1, 9)
    assert values["rollout/tokens"] == 5
    assert values["mismatch/ess"] == pytest.approx(21 * 21 / (5 * 127))
    assert values["time/step_s"] == 2.0
    assert values["perf/tokens_per_s"] == 2.5
    assert values["optim/lr"] == 0.5
    assert values["val/mean"] == 1.5
    assert values["perf/nan_values"] == 1
    assert "policy/loss" not in values
    assert first[1][0]["data/epoch"] == 2
    assert first[2] == [{"perf/nan_values": 0.0, "rollout/tokens": 2.0}, 1], "known names: one collective"
