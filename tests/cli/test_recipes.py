"""Every configuration that ships loads without an error or a warning, and its plan can be printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastrl import cli
from fastrl.config import load_config

REPOSITORY = Path(cli.__file__).parents[1]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_there_are_recipes():
    assert {"ppo", "grpo"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipes_load(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    loaded = load_config([path], only_look=True)
    # What a machine lacks is none of the recipe's business; anything else that is warned about is.
    assert [text for text in loaded.warnings if "is not installed" not in text] == []


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_dry_runs(path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    before = set(Path.cwd().glob("runs/*"))
    assert cli.run(["train", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for stage in ("generate", "reward", "advantage", "update"):
        assert f"\n{stage} " in f"\n{shown}"
    assert set(Path.cwd().glob("runs/*")) == before, "a dry run writes nothing"
