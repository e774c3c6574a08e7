"""docs/algorithms.md names everything that can be chosen, and its examples run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fastrl.algorithms import (
    check_options,
    get_advantage,
    get_correction,
    get_policy_loss,
    list_advantages,
    list_corrections,
    list_kls,
    list_policy_losses,
)
from fastrl.algorithms.aggregation import MODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
TEXT = PAGE.read_text(encoding="utf-8")


def section(title):
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Advantage estimators", [n for n in list_advantages() if get_advantage(n).fn.__module__.startswith("fastrl")]),
        ("Policy losses", [n for n in list_policy_losses() if get_policy_loss(n).fn.__module__.startswith("fastrl")]),
        ("Rollout correction", list_corrections()),
        ("Aggregation", list(MODES)),
        ("KL", [n for n in list_kls() if not n.endswith("+")]),
    ],
)
def test_every_name_is_on_the_page(title, names):
    text = section(title)
    assert [name for name in names if f"`{name}`" not in text] == []


def test_options_on_the_page_exist():
    for get, title in ((get_advantage, "Advantage estimators"), (get_policy_loss, "Policy losses")):
        for line in section(title).splitlines():
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)][1:-1]
            if len(cells) != 5 or not cells[0].startswith("`"):
                continue
            entry = get(re.findall(r"`([^`]+)`", cells[0])[0])
            options = cells[3].split("; key")[0].split("; clips")[0]
            for option in re.findall(r"`([a-z_]+)`", options):
                assert option in entry.options or option == "whiten", f"{entry.name}: {option}"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The page's Python examples as importable modules."""
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S):
        name = re.match(r"# (\w+)\.py", block)[1]
        (tmp_path / f"{name}.py").write_text(block, encoding="utf-8")
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_loss_of_the_page(modules):
    blocks = [yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S)]
    algorithm = next(b["algorithm"] for b in blocks if "policy_loss" in b["algorithm"])
    entry = get_policy_loss(algorithm["policy_loss"])
    options = check_options(entry, algorithm["policy_loss_options"])
    x = torch.tensor([0.1, -0.5], dtype=torch.float64, requires_grad=True)
    data = {"log_prob": x, "old_log_prob": torch.zeros(2).double(), "advantages": torch.tensor([1.0, -1.0]).double()}
    result = entry.call(data, options)
    penalty = [0.005, 0.2 * (0.5 - 0.1)]
    want = [-(2.718281828459045**0.1) + 0.5 * penalty[0], 2.718281828459045**-0.5 + 0.5 * penalty[1]]
    assert result.loss.tolist() == pytest.approx(want)
    assert result.stats["penalty"].tolist() == pytest.approx(penalty)
    assert get_policy_loss("huber_ratio").fn is entry.fn


def test_the_training_step_takes_the_loss_of_the_page(modules):
    from fastrl.config.schema import Config
    from fastrl.trainer.setup import loss_settings

    algorithm = {"advantage": "grpo", "policy_loss": "my_losses:huber_ratio", "policy_loss_options": {"coef": 0.5}}
    settings = loss_settings(Config(algorithm=algorithm))
    assert settings.policy_loss.level == "token" and settings.options == {"coef": 0.5}


def test_the_estimator_of_the_page(modules):
    entry = get_advantage("my_advantages:rank_of_best")
    data = {"scores": torch.tensor([3.0, 1.0, 2.0, 5.0]), "group_id": torch.tensor([0, 0, 0, 1])}
    assert entry.call(data, {"scale": 2.0}).tolist() == [2.0, -2.0, 0.0, 0.0]


def test_the_correction_of_the_page():
    blocks = [yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S)]
    algorithm = next(b["algorithm"] for b in blocks if "correction" in b["algorithm"])
    entry = get_correction(algorithm["correction"])
    assert check_options(entry, algorithm["correction_options"])["cap"] == 3.0
