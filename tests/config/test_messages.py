"""What somebody with a mistake in a configuration reads: whole messages, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastrl.config import load_config
from fastrl.errors import ConfigError

SHAPE = "a configuration has sections such as `optim:` with keys under them"


@pytest.fixture
def message(tmp_path, monkeypatch):
    """The error text for the content of c.yaml (further files by name) and overrides."""
    monkeypatch.chdir(tmp_path)

    def run(content: str | None = None, *overrides: str, files: dict[str, str] | None = None, **options) -> str:
        paths = []
        if content is not None:
            Path("c.yaml").write_text(content, encoding="utf-8")
            paths.append("c.yaml")
        for name, text in (files or {}).items():
            Path(name).write_text(text, encoding="utf-8")
            paths.append(name)
        with pytest.raises(ConfigError) as caught:
            load_config(paths, overrides, cross_check=False, **options)
        return str(caught.value)

    return run


def test_unknown_key_names_the_near_one(message):
    assert message("algorithm:\n  clip_hi: 0.28\n") == (
        "c.yaml:2:3: algorithm.clip_hi: unknown key; did you mean algorithm.clip_high?\n"
        "1 error in 1 file. `fastrl config --explain algorithm.clip_high` tells more."
    )


def test_wrong_section_names_the_right_one(message):
    assert message("run:\n  lr: 1e-6\n").splitlines()[0] == (
        "c.yaml:2:3: run.lr: unknown key; did you mean optim.lr or critic.lr?"
    )
    assert message("rollout:\n  gae_lambda: 1\n").splitlines()[0] == (
        "c.yaml:2:3: rollout.gae_lambda: unknown key; did you mean algorithm.gae_lambda?"
    )
    assert message("kl_loss_coef: 0.1\n").splitlines()[0] == (
        "c.yaml:1:1: kl_loss_coef: unknown section; did you mean algorithm.kl_loss_coef?"
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("rollout: {num_generations: 8}", "rollout.num_samples_per_prompt"),
        ("algorithm: {beta: 0.04}", "algorithm.kl_loss_coef or algorithm.kl_reward_coef"),
        ("optim: {learning_rate: 0.04}", "optim.lr or critic.lr"),
        ("data: {max_prompt_length: 9}", "data.max_prompt_tokens"),
    ],
)
def test_names_of_other_trainers_are_translated(message, text, meant):
    assert f"unknown key; did you mean {meant}?" in message(text)


def test_unknown_section(message):
    assert message("algoritm:\n  gamma: 1\n").startswith(
        "c.yaml:1:1: algoritm: unknown section; did you mean algorithm?"
    )
    assert message("zzz: 1\n").splitlines()[0] == (
        "c.yaml:1:1: zzz: unknown section; the sections are "
        "model, data, reward, rollout, algorithm, critic, optim, run, "
        "parallel, logging"
    )
    assert message("optim.lr: 1\n").splitlines()[0] == (
        "c.yaml:1:1: optim.lr: sections and keys are nested: write `optim:` and under it `lr:`"
    )
    assert message("optim: 3\n").splitlines()[0] == (
        "c.yaml:1:8: optim: a section holds keys, not 3; write them under it, one per line"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lr: fast}", "c.yaml:1:13: optim.lr: must be a number > 0, not 'fast'"),
        ("optim: {lr: '1e-6'}", "c.yaml:1:13: optim.lr: must be a number > 0, not '1e-6'; leave out the quotes"),
        ("optim: {lr: 0}", "c.yaml:1:13: optim.lr: must be a number > 0, not 0"),
        ("optim: {lr: true}", "c.yaml:1:13: optim.lr: must be a number > 0, not true"),
        ("optim: {lr: .nan}", "c.yaml:1:13: optim.lr: must be a finite number"),
        ("optim: {lr: .inf}", "c.yaml:1:13: optim.lr: must be a finite number"),
        ("optim: {lr: null}", "c.yaml:1:13: optim.lr: must be a number > 0, not null"),
        ("run: {seed: 1e3}", "c.yaml:1:13: run.seed: must be an integer >= 0, not 1000.0; write 1000"),
        ("run: {seed: 1.5}", "c.yaml:1:13: run.seed: must be an integer >= 0, not 1.5"),
        ("run: {seed: true}", "c.yaml:1:13: run.seed: must be an integer >= 0, not true"),
        ("run: {seed: [1]}", "c.yaml:1:13: run.seed: must be an integer >= 0, not [1]"),
        ("run: {name: 5}", "c.yaml:1:13: run.name: must be text, or null, not 5; write \"5\""),
        ("run: {share_prompts: yes}", "c.yaml:1:22: run.share_prompts: must be true or false, not 'yes'; write true"),
        ("optim: {betas: [0.9]}", "c.yaml:1:16: optim.betas: must be a list of 2 numbers, not [0.9]"),
        ("optim: {betas: [0.9, x]}", "c.yaml:1:22: optim.betas[1]: must be a list of 2 numbers; this item is 'x'"),
        ("rollout: {stop: a}", "c.yaml:1:17: rollout.stop: must be a list of texts, not 'a'; write [a]"),
        ("data: {train: 5}", "c.yaml:1:15: data.train: must be text or a list of texts, not 5; write \"5\""),
        ("data: {train: [a, 5]}", "c.yaml:1:19: data.train[1]: must be text or a list of texts; this item is 5"),
        ("reward: {functions: []}",
         "c.yaml:1:21: reward.functions: must be a list of texts with at least 1 item, not []"),
        ("run: {dtype: bf16}",
         "c.yaml:1:14: run.dtype: must be one of float32, bfloat16, float64, not 'bf16'; did you mean bfloat16?"),
        ("data: {train_options: 3}", "c.yaml:1:23: data.train_options: must be a mapping of names to values, not 3"),
        ("algorithm: {dual_clip: 1}", "c.yaml:1:24: algorithm.dual_clip: must be a number > 1, or null, not 1"),
        ("algorithm: {clip_low: 1}", "c.yaml:1:23: algorithm.clip_low: must be a number >= 0 and < 1, or null, not 1"),
        ("algorithm: {kl_loss_coef: -1}", "c.yaml:1:27: algorithm.kl_loss_coef: must be a number >= 0, not -1"),
    ],
)  # fmt: skip
def test_wrong_values(message, text, expected):
    key = expected.split(": ")[1].split("[")[0]
    assert message(text) == f"{expected}\n1 error in 1 file. `fastrl config --explain {key}` tells more."


def test_a_text_of_a_wrong_form_names_the_forms(message):
    text = message(None, "rollout.verify_weights=every 0")
    assert text.startswith("command line: rollout.verify_weights: 'every 0' is not among what it may be: ")
    assert "always, first (to each engine process), `every K` or off" in text


def test_everything_is_reported_at_once_in_order(message):
    content = """rollout:
  temprature: 1
  temperature: hot
optim:
  lr: 1e-6
  lr: 2e-6
run:
  seed: "5"
"""
    assert message(content, "run.foo=1", "rollout.top_p=2", files={"d.yaml": "algorithm:\n  gama: 1\n"}) == (
        "c.yaml:2:3: rollout.temprature: unknown key; did you mean rollout.temperature?\n"
        "c.yaml:3:16: rollout.temperature: must be a number > 0, not 'hot'\n"
        "c.yaml:6:3: lr: written twice, first on line 5; keep one\n"
        "c.yaml:8:9: run.seed: must be an integer >= 0, not '5'; leave out the quotes\n"
        "d.yaml:2:3: algorithm.gama: unknown key; did you mean algorithm.gamma?\n"
        "command line: run.foo: unknown key\n"
        "command line: rollout.top_p: must be a number > 0 and <= 1, not 2\n"
        "7 errors in 2 files and on the command line. `fastrl config --explain rollout.temperature` tells more."
    )


def test_bad_overrides(message):
    assert message("run: {seed: 1}", "lr=3", "optim.lr", "optim..lr=3") == (
        "command line: lr=3: an override is written section.key=value, as in optim.lr=1e-5\n"
        "command line: optim.lr: an override is written section.key=value, as in optim.lr=1e-5\n"
        "command line: optim..lr=3: an override is written section.key=value, as in optim.lr=1e-5\n"
        "3 errors on the command line. `fastrl config --explain optim.lr` tells more."
    )


def test_files_that_cannot_be_read(message, tmp_path):
    (tmp_path / "ppo.yaml").write_text("run: {seed: 1}")
    with pytest.raises(ConfigError, match=r"^pp.yaml: no such file; did you mean ppo.yaml\?\n1 error in 1 file.$"):
        load_config(["pp.yaml"])
    with pytest.raises(ConfigError) as caught:
        load_config(["nowhere/x.yaml"])
    assert str(caught.value).startswith(f"nowhere/x.yaml: no such file (there is no folder nowhere in {tmp_path})")
    with pytest.raises(ConfigError, match="is a folder; give a YAML file"):
        load_config([str(tmp_path)])
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(ConfigError, match=r"latin.yaml: is not UTF-8 text \(byte 15\)"):
        load_config(["latin.yaml"])


def test_a_missing_file_does_not_hide_the_other_files_mistakes(message):
    with pytest.raises(ConfigError) as caught:
        Path("a.yaml").write_text("optim: {lrr: 1}")
        load_config(["missing.yaml", "a.yaml"])
    assert str(caught.value).splitlines()[1] == "a.yaml:1:9: optim.lrr: unknown key; did you mean optim.lr?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"c.yaml: is empty; {SHAPE}"),
        ("# nothing\n\n", f"c.yaml: is empty; {SHAPE}"),
        ("- a\n- b\n", f"c.yaml:1:1: the file holds a list; {SHAPE}"),
        ("just text\n", f"c.yaml:1:1: the file holds a single value; {SHAPE}"),
        ("optim:\n\tlr: 1\n", "c.yaml:2:1: a tab; YAML indents with spaces only"),
        ("optim:\n  lr: [1, 2\n",
         "c.yaml:3:1: not readable as YAML: expected ',' or ']', but got '<stream end>' "
         "(while parsing a flow sequence)"),
        ("run: {seed: 1}\n---\nrun: {seed: 2}\n",
         "c.yaml:2:1: a second document starts here; a configuration is one document"),
        ("run:\n  name: !!python/object/apply:os.getcwd []\n",
         "c.yaml:2:9: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd'; "
         "only plain data is read"),
        ("data:\n  train_options: &a {x: *a}\n", "c.yaml:2:18: this alias refers to the value it stands in"),
        ("data:\n  1: x\n", "c.yaml:2:3: keys are names, not 1"),
    ],
)  # fmt: skip
def test_files_that_are_no_configuration(message, text, expected):
    assert message(text).splitlines()[0] == expected
