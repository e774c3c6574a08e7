"""Rules between keys: what is refused, what is warned about, and what is let through."""

from __future__ import annotations

import sys

import pytest

from fastrl.config import Config, dump_config, load_config
from fastrl.errors import ConfigError

LENGTH = "optim: {total_steps: 5}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text: str = "", *overrides: str, **options):
        (tmp_path / "c.yaml").write_text(LENGTH + text)
        return load_config(["c.yaml"], overrides, **options)

    return run


def problems(load, *arguments: str, **options) -> list[str]:
    """The messages of a refused configuration, without the closing line."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **options)
    return str(caught.value).splitlines()[:-1]


def test_the_default_algorithm_is_fine(load):
    loaded = load()
    assert loaded.config.optim.total_steps == 5
    assert loaded.warnings == ()


def test_training_length_is_given_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("run: {seed: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    assert str(caught.value) == (
        f"{path}: how long to train? set optim.total_steps or optim.total_epochs\n"
        "1 error in 1 file. `fastrl config --explain optim.total_steps` tells more."
    )
    with pytest.raises(ConfigError, match=r"optim.total_steps = 5 and optim.total_epochs = 1 are both set: keep one"):
        load_config([path], ["optim.total_steps=5", "optim.total_epochs=1"])


def test_a_rule_is_silent_about_keys_known_to_be_wrong(load):
    assert problems(load, "optim: {total_steps: 0.5}\n") != []
    (message,) = problems(load, "", "rollout.top_p=2")
    assert message.startswith("command line: rollout.top_p: must be")
    lines = problems(load, "", "optim.total_steps=null", "optim.total_stepz=5")
    assert lines == ["command line: optim.total_stepz: unknown key; did you mean optim.total_steps?"]


def test_what_ends_a_response_can_end_one(load):
    assert problems(load, "rollout: {stop: ['.', ''], stop_token_ids: [3, -1]}\n") == [
        "c.yaml:2:23: rollout.stop[1] is empty: name text that ends a response",
        "c.yaml:2:48: rollout.stop_token_ids[1] = -1: token ids are 0 or more",
    ]


def test_a_folder_is_no_data_file(load, tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    assert problems(load, "", "data.train=a.jsonl") == [
        "command line: data.train = a.jsonl: is a folder; give a file in it"
    ]


def test_a_warm_up_longer_than_the_run_is_warned_about(load):
    assert load("", "optim.lr_warmup_updates=5").warnings == ()
    assert load("", "optim.lr_warmup_updates=6").warnings == (
        "command line: optim.lr_warmup_updates = 6 is more than the 5 updates of the run: "
        "the rate never reaches optim.lr",
    )
    assert load("", "optim.lr_warmup_updates=6", "algorithm.num_updates_per_step=2").warnings == ()


def test_numbers_that_libraries_cannot_take(load):
    assert problems(load, "", "run.seed=9223372036854775808") == [
        "command line: run.seed = 9223372036854775808: must be below 2^63 = 9223372036854775808"
    ]
    assert "reward.timeout_s: must be a number > 0" in problems(load, "", "reward.timeout_s=1e12")[0]
    assert load("", "run.seed=9223372036854775807").config.run.seed == 2**63 - 1


def test_group_of_one_is_warned_about(load):
    loaded = load("algorithm: {advantage: grpo}\nrollout: {num_samples_per_prompt: 1}\n")
    assert loaded.warnings == (
        "c.yaml:3:35: rollout.num_samples_per_prompt = 1, but algorithm.advantage = grpo compares samples of one "
        "prompt: use 2 or more, or algorithm.advantage = reinforce_plus_plus",
    )
    assert load("", "algorithm.advantage=reinforce_plus_plus").warnings == ()
    assert load("", "algorithm.advantage=grpo", "rollout.num_samples_per_prompt=2").warnings == ()
    (message,) = problems(load, "", "algorithm.dynamic_sampling=true")
    assert "which is every group of one: use 2 or more" in message


def test_names_of_algorithms(load):
    lines = problems(
        load, "", "algorithm.advantage=grop", "algorithm.policy_loss=clipp", "algorithm.correction=tokn_truncate"
    )
    assert [line.split(": ")[1].split(" (")[0].split(";")[0] for line in lines] == [
        "algorithm.advantage = 'grop' is not registered",
        "algorithm.policy_loss = 'clipp' is not registered",
        "algorithm.correction = 'tokn_truncate' is not registered",
    ]
    assert "did you mean grpo?" in lines[0]
    (message,) = problems(load, "", "algorithm.policy_loss=no.such:loss")
    assert message.startswith("command line: algorithm.policy_loss = no.such:loss: ")


def test_options_of_algorithms(load):
    text = "algorithm:\n  advantage: grpo\n  advantage_options: {std_normalise: false, epsilon: small}\n"
    lines = problems(load, text, "rollout.num_samples_per_prompt=2")
    assert lines[0].startswith(
        "c.yaml:4:38: algorithm.advantage_options.std_normalise: unknown option; did you mean std_normalize?"
    )
    assert lines[1].startswith("c.yaml:4:54: algorithm.advantage_options.epsilon = 'small': must be a number")
    (message,) = problems(load, "", "algorithm.advantage_options.gamma=0.9")
    assert message == (
        "command line: algorithm.advantage_options.gamma: this option has a key of its own, write algorithm.gamma"
    )
    loaded = load("", "algorithm.advantage=grpo", "rollout.num_samples_per_prompt=2", "algorithm.gamma=0.9")
    assert loaded.warnings == (
        "command line: algorithm.gamma has no effect: algorithm.advantage = grpo has no such option",
    )


def test_truncated_sampling_must_be_asked_for(load):
    lines = problems(load, "", "rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1")
    assert lines[0] == (
        "command line: rollout.top_p = 0.9 samples from a part of the distribution, which biases the policy ratio "
        "and its corrections by the kept mass: set rollout.top_p = 1, or rollout.allow_truncated_sampling = true"
    )
    assert len(lines) == 3
    assert load("", "rollout.top_p=0.9", "rollout.allow_truncated_sampling=true").warnings == ()


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.num_updates_per_step=65"], "prompts: use 64 or fewer"),
        (["rollout.kv_budget_tokens=767"], "does not hold one sequence"),
        (["run.validation_every_steps=2"], "data.validation names no held-out prompts"),
        (["run.device=gpu"], "run.device = 'gpu': must be auto, cpu, cuda or cuda:N"),
        (["run.name=a/b"], "is no folder name"),
        (["optim.betas=[0.9, 1]"], "both must be >= 0 and < 1"),
        (["data.train=[]"], "data.train = []: name at least one source"),
        (["data.train=missing.jsonl"], "data.train = missing.jsonl: no such file"),
        (["data.train=[task:arithmetic, x.txt]"], "data.train[1] = x.txt: a source is a file"),
        (["data.train=task:arithmetik"], "data.train = task:arithmetik: unknown task; did you mean arithmetic?"),
        (["data.train_options={maximum: 3}"], "data.train = task:arithmetic: unknown option 'maximum'"),
        (["data.validation=arithmetic"], "a task is written task:arithmetic"),
        (["data.prompt_template=hello"], "data.prompt_template has no `{prompt}` in it"),
        (["model.chat_template=x.jinja"], "model.chat_template = x.jinja: no such file"),
        (["model.path=./nowhere"], "model.path = ./nowhere: no such folder"),
        (["model.path=builtin:large"], "the built-in models are builtin:tiny"),
        (["reward.functions=[mth]"], "reward.functions[0] = mth: unknown reward function; did you mean math?"),
        (["reward.functions=[my.rewards:score]"], "did you mean python:my.rewards:score?"),
        (["reward.functions=[modle:a/b]"], "did you mean model:a/b?"),
        (["reward.functions=['model:']"], "model: names no model"),
        (["reward.functions=[quality]"], "regex, python:package.module:function and model:PATH"),
        (["reward.functions=[python:my_rewards]"], "write python:package.module:function"),
        (["reward.functions=[python:nowhere.at_all:f]"], "there is no module nowhere.at_all"),
        (["reward.functions=[python:json:lods]"], "module json has no lods; did you mean loads?"),
        (["reward.functions=[python:json:__name__]"], "is not a function"),
        (["reward.functions=[math, exact]", "reward.weights=[1]"], "reward.weights has 1 of the 2 weights"),
        (["reward.functions=[regex]"], "reward.regex_pattern is not set"),
        (["reward.functions=[regex]", "reward.regex_pattern=("], "is no regular expression: missing )"),
        (["reward.clip_min=1", "reward.clip_max=1"], "reward.clip_min = 1 is not below reward.clip_max = 1"),
        (["reward.overlong_buffer_tokens=257"], "is more than rollout.max_response_tokens = 256"),
        (["algorithm.kl_loss_kind=k9"], "algorithm.kl_loss_kind = 'k9' is not registered"),
        (["algorithm.kl_reward_kind=k9"], "algorithm.kl_reward_kind = 'k9' is not registered"),
        (["algorithm.kl_loss_coef=1", "algorithm.kl_loss_kind=full", "algorithm.kl_unbiased=true"],
         "algorithm.kl_loss_kind = full is exact"),
        (["algorithm.kl_controller=adaptive"], "algorithm.kl_reward_coef, which is 0: set it above 0"),
        (["rollout.zero_copy=true", "run.dtype=float64"], "set run.dtype = bfloat16 or rollout.zero_copy = false"),
        (["rollout.devices=[1, -1]"], "-1 is no GPU, they count from 0"),
        (["rollout.zero_copy=true", "rollout.offload=all"], "set rollout.offload = optimizer"),
        (["rollout.zero_copy=true", "rollout.sleep_level=2"], "set rollout.sleep_level = 0"),
        (["algorithm.overlong_leaves_baseline=true"], "refines algorithm.overlong_masking, which is off"),
        (["algorithm.advantage=grpo", "rollout.num_samples_per_prompt=2", "algorithm.pf_ppo_mode=pow"],
         "resamples the batch for algorithm.advantage = gae, not grpo"),
    ],
)  # fmt: skip
def test_what_is_refused(load, overrides, part):
    (message,) = problems(load, "", *overrides)
    assert part in message
    assert message.startswith("command line: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.num_updates_per_step=64"],
        ["rollout.kv_budget_tokens=768"],
        ["run.max_tokens_per_microbatch=768"],
        ["run.device=cuda:1"],
        ["optim.betas=[0, 0.999]"],
        ["optim.schedule=cosine", "optim.min_lr_ratio=0.1"],
        ["reward.functions=[math, exact]", "reward.weights=[1, 0.5]"],
        ["reward.functions=[regex]", "reward.regex_pattern=[0-9]+"],
        ["reward.clip_min=0", "reward.clip_max=1"],
        ["reward.overlong_buffer_tokens=256"],
        ["algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_kind=k2+", "algorithm.kl_unbiased=true"],
        ["algorithm.kl_reward_coef=0.1", "algorithm.kl_controller=adaptive", "algorithm.kl_target=0.2"],
        ["algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_scale_factor=100"],
        ["data.validation=task:arithmetic", "run.validation_num_samples=4", "run.validation_temperature=1"],
        ["algorithm.overlong_masking=true", "algorithm.overlong_leaves_baseline=true"],
        ["critic.warmup_steps=4", "critic.lr=1e-3"],
        ["optim.total_steps=null", "optim.total_epochs=1"],
        ["model.path=Qwen/Qwen2.5-0.5B-Instruct"],
        ["rollout.top_k=0", "rollout.min_p=0.0"],
        ["rollout.zero_copy=true", "run.dtype=bfloat16"],
        ["rollout.verify_weights=every 5"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_what_is_let_through(load, overrides):
    assert load("", *overrides).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["run.max_tokens_per_microbatch=767"], "is less than one sequence may have"),
        (["data.validation=task:arithmetic", "run.validation_num_samples=4"], "greedy responses are all the same"),
        (["data.validation=task:arithmetic", "run.keep_best_checkpoint=true", "run.checkpoint_every_steps=1"],
         "has only the last step to choose from while run.validation_every_steps = 0"),
        (["run.validation_num_samples=4"], "has no effect: data.validation names no held-out prompts"),
        (["optim.min_lr_ratio=0.1"], "has no effect: optim.schedule = constant never falls"),
        (["reward.answer_pattern=x"], "has no effect: reward.functions has no exact"),
        (["rollout.engine=native", "rollout.bucket_gib=1"], "uses the trainer's own weights"),
        (["algorithm.kl_target=0.2"], "has no effect: algorithm.kl_controller = fixed"),
        (["algorithm.kl_loss_kind=k2"], "has no effect: algorithm.kl_loss_coef = 0"),
        (["algorithm.kl_unbiased=true"], "has no effect: algorithm.kl_loss_coef = 0"),
        (["algorithm.loss_scale_factor=9"], "has no effect: algorithm.loss_agg_mode = token-mean"),
        (["algorithm.correction=none", "algorithm.correction_options={a: 1}"],
         "has no effect: algorithm.correction = none"),
        (["algorithm.max_refills=5"], "has no effect: algorithm.dynamic_sampling = false"),
        (["algorithm.pf_ppo_power=3"], "has no effect: algorithm.pf_ppo_mode = none"),
        (["critic.warmup_steps=5"], "leaves none of optim.total_steps = 5 to the policy"),
        (["algorithm.advantage=grpo", "rollout.num_samples_per_prompt=2", "critic.lr=1e-3"],
         "critic.lr has no effect: algorithm.advantage = grpo needs no critic"),
    ],
)  # fmt: skip
def test_what_is_warned_about(load, overrides, part):
    (message,) = load("", *overrides).warnings
    assert part in message
    assert message.startswith("command line: ")


def test_a_written_default_asks_for_nothing(load, tmp_path):
    """The resolved configuration of a run names every key; loading it warns about none of them."""
    config = Config.model_validate(
        {"optim": {"total_steps": 5}, "algorithm": {"advantage": "grpo"}, "rollout": {"num_samples_per_prompt": 2}}
    )
    (tmp_path / "all.yaml").write_text(dump_config(config))
    loaded = load_config(["all.yaml"])
    assert loaded.config == config
    assert loaded.warnings == ()


def test_the_same_file_for_training_and_validation(load, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (message,) = load("data: {train: a.jsonl, validation: a.jsonl}\n").warnings
    assert message.startswith("c.yaml:2:36: data.validation = a.jsonl is also in data.train")
    (message,) = problems(load, "data: {train: b.jsonl}\n")
    assert message == "c.yaml:2:15: data.train = b.jsonl: no such file; did you mean a.jsonl?"


def test_model_folders_are_looked_into(load, tmp_path):
    (tmp_path / "model").mkdir()
    lines = problems(load, "", "model.path=model")
    assert [line.split(" (")[0] for line in lines] == [
        "command line: model.path = model: no Hugging Face model folder, it has no config.json",
        "command line: model.path = model has no tokenizer",
    ]
    (tmp_path / "model" / "config.json").write_text("{}")
    (line,) = problems(load, "", "model.path=./model")
    assert line.endswith(": set model.tokenizer_path to a folder that has one")
    assert load("", "model.path=model", "model.tokenizer_path=some/hub-name").warnings == ()
    assert load("", "critic.path=model").warnings == ()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert load("", "model.path=model").warnings == ()


def test_a_reward_module_that_fails_says_why(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_that_raise.py").write_text("raise KeyError('token')\n")
    (tmp_path / "rewards_fine.py").write_text(
        "def score(response, answer):\n    return 1.0\n\ndef blind(*words):\n    return 1.0\n"
    )
    (message,) = problems(load, "", "reward.functions=[python:rewards_that_raise:score]")
    assert message.endswith("importing rewards_that_raise failed: KeyError: 'token'")
    assert load("", "reward.functions=[python:rewards_fine:score]").warnings == ()
    (message,) = problems(load, "", "reward.functions=[python:rewards_fine:blind]")
    assert "reward.functions[0] = python:rewards_fine:blind: parameters are filled by name" in message
    sys.modules.pop("rewards_fine", None)


def test_missing_packages_are_errors_to_train_and_warnings_to_look(load, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    (message,) = problems(load, "", "logging.trackers=[wandb]")
    assert message == "command line: logging.trackers: wandb is not installed: pip install 'fastrl[wandb]'"
    assert load("", "logging.trackers=[wandb]", only_look=True).warnings == (message,)


def test_components_that_no_reward_gives_are_refused(load):
    weights = "advantage: gdpo, advantage_options: {weights: {exakt: 1.0, exact: 0.5}}"
    (message,) = problems(load, f"reward: {{functions: [exact]}}\nalgorithm: {{{weights}}}\n")
    assert message.endswith(
        "algorithm.advantage_options.weights.exakt: reward.functions gives no component of that name; did you mean "
        "exact? (components: exact)"
    )
    dynamic = ["algorithm.dynamic_sampling=true", "rollout.num_samples_per_prompt=4"]
    (message,) = problems(load, "", *dynamic, "algorithm.dynamic_sampling_metric=accuracy")
    assert "algorithm.dynamic_sampling_metric = accuracy: reward.functions gives no component" in message
    load("", *dynamic, "algorithm.dynamic_sampling_metric=math")
