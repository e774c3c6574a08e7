"""What fastrl cannot compute exactly is refused when the model is loaded, by name and with the reason."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    GPTJConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    StableLmConfig,
    T5Config,
)

from fastrl.errors import ModelError
from fastrl.models.load import prepare_model
from fastrl.models.verify import refuse_by_name

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


REFUSED = {
    "alibi by name": (lambda: FalconConfig(alibi=True), r"falcon uses ALiBi"),
    "recurrent": (lambda: MambaConfig(num_hidden_layers=2), r"mamba has layers of type linear_attention: a state"),
    "hybrid": (lambda: JambaConfig(num_hidden_layers=4), r"jamba has layers of type linear_attention"),
    "convolutions": (lambda: Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), r"type conv"),
    "chunked": (lambda: Llama4TextConfig(num_hidden_layers=4), r"chunked_attention: attention in fixed chunks"),
    "encoder-decoder": (lambda: T5Config(), r"t5 is an encoder-decoder"),
    "router loss": (
        lambda: MixtralConfig(output_router_logits=True),
        r"router's auxiliary loss \(output_router_logits",
    ),
    "quantised": (lambda: GraniteConfig(quantization_config={"quant_method": "gptq"}), r"granite is quantised"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_configuration(name):
    config, message = REFUSED[name]
    with pytest.raises(ModelError, match=rf"model\.path = some/model: .*{message}"):
        refuse_by_name(config(), "some/model")


HAND_WRITTEN = {
    "bloom": lambda: BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: MptConfig(vocab_size=61, d_model=32, n_heads=4, n_layers=2),
    "gptj": lambda: GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=8),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_attention_that_is_not_called_through_the_interface(name):
    with pytest.raises(ModelError, match="0 of 2 layers attend through transformers' attention interface"):
        prepare_model(made(HAND_WRITTEN[name]()), name)


def test_a_model_that_drops_the_keyword():
    with pytest.raises(ModelError, match=r"StableLmAttention: .* keyword fastrl_layout, and it did not arrive"):
        prepare_model(made(StableLmConfig(**SMALL)), "stablelm")


ACCEPTED = {
    "cohere": lambda: CohereConfig(**SMALL, logit_scale=0.3),
    "granite": lambda: GraniteConfig(**SMALL, logits_scaling=5.0, attention_multiplier=0.3),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, sliding_window=3),
    "gpt_oss": lambda: GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters=None
    ),
    "opt": lambda: OPTConfig(
        vocab_size=61,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_scales_sinks_experts_and_learned_positions_are_right(name):
    """The probe at load compares with the model's own forward pass; it would raise."""
    prepare_model(made(ACCEPTED[name]()), name)


def test_a_cap_that_the_configuration_does_not_tell():
    """Something done to the logits that fastrl does not know of is found by numbers."""
    model = tiny_model("llama")
    inner = model.forward
    model.forward = lambda *args, **kwargs: capped(inner(*args, **kwargs))

    def capped(output):
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    with pytest.raises(ModelError, match=r"LlamaForCausalLM: its logits are not softcap\(scale"):
        prepare_model(model, "capped")


def test_a_norm_between_trunk_and_head():
    model = tiny_model("llama")

    class Scaled(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden * 1.1)

    head = Scaled(32, 61, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    with pytest.raises(ModelError, match="its logits are not softcap"):
        prepare_model(model, "scaled")
    trunk = model.model
    model.lm_head = nn.Linear(32, 61, bias=False, dtype=torch.float64)
    inner = trunk.norm.forward
    model.register_forward_pre_hook(lambda *_: setattr(trunk.norm, "forward", lambda h: inner(h) * 1.1))
    with pytest.raises(ModelError, match="something lies between its trunk and its head"):
        prepare_model(model, "between")


def test_a_layer_that_mixes_neighbours():
    """A convolution along the stream hides behind ordinary attention layers; the numbers give it away."""
    model = tiny_model("llama")
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda h: inner(h) + 0.1 * torch.roll(h, 1, dims=1)
    with pytest.raises(ModelError, match=r"with a shared prompt its hidden rows are off by .* relative to its own"):
        prepare_model(model, "mixing")


def test_dropped_window_and_cap():
    """A configuration that promises a window or a cap whose value does not reach the attention function."""
    model = tiny_model("mistral")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = without_window(model.config, inner)
    with pytest.raises(ModelError, match="sliding_window = 5 does not reach the attention function"):
        prepare_model(model, "windowless")
    model = tiny_model("gemma2")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    with pytest.raises(ModelError, match="attn_logit_softcapping is set, but does not reach"):
        prepare_model(model, "capless")


def without_window(config, inner):
    def forward(*args, **kwargs):
        window, config.sliding_window = config.sliding_window, None
        try:
            return inner(*args, **kwargs)
        finally:
            config.sliding_window = window

    return forward
