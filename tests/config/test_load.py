"""Composing, positions, number formats, and text that loads equal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl.config import Config, dump_config, load_config
from fastrl.config.yaml_source import CoreLoader, parse_value, read_document, to_yaml


@pytest.fixture
def load(tmp_path):
    def run(*texts: str, overrides: tuple[str, ...] = (), **options):
        paths = []
        for index, text in enumerate(texts):
            path = tmp_path / f"{index}.yaml"
            path.write_text(text, encoding="utf-8")
            paths.append(path)
        return load_config(paths, overrides, **{"cross_check": False, **options})

    return run


def test_files_compose_left_to_right_and_overrides_win(load):
    loaded = load(
        "optim: {lr: 1e-6, weight_decay: 0.1}\nrollout: {stop: [a, b]}\n",
        "optim: {lr: 2e-6}\nrollout: {stop: [c]}\n",
        overrides=("optim.eps=1e-7", "optim.lr=3e-6", "optim.lr=4e-6"),
    )
    optim = loaded.config.optim
    assert (optim.lr, optim.weight_decay, optim.eps, optim.max_grad_norm) == (4e-6, 0.1, 1e-7, 1.0)
    assert loaded.config.rollout.stop == ["c"]


def test_option_mappings_merge_and_an_empty_one_clears(load):
    first = "data:\n  train_options: {max_value: 9, steps: {low: 1, high: 2}}\n"
    assert load(first, "data: {train_options: {steps: {high: 3}}}").config.data.train_options == {
        "max_value": 9,
        "steps": {"low": 1, "high": 3},
    }
    assert load(first, "data: {train_options: {}}").config.data.train_options == {}
    cleared = load(first, overrides=("data.train_options={}", "data.train_options.new=[1, 2]"))
    assert cleared.config.data.train_options == {"new": [1, 2]}
    assert load(first, "data:\n").config.data.train_options["max_value"] == 9, "an empty section changes nothing"


def test_third_level_overrides(load):
    loaded = load(overrides=("algorithm.advantage_options.std_normalize=false", "algorithm.advantage_options.ddof=0"))
    assert loaded.config.algorithm.advantage_options == {"std_normalize": False, "ddof": 0}


def test_positions_of_keys_and_values(load, tmp_path):
    loaded = load("optim:\n  lr:   1e-6\n  eps: 1e-7\n", "\noptim: {lr: 2e-6}\n", overrides=("optim.eps=1e-6",))
    assert loaded.source("optim.lr") == f"{tmp_path}/1.yaml:2:13"
    assert str(loaded.spots["optim", "lr"].key) == f"{tmp_path}/1.yaml:2:9"
    assert loaded.source("optim.eps") == "command line"
    assert loaded.source("run.seed") == "default"
    assert loaded.is_set("optim.lr")
    assert not loaded.is_set("run.seed")


def test_a_replaced_list_leaves_no_positions_behind(load):
    loaded = load("rollout:\n  stop: [a, b]\n", "rollout: {stop: [c]}\n", overrides=("data.train_options.x=[1]",))
    assert {path for path in loaded.spots if path[:2] == ("rollout", "stop")} == {
        ("rollout", "stop"),
        ("rollout", "stop", 0),
    }
    assert str(loaded.spots["rollout", "stop", 0].value).endswith("1.yaml:1:18")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E6", 1e6), ("-2.5e+3", -2500.0), (".5", 0.5), ("5.", 5.0), ("+1e3", 1000.0), ("0.1", 0.1),
        ("12", 12), ("-3", -3), ("0x1F", 31), ("0o17", 15), ("1_000", 1000), ("1_000.5", 1000.5), ("007", 7),
        ("true", True), ("False", False), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("null", None), ("~", None), ("", None), ("12:30:00", "12:30:00"), ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"), ("e5", "e5"), ("1e", "1e"), ("- a", ["a"]), (".", "."), ("0b1", "0b1"), ("=", "="),
        ("[0-9]+", "[0-9]+"), ("{prompt} please", "{prompt} please"), ("a: b: c", "a: b: c"), ("'5'", "5"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_text_keys_take_the_override_as_it_is(load):
    loaded = load(
        overrides=("run.name=2024", "reward.answer_pattern=[0-9]+", "data.train=[a.csv, b.csv]", "run.dir=1e-6")
    )
    assert loaded.config.run.name == "2024"
    assert loaded.config.reward.answer_pattern == "[0-9]+"
    assert loaded.config.data.train == ["a.csv", "b.csv"]
    assert loaded.config.run.dir == "1e-6"
    assert load("run: {name: x}", overrides=("run.name=",)).config.run.name is None
    assert load("run: {name: x}", overrides=("run.name=null",)).config.run.name is None
    assert load(overrides=("model.path=a=b",)).config.model.path == "a=b"


def test_integers_are_accepted_where_numbers_are_wanted(load):
    assert load("optim: {lr: 1, betas: [0, 0.5]}").config.optim.betas == (0.0, 0.5)


def test_merge_keys_and_anchors(load):
    loaded = load("optim: &o\n  lr: 1e-5\n  weight_decay: 0.1\ncritic:\n  <<: {lr: 2e-5}\n  weight_decay: 0.1\n")
    assert loaded.config.critic.lr == 2e-5


def test_the_defaults_reload_equal(load):
    assert load(dump_config(Config())).config == Config()


def test_every_kind_of_value_reloads_equal(load):
    config = Config.model_validate(
        {
            "optim": {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-12, "total_epochs": 2.5, "weight_decay": 1e22},
            "run": {"name": "1e-6", "seed": 2**40},
            "model": {"path": "yes", "revision": "0123"},
            "data": {"system_prompt": "two\nlines: #x\n", "prompt_template": "  {prompt}\t", "train": ["a", "null"]},
            "rollout": {"stop": ["\n\n", "</s>", "é", "~", "- a"]},
            "algorithm": {"advantage_options": {"a": [1, 2.5, None, {"b": True}], "c": {}}, "dual_clip": None},
        }
    )
    text = dump_config(config)
    assert load(text).config == config
    assert load(text, text).config == config, "composing with itself changes nothing"


_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(
    st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from("\n\t"), max_size=12
)  # fmt: skip
_names = st.text("abcdefg_", min_size=1, max_size=6)
_nested = st.recursive(
    _plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_names, _nested, min_size=1, max_size=4))
def test_any_data_survives_writing_and_reading(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "x.yaml"
    path.write_text(to_yaml(data), encoding="utf-8")
    document = read_document(str(path))
    assert document.problems == []
    assert json.dumps(document.data, sort_keys=True) == json.dumps(data, sort_keys=True)


def test_nothing_is_ever_executed(load, tmp_path):
    assert "tag:yaml.org,2002:python/object/apply" not in str(CoreLoader.yaml_constructors)
    with pytest.raises(ValueError, match="only plain data is read"):
        load(f"run: {{name: !!python/object/apply:os.mkdir ['{tmp_path}/made']}}")
    assert not (tmp_path / "made").exists()
