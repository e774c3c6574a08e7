"""The page's own loss and estimator train: two steps through the command's path, their options and statistics seen."""

import math
import re
import sys
from pathlib import Path

import pytest
from tiny_folder import short_run, write_tiny_folder

from fastrl.config.load import load_config
from fastrl.trainer.loop import Trainer
from fastrl.trainer.reporter import Silent
from fastrl.trainer.setup import build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The page's Python blocks as modules of the current folder."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S):
        name = re.match(r"# (\w+)\.py", block)[1]
        (tmp_path / f"{name}.py").write_text(block, encoding="utf-8")
        sys.modules.pop(name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("loss", ["my_losses:huber_ratio", "huber_ratio"])
def test_two_steps(examples, tmp_path, loss):
    if ":" not in loss:
        import my_losses  # noqa: F401  (the decorator registers the short name)
    overrides = [
        f"algorithm.policy_loss={loss}",
        "algorithm.policy_loss_options={coef: 0.5}",
        "algorithm.advantage=my_advantages:rank_of_best",
        "algorithm.advantage_options={scale: 2.0}",
        "algorithm.num_updates_per_step=2",
    ]
    model = write_tiny_folder(tmp_path / "model")
    parts = build(load_config([], short_run(model, tmp_path, *overrides)).config)
    trainer = Trainer(parts, Silent(), None, lambda score: None)
    try:
        trainer.step()
        values = trainer.step()[1]
    finally:
        parts.generator.rewards.close()
    assert values["optim/grad_norm"] > 0 and values["policy/stat/penalty"] >= 0
    assert values["policy/advantage/max"] in (0.0, 2.0) and values["policy/advantage/min"] in (0.0, -2.0)
    assert all(math.isfinite(value) for value in values.values())
