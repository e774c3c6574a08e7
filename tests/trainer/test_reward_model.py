"""A reward model scores ragged sequences as transformers' classifier scores a padded batch, on one rank and on two."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import short_run, write_tokenizer
from tiny_models import _ROPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, Qwen2Config
from transformers import Qwen2ForSequenceClassification as Qwen2Classifier

from fastrl.config.load import load_config
from fastrl.data.prompts import Prompt
from fastrl.errors import ConfigError, ModelError
from fastrl.models.double import keep_double
from fastrl.models.load import load_reward_model, load_tokenizer
from fastrl.rewards.base import Failure, RewardSample
from fastrl.run import run_training
from fastrl.trainer.reward_model import RewardModel, pack_whole, scored_position, sequence_ids

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist"))
from launched import launch_body

SHAPE = _ROPE | {"pad_token_id": 0, "num_labels": 1}
FAMILIES = {
    "llama": lambda: LlamaForSequenceClassification(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2Classifier(Qwen2Config(**SHAPE)),
}
SEQUENCES = [
    [5, 9, 8, 4, 33],
    [7],
    [21, 22, 23, 2, 9, 9, 40, 41, 42, 43, 44, 50],
    [6, 6, 2],
    [11, 12, 13, 0, 0],
    [30] * 9,
]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}.{% endfor %}"


def write_scorer(folder, family="llama", **changes):
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_scorer(tmp_path_factory.mktemp(name) / "scorer", name) for name in FAMILIES}


def padded(folder, sequences, family="llama"):
    """transformers' own scores of a padded batch, in float64."""
    classes = {"llama": LlamaForSequenceClassification, "qwen2": Qwen2Classifier}
    model = classes[family].from_pretrained(folder, dtype=torch.float64).eval()
    longest = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
    with torch.no_grad(), keep_double(model):
        return model(ids, attention_mask=(ids != 0).long()).logits[:, 0].tolist()


def scorer(folder, **changes):
    options = {"name": "scorer", "dtype": torch.float64, "offload": False, "max_tokens": None}
    options |= {"max_tokens_per_microbatch": 12} | changes
    model = load_reward_model(str(folder), dtype=torch.float64)
    return RewardModel(model, load_tokenizer(str(folder)), torch.device("cpu"), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_padded_batch(folders, family):
    judge = scorer(folders[family])
    assert judge.scores(SEQUENCES) == pytest.approx(padded(folders[family], SEQUENCES, family), rel=1e-9)
    assert judge.take_tokens() == sum(map(len, SEQUENCES)) and judge.take_tokens() == 0
    assert not any(p.requires_grad for p in judge.model.parameters())
    assert judge.scores([]) == []


def test_packing_keeps_sequences_whole():
    made = pack_whole(SEQUENCES, 12, 0)
    assert sorted(i for micro in made for i in micro.sequences.tolist()) == list(range(6))
    assert [micro.num_rows for micro in made] == [12, 12, 11]
    assert all(not segment.prefix for micro in made for segment in micro.segments)
    assert [scored_position(s, 0) for s in ([4, 5], [4, 0, 0], [0, 0], [4])] == [1, 0, 0, 0]
    assert scored_position([4, 0], None) == 1


def sample(text, response, messages=None):
    return RewardSample(Prompt(0, (1,), text, messages, "", None), response, (4,), "stop", 0)


def test_what_the_model_reads(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    spell = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert sequence_ids(tokenizer, sample("2+2?", "4")) == spell("2+2?4")
    tokenizer.chat_template = TEMPLATE
    assert sequence_ids(tokenizer, sample("2+2?", "4")) == spell("u: 2+2?.a: 4.")
    said = [{"role": "system", "content": "add"}, {"role": "user", "content": "2+2?"}]
    assert sequence_ids(tokenizer, sample("2+2?", "4", said)) == spell("s: add.u: 2+2?.a: 4.")
    begun = [*said, {"role": "assistant", "content": "it is "}]
    assert sequence_ids(tokenizer, sample("2+2?", "4", begun)) == spell("s: add.u: 2+2?.a: it is 4.")


def test_what_cannot_be_scored_is_a_failure(folders):
    outcomes = scorer(folders["llama"], max_tokens=5)([sample("2+2?", "4"), sample("2+2?", "45"), sample("", "")])
    assert isinstance(outcomes[0], float)
    assert isinstance(outcomes[1], Failure) and "6 tokens long, more than 5 (reward.model_max_tokens)" in str(
        outcomes[1]
    )
    assert isinstance(outcomes[2], Failure) and "no token" in str(outcomes[2])


def test_a_scorer_that_cannot_read_the_samples_says_so(folders):
    judge = scorer(folders["llama"])
    judge.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    (outcome,) = judge([sample("2+2?", "4")])
    assert isinstance(outcome, Failure) and "its chat template refuses the sample: roles must alternate" in str(outcome)
    judge.tokenizer.chat_template = None
    judge.tokenizer.add_tokens(["+2"])  # one id more than its model has
    outcomes = judge([sample("2+2?", "4"), sample("2", "4")])
    assert isinstance(outcomes[0], Failure) and f"id {SHAPE['vocab_size']}" in str(outcomes[0])
    assert isinstance(outcomes[1], float)


def test_other_models_are_refused(folders, tmp_path):
    two = write_scorer(tmp_path / "two")
    weights = load_file(two / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(2, 32)}, two / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"score.weight has 2 labels"):
        load_reward_model(str(two))
    (two / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=rf"^reward.functions: model:{two}: "):
        load_reward_model(str(two))
    weights.pop("score.weight")
    save_file(weights, two / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no safetensors file holds score.weight"):
        load_reward_model(str(two))
    (tmp_path / "empty").mkdir()
    for path, why in (
        ("/none/such", "no such folder"),
        ("a name", "neither a folder nor a hub name"),
        (f"{tmp_path}/empty", "no Hugging Face model folder, it has no config.json"),
    ):
        with pytest.raises(ConfigError, match=rf"reward.functions\[0\] = model:{path}: {why}"):
            load_config([], [*short_run("builtin:tiny", tmp_path), f"reward.functions=['model:{path}']"])


TWO_RANKS = """
from test_reward_model import SEQUENCES
from fastrl.dist.mesh import make_mesh
from fastrl.dist.fsdp import load_sharded, is_sharded
from fastrl.models.double import keep_double
from fastrl.models.load import load_reward_model, load_tokenizer
from fastrl.trainer.reward_model import RewardModel
cpu = torch.device("cpu")
model = load_sharded(load_reward_model, "{folder}", make_mesh(cpu, 1, None), cpu, dtype=torch.float64)
own, whole = (sum(t.numel() for t in tensors) for tensors in (
    (p.to_local() for p in model.parameters()), model.parameters()
))
assert is_sharded(model) and own < 0.6 * whole
judge = RewardModel(
    model, load_tokenizer("{folder}"), cpu, name="scorer", dtype=torch.float64, offload=False, max_tokens=None,
    max_tokens_per_microbatch=12,
)
own = SEQUENCES[:1] if rank else SEQUENCES[1:]  # one pass on rank 1, several on rank 0
return [judge.scores(own), judge.scores([] if rank else own)]
"""


def test_two_ranks_share_the_model(folders):
    wanted = padded(folders["llama"], SEQUENCES)
    (many, again), (few, none) = launch_body(TWO_RANKS.format(folder=folders["llama"]), 2)
    assert [*few, *many] == pytest.approx(wanted, rel=1e-9) and again == many and none == []


def test_a_run_is_rewarded_by_it(folders, tmp_path):
    """The scores in the records are those of transformers' classifier, on one rank and on two."""
    folder, lines = folders["llama"], []
    functions = f"reward.functions=['model:{folder}','python:tiny_rewards:parity']"
    settings = [functions, "reward.weights=[2.0,1.0]", "run.dtype=float64", "optim.total_steps=1"]
    for ranks in (1, 2):
        more = [*settings, f"parallel.processes={ranks}"]
        run = run_training(load_config([], short_run("builtin:tiny", tmp_path / str(ranks), *more)))
        lines.append([json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()])
        metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        assert metrics["reward/model_tokens"] > 0
        components = [row["components"]["scorer"] for row in lines[-1]]
        assert metrics["reward/component/scorer/mean"] == pytest.approx(sum(components) / 16, rel=1e-6)
    for one, two in zip(*lines, strict=True):
        assert one["components"] == pytest.approx(two["components"], rel=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(row["prompt"] + row["response"], add_special_tokens=False) for row in lines[0]]
    wanted = padded(folder, ids)
    assert [row["components"]["scorer"] for row in lines[0]] == pytest.approx(wanted, rel=1e-5)
    assert [row["score"] for row in lines[0]] == pytest.approx(
        [2 * w + row["components"]["parity"] for w, row in zip(wanted, lines[0])], rel=1e-5
    )
