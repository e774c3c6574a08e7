"""The ops of the adapter that come with no case file: one hand-worked example each."""

import math

import adapter
import numpy as np
import pytest
import torch

ONE = {"token_loss": [[1.0, 3.0], [5.0, 0.0]], "mask": [[1, 1], [1, 0]]}


def test_aggregation_over_layouts_and_packed():
    layouts = [[[[0, 1]]], [[[0], [1]]], [[[0]], [[1]]]]
    out = adapter.run_case("aggregate_loss_invariance", ONE | {"mode": "seq_mean_token_mean", "layouts": layouts})
    assert out["losses"] == pytest.approx([3.5] * 3) and out["invariant"]
    packed = {"token_loss": [1.0, 3.0, 5.0], "mask": [1, 1, 1], "segments": [0, 0, 1], "mode": "seq_mean_token_mean"}
    out = adapter.run_case("aggregate_loss_packed", packed)
    assert out["loss"] == pytest.approx(3.5) and out["token_weight"] == pytest.approx([0.25, 0.25, 0.5])


def test_whitening():
    values = [[1.0, 2.0], [3.0, 4.0, 5.0]]
    out = adapter.run_case("whiten_sharded", {"values": values})["out"]
    want = (np.arange(1, 6) - 3) / math.sqrt(2.5)
    assert np.concatenate(out) == pytest.approx(want, abs=1e-5)
    rows = adapter.run_case(
        "row_normalize", {"values": [[1, 2, 9], [4, 4, 4]], "mask": [[1, 1, 0], [1, 1, 1]], "ddof": 0}
    )
    assert rows["out"][0] == pytest.approx([-1, 1, 0], abs=1e-5) and rows["out"][1] == pytest.approx([0, 0, 0])


def test_gae_variants():
    base = {"values": [0.5, 0.6, 0.7], "mask": [1, 1, 1], "gamma": 1.0, "lam": 0.95}
    out = adapter.run_case("gae_outcome", base | {"score": 1.0})
    assert out["advantages"] == pytest.approx([0.46575, 0.385, 0.3])
    batch = {
        "rewards": [[0.0, 1.0], [0.0, 0.0]], "values": [[0.5, 0.5], [0.5, 0.5]], "truncated": [False, True],
        "bootstrap_values": [9.0, 2.0], "gamma": 1.0, "lam": 1.0,
    }  # fmt: skip
    out = adapter.run_case("gae_batch", batch)
    assert out["returns"] == [[1.0, 1.0], [2.0, 2.0]]  # only the truncated row continues with its bootstrap value
    generated = {"T": 3, "rewards": "t == 2", "values": "0.5 + 0.1 * t", "gamma": 1.0, "lam": 0.95, "check": [0, 2]}
    assert adapter.run_case("gae_formula", generated)["advantages"] == pytest.approx([0.46575, 0.3])
    many = adapter.run_case("gae_formula_lengths", generated | {"lengths": [3, 5]})
    assert many["advantages"][0] == pytest.approx([0.46575, 0.3]) and len(many["advantages"]) == 2


def test_corrections():
    log_weight = np.log([[1.2, 1.0], [4.0, 4.0]]).tolist()
    out = adapter.run_case("seq_mask_tis_weights", {"log_weight": log_weight, "low": 0.5, "high": 2.0, "cap": 1.1})
    assert np.array(out["weights"]) == pytest.approx(np.array([[1.1, 1.0], [0.0, 0.0]]))
    assert out["keep"] == [True, False]


def test_value_loss():
    out = adapter.run_case(
        "value_loss", {"values": [1.0, 0.0], "old_values": [0.0, 0.0], "returns": [1.0, 1.0], "clip": 0.5}
    )
    assert out["token_loss"] == [0.125, 0.5] and out["grad_values"] == [0.0, -1.0]


def test_kl_variants():
    out = adapter.run_case("kl_expectation", {"policy_logits": [1.0, 0.0, -1.0], "ref_logits": [0.0, 0.0, 0.0]})
    p = np.exp([1.0, 0.0, -1.0]) / np.exp([1.0, 0.0, -1.0]).sum()
    kl = float((p * np.log(3 * p)).sum())
    assert [out["k1"], out["k3"], out["kl"]] == pytest.approx([kl] * 3)
    exact = p * (np.log(3 * p) - kl)
    assert out["grad_kl"] == pytest.approx(exact) and out["grad_k2"] == pytest.approx(exact)  # k2 has the KL's gradient
    assert out["grad_k1"] == pytest.approx([0.0] * 3)
    assert out["grad_k3"] == pytest.approx(p - 1 / 3)  # and k3 the forward KL's
    out = adapter.run_case("kl_importance_corrected", {"logp": [-1.0], "old_logp": [-1.5], "ref_logp": [-1.0]})
    assert out["value"] == pytest.approx([0.0])
    updates = {"init": 0.1, "target": 0.1, "horizon": 10, "updates": [{"kl": 0.2, "n": 1}, {"kl": 0.05, "n": 1}]}
    assert adapter.run_case("adaptive_kl", updates)["values"] == pytest.approx([0.102, 0.102 * 0.98])


def test_logit_formulas():
    out = adapter.run_case("logprob_entropy_formula", {"V": [3, 5], "logits": "0.0 * j", "label": 1})
    assert out["logp"] == pytest.approx([-math.log(3), -math.log(5)])
    assert out["entropy"] == pytest.approx([math.log(3), math.log(5)])
    rows = {"N": 20, "V": 11, "logits": "((j*31 + (r mod 8)*11) mod 97) * 0.0625", "label": 3, "check_rows": [0, 8, 19]}
    out = adapter.run_case("logprob_entropy_rows", rows)
    z = torch.tensor([((j * 31 + 3 * 11) % 97) * 0.0625 for j in range(11)]).double()
    assert out["logp_by_r_mod_8"][3] == pytest.approx(float(torch.log_softmax(z, 0)[3]), abs=1e-5)


def test_samples_and_prompts():
    assert adapter.run_case("vocab_guard", {"vocab_size": 10, "samples": [[1, 9], [10], [3, -1]]})["trainable"] == [
        True, False, False,
    ]  # fmt: skip
    out = adapter.run_case("overlong_filter", {"mask": [[1, 1, 1], [1, 0, 0]], "truncated": [True, False]})
    assert out["mask"] == [[0, 0, 0], [1, 0, 0]] and out["lengths"] == [3, 1] and out["truncated_fraction"] == 0.5
    penalty = {"mask": [[1] * 4, [1, 1, 1, 0]], "max_len": 4, "buffer": 2}
    assert adapter.run_case("overlong_penalty_from_mask", penalty)["penalty"] == [-1.0, -0.5]
    assert adapter.run_case("overlong_penalty", {"lengths": [9], "buffer": 2, "enabled": False})["penalty"] == [0.0]
    assert adapter.run_case("generate_pairs", {"prompts": ["a", "b"], "n": 2})["prompts"] == ["a", "a", "b", "b"]


def test_gradients_are_summed_before_the_clip():
    out = adapter.run_case("grad_clip_accumulated", {"micro_grads": [[3.0, 0.0], [0.0, 4.0]], "max_norm": 1.0})
    assert out["norm"] == pytest.approx(5.0) and out["clipped"] == pytest.approx([0.6, 0.8], abs=1e-5)


def test_metrics_without_a_value_are_absent():
    inputs = {"values": ["NaN", "NaN"], "weights": [1, 1], "kind": "nan_mean"}
    value = adapter.run_case("reduce_metric", inputs).get("value", math.nan)
    assert value is None or math.isnan(value)


def test_token_weights_of_a_sequence_loss_become_one_weight_each():
    """Two sequences of two tokens, sequence losses [1, 10], token weights [[1, 2], [3, 4]]: never a 2 x 2 loss."""
    from fastrl.algorithms import get_policy_loss
    from fastrl.kernels import aggregate

    losses, weights = torch.tensor([1.0, 1.0, 10.0, 10.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    data = {
        "log_prob": torch.zeros(4), "old_log_prob": torch.zeros(4), "advantages": -losses,
        "loss_mask": torch.ones(4, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 2, 4]), "rollout_weight": weights,
    }  # fmt: skip
    loss = get_policy_loss("gmpo").call(data).loss
    got = aggregate(loss, loss_agg_mode="seq-mean-token-mean", cu_seqlens=data["cu_seqlens"])
    assert float(got) == pytest.approx((1 * math.sqrt(2) + 10 * math.sqrt(12)) / 2)


def test_kl_leaves_rejected_tokens_out():
    """Log ratios [0.1, 6.0], the second token rejected: the squared log ratio averages 0.01, not 18.005."""
    from fastrl.algorithms import get_correction
    from fastrl.kernels import aggregate, kl_divergence

    data = {
        "old_log_prob": torch.tensor([-1.0, -1.0]), "rollout_log_prob": torch.tensor([-1.0, -7.0]),
        "response_mask": torch.ones(2, dtype=torch.bool),
    }  # fmt: skip
    rule = {"statistic": "k1", "level": "token", "lower": 0.5, "upper": 2.0}
    keep = get_correction("none").call(data | {"cu_seqlens": torch.tensor([0, 2])}, {"rejection": [rule]}).keep
    kl = kl_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -7.0]), kind="k2")
    assert 2 * float(aggregate(kl, keep)) == pytest.approx(0.01, abs=1e-6)
    assert 2 * float(aggregate(kl)) == pytest.approx(18.005, abs=1e-4)
