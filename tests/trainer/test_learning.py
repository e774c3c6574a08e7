"""Every recipe learns: the reward of sampled responses rises over sixty steps on the embedded task. Slow."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "bench" / "learning" / "recipes.py"
specification = importlib.util.spec_from_file_location("recipes", FILE)
recipes = importlib.util.module_from_spec(specification)
specification.loader.exec_module(recipes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", recipes.NAMES)
def test_reward_rises(name, tmp_path):
    row = recipes.train(name, 60, 0, str(tmp_path))
    assert row["last"] > row["first"] + 0.05, row
