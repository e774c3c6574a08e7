"""Loading models, tokenizers and critics; errors that name model.path."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from plain_reference import padded_log_prob
from tiny_folder import write_tiny_folder
from tiny_models import BUILDERS, ragged_batch, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from fastrl.data.packing import pack
from fastrl.errors import ModelError
from fastrl.models import hub
from fastrl.models.forward import hidden_rows, trunk_rows
from fastrl.models.head import head_of, logits_of, trunk
from fastrl.models.load import disable_dropout, load_critic, load_model, load_tokenizer, prepare_model, stop_token_ids
from fastrl.models.stream import parameters_on_meta


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def test_a_folder_gives_the_same_log_probs_as_transformers(folder):
    batch = ragged_batch([4, 3], [[3, 5], [2, 6]])
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    reference = padded_log_prob(plain, batch)
    model = load_model(folder, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # masters; bfloat16 is the trainer's autocast
    (micro,) = pack(batch, max_tokens=1000)
    log_prob = torch.zeros(batch.num_tokens)
    logits = logits_of(hidden_rows(model, micro), head_of(model))
    log_prob[micro.token_index] = torch.log_softmax(logits, -1).gather(1, micro.labels[:, None]).squeeze(1)
    assert float((log_prob - reference).abs().max()) < 1e-5
    assert {p.dtype for p in load_model(folder, dtype=torch.float64).parameters()} == {torch.float64}


def test_a_saved_model_has_no_trace_of_fastrl(folder, tmp_path):
    load_model(folder).save_pretrained(tmp_path)
    assert "fastrl" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != "fastrl"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", r"model\.path = /no/such/folder: no such folder"),
        ("./missing", r"model\.path = \./missing: no such folder"),
        ("builtin:huge", r"model\.path = builtin:huge: the only model shipped with fastrl is builtin:tiny"),
    ],
)
def test_missing_folders(path, message):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=message):
            load(path)


def test_incomplete_folders(folder, tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"holds no tokenizer.*model\.tokenizer_path"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=rf"model\.path = {tmp_path}: .*not a valid JSON"):
        load_model(str(tmp_path))
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"model\.path = {tmp_path}: .*model\.safetensors"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"chat_template = /no/file: no such file"):
        load_tokenizer(folder, chat_template="/no/file")


def test_a_hub_name_without_the_hub():
    """In a process of its own: the hub's offline switch is read when transformers is imported."""
    code = (
        "from fastrl.models.load import load_model\nfrom fastrl.errors import ModelError\n"
        "try:\n    load_model('someone/some-model')\nexcept ModelError as error:\n    print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("model.path = someone/some-model: not in the local cache"), run.stderr
    assert "HF_HUB_OFFLINE is set: unset it to download; or give a folder" in run.stdout


def test_chat_template_file(folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tokenizer = load_tokenizer(folder, chat_template=str(template))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False)
    assert text == "<1+1>"


def test_every_stop_id(folder):
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert stop_token_ids(model, tokenizer) == {2}
    model.generation_config.eos_token_id = [5, 2]
    model.config.eos_token_id = 7
    assert stop_token_ids(model, tokenizer) == {2, 5, 7}
    assert stop_token_ids(model) == {2, 5, 7}


def test_dropout_is_off_everywhere():
    model = tiny_model("gpt2")
    assert any(m.p == 0.1 for m in model.modules() if isinstance(m, nn.Dropout))
    model.transformer.h[0].attn.attention_dropout = 0.2
    disable_dropout(model)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))
    assert model.transformer.h[0].attn.attention_dropout == 0


@pytest.mark.parametrize("name", BUILDERS)
def test_trunk_and_head_give_the_models_own_logits(name):
    model = tiny_model(name)
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = trunk(model)(ids, use_cache=False).last_hidden_state
    assert torch.equal(logits_of(hidden, head_of(model)), model(ids, use_cache=False).logits)
    assert head_of(model).weight is model.get_output_embeddings().weight
    assert head_of(model).logit_softcap == (2.0 if name == "gemma2" else None)


def test_a_head_that_is_no_linear_layer():
    model = tiny_model("llama")
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(ModelError, match="the head is Identity"):
        head_of(model)


def test_critic_starts_at_zero_and_comes_back(folder, tmp_path):
    critic = load_critic(folder, dtype=torch.float64)
    (micro,) = pack(ragged_batch([4], [[3, 5]]), max_tokens=100)
    assert torch.equal(critic.value_head(trunk_rows(critic, micro)), torch.zeros(micro.num_rows, 1))
    assert {n.split(".")[0] for n, _ in critic.named_parameters()} == {"trunk", "value_head"}
    policy = load_model(folder, dtype=torch.float64)
    assert torch.equal(trunk_rows(critic, micro), trunk_rows(policy, micro))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    values = critic.value_head(trunk_rows(critic, micro))
    assert values.abs().min() > 0
    critic.save_pretrained(tmp_path)
    again = load_critic(str(tmp_path), dtype=torch.float64)
    assert float((again.value_head(trunk_rows(again, micro)) - values).abs().max()) < 1e-12


def test_critic_with_gradient_checkpointing(folder):
    (micro,) = pack(ragged_batch([4], [[3, 5]]), max_tokens=100)
    gradients = []
    for checkpointing in (False, True):
        critic = load_critic(folder, dtype=torch.float64, gradient_checkpointing=checkpointing)
        assert critic.training == checkpointing
        nn.init.ones_(critic.value_head.weight)
        critic.value_head(trunk_rows(critic, micro)).square().sum().backward()
        gradients.append([p.grad for p in critic.parameters()])
    for a, b in zip(*gradients):
        assert float((a - b).norm() / a.norm()) < 1e-12


def test_prepare_model_keeps_a_model_in_place():
    model = tiny_model("llama")
    assert prepare_model(model) is model
    assert not model.training


def test_without_network_the_hub_is_not_asked_again_and_again(monkeypatch):
    asked = []

    def no_name(*args, **kwargs):
        asked.append(args)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HF_HUB_OFFLINE", *(f"{p}_proxy" for p in ("http", "https", "all", "HTTP", "HTTPS", "ALL"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    hub.hub_reachable.cache_clear()
    try:
        for load in (load_model, load_tokenizer):
            with pytest.raises(
                ModelError, match="not in the local cache, and the hub cannot be reached; or give a folder"
            ):
                load("nobody/such-a-model")
    finally:
        hub.hub_reachable.cache_clear()
    assert len(asked) <= 2  # transformers asks once more for a list of templates; six times per file without the check


def test_parameters_that_are_tied_on_meta_stay_one():
    with parameters_on_meta():
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
    assert embedding.weight.is_meta and head.weight is embedding.weight
