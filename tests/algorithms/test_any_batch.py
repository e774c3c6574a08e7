"""Batches that hypothesis thinks of: empty and long responses, groups of any size, ties, all invalid, all masked."""

import algorithm_oracles as oracle
import numpy as np
import ragged_data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_estimators import SEQUENCE_CASES
from test_policy_losses import CASES

from fastrl.algorithms import get_advantage, get_correction, get_policy_loss
from fastrl.algorithms.aggregation import MODES
from fastrl.kernels import aggregate

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
# on both sides of what counts as no spread: a range of 1e-6 times the largest score, or of 1e-6
SCORES = st.sampled_from([0.0, 1.0, 1.0, 0.5, -2.0, 1e6, 1e6 + 0.5, 1e6 + 3, 1.0 + 5e-7, 1.0 + 3e-6, 3e-7])


@st.composite
def batches(draw):
    """A batch of up to nine responses of up to seven tokens."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=9))
    count = len(lengths)
    groups = draw(st.lists(st.integers(-2, 3), min_size=count, max_size=count))
    data = ragged_data.batch(draw(st.integers(0, 2**16)), lengths, groups)
    data["scores"] = torch.tensor(draw(st.lists(SCORES, min_size=count, max_size=count)), dtype=torch.float64)
    data["components"]["right"] = data["scores"].flip(0)
    data["valid"] = torch.tensor(draw(st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count)))
    if draw(st.booleans()):
        off = draw(st.integers(0, count - 1))  # one response without a token in the loss
        data["response_mask"][data["cu_seqlens"][off] : data["cu_seqlens"][off + 1]] = False
    kept = torch.cat([torch.zeros(1), data["response_mask"].double().cumsum(0)])[data["cu_seqlens"]].diff()
    return data | {"loss_mask": data["response_mask"], "lengths": kept.long()}


def close(got, want, tolerance=1e-9):
    np.testing.assert_allclose(np.asarray(got.detach().double()), want, rtol=tolerance, atol=tolerance)


@EXAMPLES
@given(batches())
def test_estimators_of_scores(data):
    d = ragged_data.numpy(data)
    for case, (options, want) in SEQUENCE_CASES.items():
        close(get_advantage(case.split("/")[0]).call(data, options), want(d))


@EXAMPLES
@given(batches(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_estimators_of_tokens(data, gamma, lam):
    d = ragged_data.numpy(data)
    rewards, mask, cu = d["token_level_rewards"], d["response_mask"], d["cu_seqlens"]
    got = get_advantage("gae").call(data, {"gamma": gamma, "gae_lambda": lam, "bootstrap_truncated": True})
    want = oracle.gae(rewards, d["values"], mask, cu, gamma=gamma, lam=lam, bootstrap=d["bootstrap_values"])
    for ours, theirs in zip(got, want):
        close(ours, theirs)
    close(
        get_advantage("reinforce_plus_plus").call(data, {"gamma": gamma})[0],
        oracle.reward_to_go(rewards, mask, cu, gamma),
    )
    data["rollout_weight"] = None
    got = get_advantage("optimal_token_baseline").call(data)
    arguments = (rewards, mask, cu, d["group_id"], d["old_log_prob"], d["sum_sq"], None, d["valid"])
    for ours, theirs in zip(got, oracle.optimal_token_baseline(*arguments)):
        close(ours, theirs)


@EXAMPLES
@given(batches())
def test_losses(data):
    data["rollout_weight"] = None
    data["selection"] = data["entropy"] > 0.8
    kept = data["loss_mask"].numpy()
    owner = torch.repeat_interleave(torch.arange(data["scores"].numel()), data["cu_seqlens"].diff())
    by_sequence = data | {"advantages": data["greedy_scores"][owner]}
    for case, (options, want) in CASES.items():
        name = case.split("/")[0]
        one = by_sequence if name in ("gspo", "luspo", "clip_sequence") else data
        d = ragged_data.numpy(one)
        if kept.any():
            got = get_policy_loss(name).call(one, options).loss.numpy()
            np.testing.assert_allclose(got[kept], want(d["log_prob"], d["log_prob"], d)[kept], rtol=1e-9, atol=1e-9)


LEVELS = [("token", "truncate"), ("token", "mask"), ("sequence", "truncate"), ("geometric", "mask")]


@EXAMPLES
@given(batches(), st.sampled_from(LEVELS), st.sampled_from(["k1", "k2", "k3"]), st.booleans())
def test_corrections(data, kind, statistic, unknown):
    if unknown and data["rollout_log_prob"].numel():
        data["rollout_log_prob"][0] = torch.nan
    d = ragged_data.numpy(data)
    given_data = {k: data[k] for k in ("old_log_prob", "rollout_log_prob", "response_mask", "cu_seqlens")}
    arguments = (d["old_log_prob"], d["rollout_log_prob"], d["response_mask"], d["cu_seqlens"])
    level, form = kind
    bounds = {"cap": 1.2, "low": 0.8, "high": 1.3}
    for where in ("token", "seq_sum", "seq_mean", "seq_max"):
        rule = {"statistic": statistic, "level": where, "upper": 1.1 if statistic == "k1" else 0.03}
        made = get_correction("token_truncate").call(
            given_data, {"level": level, "form": form, "rejection": [rule], **bounds}
        )
        close(made.weight, oracle.correction_weight(*arguments, level=level, form=form, **bounds))
        want = oracle.rejection(*arguments, **rule)
        assert (made.keep.numpy() == (want & d["response_mask"])).all()


@EXAMPLES
@given(batches(), st.sampled_from(MODES))
def test_aggregation(data, mode):
    d = ragged_data.numpy(data)
    x, mask, spans = d["advantages"], d["response_mask"], oracle.rows(d["cu_seqlens"])
    parts = [[x[t] for t in range(a, b) if mask[t]] for a, b in spans]
    alive = [p for p in parts if p]
    want = 0.0
    if alive:
        if mode == "prompt-mean":
            groups = {}
            for group, part in zip(d["group_id"], parts):
                groups.setdefault(int(group), []).extend(part)
            means = [sum(g) / len(g) for g in groups.values() if g]
            want = sum(means) / len(means)
        else:
            want = {
                "token-mean": lambda: sum(map(sum, alive)) / sum(map(len, alive)),
                "token-sum": lambda: sum(map(sum, alive)),
                "seq-mean-token-sum": lambda: sum(map(sum, alive)) / len(alive),
                "seq-mean-token-sum-norm": lambda: sum(map(sum, alive)) / len(alive) / 5.0,
                "seq-mean-token-mean": lambda: sum(sum(p) / len(p) for p in alive) / len(alive),
            }[mode]()
    got = aggregate(
        data["advantages"], data["response_mask"], loss_agg_mode=mode, cu_seqlens=data["cu_seqlens"],
        group_id=data["group_id"], loss_scale_factor=5.0,
    )  # fmt: skip
    close(got, want)
