"""Names, options, needs and a user's own functions."""

import inspect
from typing import Literal

import pytest
import torch

from fastrl.algorithms import (
    check_options,
    get_advantage,
    get_correction,
    get_kl,
    get_policy_loss,
    list_advantages,
    list_corrections,
    list_kls,
    list_policy_losses,
    register_advantage,
    register_policy_loss,
)
from fastrl.algorithms.options import check_value
from fastrl.algorithms.registry import REQUIRED
from fastrl.errors import ConfigError

ADVANTAGES = [
    "gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
    "opo", "gpg", "pass_at_k", "gdpo", "max_rl", "optimal_token_baseline", "normalize",
]  # fmt: skip
LOSSES = [
    "clip", "gspo", "gspo_token", "clip_sequence", "cispo", "sapo", "gmpo", "geo_mean", "clip_cov", "kl_cov",
    "dppo_tv", "dppo_kl", "gpg", "reinforce", "dro", "kimi", "topr", "vespo", "luspo", "decoupled", "ipo_mask",
    "cross_entropy", "positive_nll",
]  # fmt: skip
VOCABULARY = {
    "scores", "group_id", "valid", "lengths", "cu_seqlens", "response_mask", "loss_mask", "token_level_rewards",
    "values", "bootstrap_values", "old_log_prob", "sum_sq", "rollout_weight", "greedy_scores", "components", "log_prob",
    "advantages", "rollout_log_prob", "selection", "staleness", "running_baseline", "sample_id", "seed", "update",
    "reduce", "ref_log_prob", "logits", "ref_logits",
}  # fmt: skip


def test_every_name_of_the_catalogue_is_there():
    assert set(ADVANTAGES) <= set(list_advantages())
    assert set(LOSSES) <= set(list_policy_losses())
    assert {"none", "token_truncate", "token_mask", "sequence_truncate"} <= set(list_corrections())
    kinds = {"k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"}
    assert kinds | {f"{k}+" for k in kinds} | {"full"} == set(list_kls())


def everyone():
    for get, names in (
        (get_advantage, ADVANTAGES),
        (get_policy_loss, LOSSES),
        (get_correction, list_corrections()),
        (get_kl, list_kls()),
    ):
        yield from (get(name) for name in names)


@pytest.mark.parametrize("entry", list(everyone()), ids=lambda e: f"{e.kind}-{e.name}")
def test_entries_are_complete(entry):
    assert set(entry.data) <= VOCABULARY
    assert entry.summary.endswith((".", ":", "]"))
    assert entry.level in ("token", "sequence", "batch")
    for name, (annotation, default) in entry.options.items():
        assert annotation is not inspect.Parameter.empty
        if default is not REQUIRED:
            assert check_value(default, annotation) == default, name
    if not any(default is REQUIRED for _, default in entry.options.values()):
        assert check_options(entry, {}) == {}
    if entry.level == "batch":
        assert entry.select is not None and "selection" in entry.data
    if entry.kind == "policy_loss" and entry.level == "sequence":
        assert {"cu_seqlens", "loss_mask"} <= set(entry.data)


def test_options_carry_annotation_and_default():
    options = get_policy_loss("clip").options
    assert options["clip_low"] == (float, 0.2)
    assert options["dual_clip"] == (float | None, 3.0)
    assert get_advantage("gae").options["gae_lambda"] == (float, 1.0)
    assert get_advantage("dr_grpo").options["std_normalize"] == (bool, False)
    assert get_advantage("grpo").options["std_normalize"] == (bool, True)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigError, match=r"algorithm.advantage = 'grop' is not registered; did you mean grpo\?"):
        get_advantage("grop")
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss = 'clipp'.*did you mean clip"):
        get_policy_loss("clipp")
    with pytest.raises(ConfigError, match=r"known: .*token_truncate"):
        get_correction("zzz")


def test_all_wrong_options_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check_options(get_advantage("grpo"), {"std_normalise": True, "epsilon": "small", "ddof": 2, "baseline": "men"})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("algorithm.advantage_options.std_normalise: unknown option; did you mean std_normalize?")
    assert "epsilon = 'small': must be a number" in lines[1]
    assert "ddof = 2: must be one of 0, 1" in lines[2]
    assert "did you mean mean?" in lines[3]


def test_whiten_is_an_option_of_every_advantage_and_not_of_its_function():
    entry = get_advantage("grpo")
    options = check_options(entry, {"whiten": True})
    assert entry.whitens(options) and not entry.whitens({})
    data = {"scores": torch.tensor([1.0, 0.0]), "group_id": torch.tensor([0, 0])}
    assert entry.call(data, options).tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    gae = get_advantage("gae")
    assert gae.whitens({}) and not gae.whitens(check_options(gae, {"whiten": False}))
    with pytest.raises(ConfigError, match="whiten"):
        check_options(get_policy_loss("clip"), {"whiten": True})


def test_functions_by_path():
    loss = get_policy_loss("user_algorithms:squared_ratio")
    assert loss.name == "user_algorithms:squared_ratio" and loss.needs == {"rollout_log_prob"}
    assert "squared_ratio" in list_policy_losses()
    data = {"log_prob": torch.tensor([0.0]), "old_log_prob": torch.tensor([-1.0]), "advantages": torch.tensor([2.0])}
    assert float(loss.call(data, {"power": 3}).loss) == pytest.approx(-2 * 2.718281828**3, rel=1e-6)
    with pytest.raises(ConfigError, match="odd"):
        check_options(loss, {"power": 13})
    assert get_advantage("user_algorithms:centred").level == "sequence"
    assert get_advantage("user_algorithms:per_token").level == "token"
    assert get_policy_loss("user_algorithms:of_sequences").level == "sequence"
    centred = get_advantage("user_algorithms:centred").call({"scores": torch.tensor([1.0, 3.0])})
    assert centred.tolist() == [-1.0, 1.0]


def test_typed_options_of_a_users_function():
    entry = get_advantage("user_algorithms:clipped_scores")
    assert check_options(entry, {"limit": 2, "names": ["a"], "pair": [3, 4]}) == {
        "limit": 2.0, "names": ["a"], "pair": (3, 4),
    }  # fmt: skip
    for options, message in (
        ({"names": "a"}, "must be a list or null"),
        ({"pair": [1]}, "must be a list of 2"),
        ({"limit": True}, "must be a number"),
        ({"pair": [1, 2.5]}, "must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_options(entry, options)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("user_algorithms:nothing", "cannot be imported"),
        ("user_algorithms:NOT_A_FUNCTION", "not a function"),
        ("user_algorithms:picky", "register it with"),
        (":f", "cannot be imported"),
        ("user_algorithms:reads_fog", r"no stage makes 'ratios' \(positional parameters name data: log_prob, "),
        ("user_algorithms:of_nothing", "it takes no data"),
    ],
)
def test_paths_that_do_not_work(path, message):
    with pytest.raises(ConfigError, match=message):
        get_policy_loss(path)


def test_registering_twice():
    with pytest.raises(ConfigError, match=r"already registered by fastrl\.algorithms\.losses\.clip:clip"):

        @register_policy_loss("clip")
        def clip(log_prob):
            """Another one."""

    with pytest.raises(ConfigError, match="level = 'tokn'"):

        @register_advantage("new", level="tokn")
        def new(scores):
            """Wrong level."""

    assert "new" not in list_advantages()


def test_check_value():
    assert check_value(1, float) == 1.0 and isinstance(check_value(1, float), float)
    assert check_value(None, float | None) is None
    assert check_value({"a": 1}, dict[str, float]) == {"a": 1.0}
    assert check_value("b", Literal["a", "b"]) == "b"
    for value, annotation in ((True, int), (1.0, int), ("x", bool), (1, Literal[True]), ([1], dict), (None, float)):
        with pytest.raises(ValueError, match="must be"):
            check_value(value, annotation)
