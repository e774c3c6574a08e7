"""Stand-ins for both ends of a weight delivery: a policy of a real model's shapes, an engine with fused tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastrl.dist.fused_layout import FusedLayout, fused_layout
from fastrl.dist.weight_source import ModelSource
from fastrl.dist.weight_sync import TensorSpec

# hidden, layers, query heads, key/value heads, head size, feed-forward, vocabulary, tied, biases of q/k/v
SIZES = {
    "135M": (576, 30, 9, 3, 64, 1536, 49152, True, False),
    "1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True, True),
    "8B": (4096, 32, 32, 8, 128, 14336, 128256, False, False),
    "tiny": (64, 2, 4, 2, 16, 96, 1000, True, True),
}


class SyntheticPolicy(nn.Module):
    """Random parameters with the names and shapes of a dense decoder; it computes nothing."""

    def __init__(self, size: str, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        hidden, layers, heads, kv, head, ff, vocabulary, tied, bias = SIZES[size]
        self.options = {"dtype": dtype, "device": device}
        self.seed = 0
        self.add("model.embed_tokens.weight", vocabulary, hidden)
        for i in range(layers):
            p = f"model.layers.{i}."
            for name, rows in (("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head)):
                self.add(f"{p}self_attn.{name}.weight", rows, hidden)
                if bias:
                    self.add(f"{p}self_attn.{name}.bias", rows)
            self.add(f"{p}self_attn.o_proj.weight", hidden, heads * head)
            self.add(f"{p}mlp.gate_proj.weight", ff, hidden)
            self.add(f"{p}mlp.up_proj.weight", ff, hidden)
            self.add(f"{p}mlp.down_proj.weight", hidden, ff)
            self.add(f"{p}input_layernorm.weight", hidden)
            self.add(f"{p}post_attention_layernorm.weight", hidden)
        self.add("model.norm.weight", hidden)
        if not tied:
            self.add("lm_head.weight", vocabulary, hidden)

    def add(self, name: str, *shape: int) -> None:
        """One parameter under a dotted name."""
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        values = torch.empty(shape, **self.options)
        if values.device.type != "meta":  # there the shapes are all there is
            generator = torch.Generator(device=values.device).manual_seed(self.seed)
            values.normal_(0, 0.02, generator=generator)
        self.seed += 1
        owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """The manifest in `dtype`."""
        source = ModelSource(self, dtype)
        return source.specs(source.entries())


class SyntheticEngine:
    """An engine's own memory with fused qkv and gate_up; `load` copies one Hugging Face tensor to its rows."""

    def __init__(self, specs: list[TensorSpec], dtype: torch.dtype, device: str) -> None:
        self.layout: FusedLayout = fused_layout(specs, dtype)
        self.memory = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self.rows = self.layout.trainer_views(self.memory)
        self.tensors = self.layout.engine_views(self.memory)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor to where it belongs."""
        self.rows[name].copy_(tensor)


def probe_output(tensors: dict[str, Tensor], layers: int) -> Tensor:
    """A number per layer and column that depends on the fused weights: what an engine would compute, in small."""
    first = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    x = torch.linspace(-1, 1, first.shape[1], device=first.device, dtype=first.dtype)
    parts = []
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for name in ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"):
            parts.append(tensors[prefix + name] @ x)
    return torch.cat(parts)


def fused_reference(policy: SyntheticPolicy, layers: int) -> dict[str, Tensor]:
    """The fused tensors that `probe_output` reads, put together from the policy's parameters."""
    own = dict(policy.named_parameters())
    fused = {}
    for i in range(layers):
        p = f"model.layers.{i}."
        fused[p + "self_attn.qkv_proj.weight"] = torch.cat([own[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"])
        fused[p + "mlp.gate_up_proj.weight"] = torch.cat([own[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    return fused
