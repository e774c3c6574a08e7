"""Weights in common memory: a stand-in engine with fused projections sees every update, and no bytes move."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastrl.dist.fused_layout import fused_layout
from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.weight_source import ModelSource
from fastrl.dist.zero_copy import SharedWeights, SharedWeightsReceiver, zero_copy_problem
from fastrl.errors import WeightError
from fastrl.trainer.optim import Optimizer, Schedule
from fastrl.trainer.state import load_model_state, model_state
from fastrl.trainer.view_optimizer import ViewOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from engine_child import Child

H, HEADS, KV, FF, V = 16, 4, 2, 24, 70  # hidden, query heads, key/value heads, feed-forward, vocabulary
D = H // HEADS


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(H, H), nn.Linear(H, KV * D)
        self.v_proj, self.o_proj = nn.Linear(H, KV * D), nn.Linear(H, H, bias=False)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, FF, bias=False), nn.Linear(H, FF, bias=False)
        self.down_proj = nn.Linear(FF, H, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(), FeedForward(), nn.RMSNorm(H)


class Decoder(nn.Module):
    """A small decoder by Hugging Face's names; the head is tied."""

    def __init__(self, seed=0, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(V, H)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.model.norm = nn.RMSNorm(H)
        self.lm_head = nn.Linear(H, V, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            a, m = layer.self_attn, layer.mlp
            x = x + a.o_proj(attend(a.q_proj(x), a.k_proj(x), a.v_proj(x)))
            x = x + m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))
            x = layer.norm(x)
        return self.lm_head(self.model.norm(x))


def attend(q, k, v):
    q, k, v = (t.view(-1, n, D).transpose(0, 1) for t, n in ((q, HEADS), (k, KV), (v, KV)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).reshape(-1, H)


def engine_logits(tensors, ids):
    """The same decoder from the engine's fused tensors, in float32."""
    t = {name: tensor.float() for name, tensor in tensors.items()}
    x = t["model.embed_tokens.weight"][ids]
    for i in range(2):
        p = f"model.layers.{i}."
        qkv = F.linear(x, t[p + "self_attn.qkv_proj.weight"], t[p + "self_attn.qkv_proj.bias"])
        x = x + attend(*qkv.split((H, KV * D, KV * D), -1)) @ t[p + "self_attn.o_proj.weight"].T
        gate, up = F.linear(x, t[p + "mlp.gate_up_proj.weight"]).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
        x = F.rms_norm(x, (H,), t[p + "norm.weight"])
    return F.rms_norm(x, (H,), t["model.norm.weight"]) @ t["lm_head.weight"][:V].T


EXPECTED = {"model.embed_tokens.weight": (128, H), "model.norm.weight": (H,)}  # 70 rows filled up to 128
for i in range(2):
    prefix = f"model.layers.{i}."
    EXPECTED |= {
        prefix + "self_attn.qkv_proj.weight": (H + 2 * KV * D, H),
        prefix + "self_attn.qkv_proj.bias": (H + 2 * KV * D,),
        prefix + "self_attn.o_proj.weight": (H, H),
        prefix + "mlp.gate_up_proj.weight": (2 * FF, H),
        prefix + "mlp.down_proj.weight": (H, FF),
        prefix + "norm.weight": (H,),
    }
SPECS = [TensorSpec(name, shape, torch.bfloat16) for name, shape in EXPECTED.items()]
IDS = torch.arange(12) * 5 % V


def test_an_update_moves_no_bytes_and_the_engine_computes_with_the_new_weights(tmp_path):
    model = Decoder()
    shared = SharedWeights(model, folder=tmp_path, timeout_s=20)

    def engine():
        receiver = SharedWeightsReceiver(shared.address, shared.token, timeout_s=20)
        tensors = receiver.accept(SPECS)
        seen = []
        for _ in range(3):
            version = receiver.wait(20)
            seen.append((version, engine_logits(tensors, IDS)))
        return seen

    child = Child(engine)
    optimizer = ViewOptimizer(model, Schedule(1e-2), name="policy", masters=shared.masters)
    wanted = []
    for version in (1, 2, 3):
        delivery = shared.publish(version, verify=True)
        assert delivery.bytes == 0 and set(delivery.checksums) == set(EXPECTED)
        with torch.no_grad():
            wanted.append(reference_logits(model))
        F.cross_entropy(model(IDS)[:-1].float(), IDS[1:]).backward()
        assert optimizer.step()[1]
    seen = child.result()
    shared.close()
    assert list(tmp_path.iterdir()) == []
    assert [version for version, _ in seen] == [1, 2, 3]
    for (_, got), want in zip(seen, wanted):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (wanted[1] - wanted[0]).abs().max() > 0.01  # the updates are not nothing


def reference_logits(model):
    """A float32 model of its own with the trainer's present weights."""
    plain = Decoder(seed=9)
    plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return plain(IDS)


def test_masters_follow_plain_adamw_in_float32_and_views_are_their_rounding():
    model, plain = Decoder(), Decoder()
    shared = SharedWeights(model)
    optimizer = ViewOptimizer(
        model, Schedule(3e-3), name="policy", masters=shared.masters, weight_decay=0.1, max_grad_norm=0.5
    )
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    oracle = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3
    )
    for step in range(4):
        for micro in range(3):  # gradients of micro-batches add up in float32
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.manual_seed(100 * step + micro + p.numel())
                gradient = torch.randn(p.shape).bfloat16()
                (p * gradient).sum().backward()
                q.grad = gradient.float() + (0 if q.grad is None else q.grad)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        oracle.step()
        oracle.zero_grad()
        optimizer.step()
    for p, q, m in zip(model.parameters(), plain.parameters(), optimizer.parameters, strict=True):
        torch.testing.assert_close(m, q, atol=1e-6, rtol=1e-6)
        assert torch.equal(p, m.bfloat16()) and p.grad is None and m.grad is None
    shared.close()


def test_a_checkpoint_is_that_of_a_plain_run_and_continues_either_way():
    """bf16 views save their float32 masters, under tied names too; a plain float32 model reads them, and back."""
    first, second, plain = Decoder(seed=1), Decoder(seed=2), Decoder(seed=3)
    shared = [SharedWeights(m) for m in (first, second)]
    optimizers = [
        ViewOptimizer(m, Schedule(1e-2), name="policy", masters=s.masters) for m, s in zip((first, second), shared)
    ]
    ordinary = Optimizer(plain, Schedule(1e-2), name="policy")

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        for p in model.parameters():
            (p * torch.randn(p.shape).bfloat16()).sum().backward()
        optimizer.step()

    step(first, optimizers[0], 0)
    state = copy.deepcopy(model_state(first, optimizers[0]))
    assert {t.dtype for t in state["model"].values()} == {torch.float32}
    assert torch.equal(state["model"]["lm_head.weight"], optimizers[0].parameters[0])
    load_model_state(second, optimizers[1], state, optimizers[0].state_dict())
    load_model_state(plain, ordinary, copy.deepcopy(state), optimizers[0].state_dict())
    for model, optimizer in ((first, optimizers[0]), (second, optimizers[1]), (plain, ordinary)):
        step(model, optimizer, 1)
    for p, q, m, r in zip(first.parameters(), second.parameters(), optimizers[1].parameters, plain.parameters()):
        assert torch.equal(p, q) and torch.equal(p, m.bfloat16()) and torch.equal(m, r)
    back = copy.deepcopy(model_state(plain, ordinary))
    step(second, optimizers[1], 2)
    load_model_state(second, optimizers[1], back, ordinary.state_dict())
    for p, m, r in zip(second.parameters(), optimizers[1].parameters, plain.parameters()):
        assert torch.equal(m, r) and torch.equal(p, r.bfloat16())
    shared[1].check_views()
    for weights in shared:
        weights.close()


def test_an_engine_with_another_layout_is_refused_and_a_lost_view_is_noticed():
    model = Decoder()
    shared = SharedWeights(model, timeout_s=20)
    wrong = [s for s in SPECS if "0.mlp.gate_up" not in s.name]

    def engine():
        receiver = SharedWeightsReceiver(shared.address, shared.token, timeout_s=20)
        with pytest.raises(WeightError, match="gate_up_proj"):
            receiver.accept(wrong)

    child = Child(engine)
    with pytest.raises(
        WeightError, match=r"rollout\.zero_copy: .*model\.layers\.0\.mlp\.gate_up_proj\.weight is unknown"
    ):
        shared.publish(1)
    child.result()
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with pytest.raises(WeightError, match=r"model\.norm\.weight has left the memory"):
        shared.publish(2)
    shared.close()


def test_an_engine_killed_before_an_update_is_named(tmp_path):
    shared = SharedWeights(Decoder(), folder=tmp_path, timeout_s=20)

    def engine():
        receiver = SharedWeightsReceiver(shared.address, shared.token, timeout_s=20)
        receiver.accept(SPECS)
        receiver.wait(20)

    child = Child(engine)
    shared.publish(1)
    child.result()
    with pytest.raises(WeightError, match="the engine process ended before version 2"):
        shared.publish(2)
    child = Child(engine)  # started again: it maps the same memory
    assert shared.publish(2, verify=True).bytes == 0
    child.result()
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_shared_says_why():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2)])

    half = nn.Module()
    half.q_proj, half.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    holder = nn.Module()
    holder.self_attn = half
    counting = nn.Linear(2, 2)
    counting.register_buffer("counts", torch.arange(3))
    wrapped = nn.Module()
    wrapped.mlp = Experts()
    for model, text in (
        (wrapped, "experts are laid out differently"),
        (holder, r"no self_attn\.v_proj\.weight"),
        (counting, "counts is torch.int64"),
    ):
        problem = zero_copy_problem(model)
        assert problem is not None
        with pytest.raises(WeightError, match=text):
            SharedWeights(model)
    assert zero_copy_problem(Decoder()) is None


def test_every_view_is_its_rows_of_the_fused_tensor():
    model = Decoder(tied=False)
    want = {name: tensor.detach().clone().bfloat16() for name, tensor in model.state_dict().items()}
    source = ModelSource(model, tied=True)
    layout = fused_layout(source.specs(source.entries()), torch.bfloat16)
    shared = SharedWeights(model)
    engine = layout.engine_views(shared.block)
    assert {n: tuple(t.shape) for n, t in engine.items()} == EXPECTED | {"lm_head.weight": (128, H)}
    p = "model.layers.1.self_attn."
    rows = torch.cat([want[f"{p}{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(engine[p + "qkv_proj.weight"], rows)
    p = "model.layers.0.mlp."
    assert torch.equal(
        engine[p + "gate_up_proj.weight"], torch.cat([want[p + f"{x}_proj.weight"] for x in ("gate", "up")])
    )
    assert torch.equal(engine["lm_head.weight"][:V], want["lm_head.weight"]) and not engine["lm_head.weight"][V:].any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]) and tensor.data_ptr() % 2 == 0, name
    shared.close()


REAL = """
import json, os, sys
os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from fastrl.dist.fused_layout import fused_layout
from fastrl.dist.weight_source import ModelSource
from vllm.engine.arg_utils import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, ensure_model_parallel_initialized
from vllm.model_executor.model_loader.utils import initialize_model
out = []
for number, folder in enumerate(sys.argv[1:]):
    config = EngineArgs(model=folder, dtype="bfloat16", skip_tokenizer_init=True).create_engine_config()
    with set_current_vllm_config(config):
        if number == 0:
            init_distributed_environment(1, 0, "tcp://127.0.0.1:%d" % (20000 + os.getpid() % 20000), 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            engine = initialize_model(vllm_config=config)
    have = {n: list(p.shape) for n, p in engine.named_parameters(remove_duplicate=False)}
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    policy.tie_weights()
    source = ModelSource(policy, tied=True)
    layout = fused_layout(source.specs(source.entries()), torch.bfloat16)
    ours = {t.name: list(t.shape) for t in layout.tensors}
    ours |= {alias: ours[name] for alias, name in layout.aliases.items()}
    out.append([have, ours])
print("RESULT " + json.dumps(out))
"""


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_layout_is_vllms_own(tmp_path):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    kinds = {"Llama": LlamaConfig, "Qwen2": Qwen2Config, "Qwen3": Qwen3Config}
    folders = []
    for name, kind in kinds.items():
        for tied in (True, False):
            options = {"head_dim": 8} if name == "Qwen3" else {}
            config = kind(**sizes, tie_word_embeddings=tied, architectures=[f"{name}ForCausalLM"], **options)
            folders.append(str(tmp_path / f"{name}{tied}"))
            config.save_pretrained(folders[-1])
    run = subprocess.run([sys.executable, "-c", REAL, *folders], capture_output=True, text=True, timeout=200)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stderr[-3000:]
    for folder, (have, ours) in zip(folders, json.loads(lines[0][7:]), strict=True):
        assert have == ours, folder


ENGINE = """
import json, os, sys
os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
import torch
from vllm import LLM, SamplingParams
from fastrl.dist.weight_plan import TensorSpec
from fastrl.dist.zero_copy import SharedWeightsReceiver
from fastrl.rollout.vllm.shared import use_shared_weights
address, token, folder = sys.argv[1:]
receiver = SharedWeightsReceiver(address, token, timeout_s=60)
load_format = use_shared_weights(
    lambda wanted: receiver.accept([TensorSpec(*fields) for fields in wanted]), receiver.layout.num_bytes)
llm = LLM(model=folder, load_format=load_format, dtype="float32", skip_tokenizer_init=True, max_model_len=64,
          kv_cache_memory_bytes=1 << 24, enforce_eager=True)
for _ in range(3):
    version = receiver.wait(120)
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": [5, 9, 4, 30, 8]}], params, use_tqdm=False)
    tokens = list(out.outputs[0].token_ids)
    logprobs = [position[t].logprob for position, t in zip(out.outputs[0].logprobs, tokens)]
    print("RESULT " + json.dumps([version, tokens, logprobs]), flush=True)
"""


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_computes_with_the_trainers_own_memory(tmp_path, tied):
    """Real vLLM on the CPU: greedy tokens and log-probs are Hugging Face's after every update, and no byte moves."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=131,
        hidden_size=128,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    model.save_pretrained(tmp_path / "model")
    shared = SharedWeights(model, dtype=torch.float32, timeout_s=120)
    command = [sys.executable, "-c", ENGINE, shared.address, shared.token, str(tmp_path / "model")]
    with (
        open(tmp_path / "errors", "w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as engine,
    ):
        try:
            seen = []
            for version in (1, 2, 3):
                try:
                    assert shared.publish(version, verify=True).bytes == 0
                except WeightError as error:
                    raise AssertionError((tmp_path / "errors").read_text()[-3000:]) from error
                line = next((x for x in engine.stdout if x.startswith("RESULT ")), None)
                assert line is not None, (tmp_path / "errors").read_text()[-3000:]
                got_version, tokens, logprobs = json.loads(line[7:])
                want_tokens, want_logprobs = greedy(model, [5, 9, 4, 30, 8], 12)
                assert got_version == version and tokens == want_tokens
                assert max(abs(a - b) for a, b in zip(logprobs, want_logprobs)) < 1e-4
                seen.append(tokens)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.05)
            assert seen[0] != seen[1] != seen[2]
        finally:
            engine.kill()
    shared.close()


@torch.no_grad()
def greedy(model, ids, count):
    """Tokens and log-probs by ordinary forward passes."""
    tokens, log_probs = [], []
    for _ in range(count):
        row = torch.log_softmax(model(torch.tensor([[*ids, *tokens]])).logits[0, -1].double(), -1)
        tokens.append(int(row.argmax()))
        log_probs.append(float(row[tokens[-1]]))
    return tokens, log_probs
