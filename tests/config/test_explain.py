"""Descriptions of keys, and what is said about keys that are none."""

from __future__ import annotations

import json

import pytest

from fastrl.config.explain import explain, json_schema, markdown, overview
from fastrl.config.leaves import leaves, sections
from fastrl.config.suggest import FOREIGN_NAMES
from fastrl.errors import ConfigError


def test_one_key():
    assert explain("optim.lr") == (
        "optim.lr\n"
        "  peak learning rate of the policy\n"
        "  type     a number > 0\n"
        "  default  1e-06\n"
        "  set it   `lr: ...` under `optim:`, or optim.lr=... on the command line"
    )
    assert "type     a number >= 0, or null" in explain("algorithm.clip_high")
    assert "default  null" in explain("algorithm.clip_high")


def test_registered_names_come_with_the_key():
    text = explain("algorithm.policy_loss")
    assert "\n    clip " in text
    assert "\n    grpo: " in explain("algorithm.advantage_options.std_normalize")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lr", "lr: no such section or key; did you mean optim.lr or critic.lr?"),
        ("optim.beta", "optim.beta: no such key; did you mean optim.betas?"),
        ("algorthm", "algorthm: no such section or key; did you mean algorithm?"),
    ],
)
def test_keys_that_are_none(name, said):
    with pytest.raises(ConfigError) as caught:
        explain(name)
    assert str(caught.value) == said


@pytest.mark.parametrize("section", sections())
def test_sections_list_their_keys(section):
    text = explain(section)
    assert [line.split()[0] for line in text.splitlines()[2:] if not line.startswith("   ")] == [
        leaf.key for leaf in leaves().values() if leaf.section == section
    ]
    assert section in overview()


def test_markdown_names_every_key_once():
    text = markdown()
    for name in leaves():
        assert text.count(f"| `{name}` |") == 1


def test_schema_is_closed_json():
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(sections())


def test_foreign_names_lead_to_keys_that_exist():
    for name, keys in FOREIGN_NAMES.items():
        assert set(keys) <= set(leaves()), name
