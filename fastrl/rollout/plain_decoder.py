"""A second forward pass for plain decoders (Llama, Qwen2, Qwen3, Mistral), equal to the model's own, faster on a CPU.

Queries, keys and values come from one product, gate and up from another, and the weights of every product are kept in
oneDNN's blocked layout, which for 4 to 64 rows is 1.4 to 1.7 times as fast as MKL on the plain one. Those copies cost
the size of the parameters while generating; `release` frees them, and where few passes are expected none are made.
Where oneDNN cannot (float64, other devices) the model's own tensors are read in place by the usual products. Sharded
parameters are gathered once per update instead of once per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear, pad, rms_norm, silu
from transformers import PreTrainedModel

from fastrl.models.cpu import OneDnnLinear
from fastrl.models.head import HeadParameters, cap_logits, head_of, trunk
from fastrl.rollout.layouts import DecodeLayout, PackedPrompts, PrefillLayout
from fastrl.rollout.runner import Runner

_PLAIN = frozenset(["LlamaModel", "Qwen2Model", "Qwen3Model", "MistralModel"])
_PACK_ROWS = 32  # the number of rows oneDNN chooses its layout for; the layout then serves any number
_LEAST_ROWS = 4  # fewer rows are filled up: oneDNN takes a slower path below this
_PAYBACK_PASSES = 8  # packing costs what it saves in about 6 passes (docs/decisions/002-embedded-generation.md)
_PACKED_DTYPES = (torch.float32, torch.bfloat16)

Product = Callable[[Tensor], Tensor]  # x [M, I] -> x W^T + b [M, O]
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """What one decoder layer computes with."""

    input_norm: Norm
    qkv: Product
    query_norm: Norm | None
    key_norm: Norm | None
    output: Product
    post_norm: Norm
    gate_up: Product
    down: Product
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None


@dataclass(frozen=True)
class Weights:
    """Everything of the model that the forward pass reads."""

    embedding: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Product
    head_parameters: HeadParameters


class PlainDecoder:
    """See Runner."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, autocast_dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.device = model, device
        self.trunk: Any = trunk(model)
        self.dtype = autocast_dtype or next(model.parameters()).dtype
        self.can_pack = device.type == "cpu" and torch.backends.mkldnn.is_available() and self.dtype in _PACKED_DTYPES
        self.packs = self.can_pack
        self._weights: Weights | None = None

    def hidden(self, tokens: np.ndarray, positions: np.ndarray, layout: PrefillLayout | DecodeLayout) -> Tensor:
        """See Runner."""
        weights = self._ready()
        padding = max(0, _LEAST_ROWS - len(tokens)) if self.packs else 0
        tokens, positions = np.pad(tokens, (0, padding)), np.pad(positions, (0, padding))
        h = embedding(torch.from_numpy(tokens).to(self.device), weights.embedding)
        cos, sin = self.trunk.rotary_emb(h[None], torch.from_numpy(positions).to(self.device)[None])
        cos, sin = cos[0, :, None].to(self.dtype), sin[0, :, None].to(self.dtype)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._projections(layer, layer.input_norm(h), cos, sin)
            if padding:
                q, k, v = q[:-padding], k[:-padding], v[:-padding]
            mixed = layout.attend_rows(index, q, k, v, layer.scaling, layer.sliding_window).flatten(1)
            h = h + layer.output(pad(mixed, (0, 0, 0, padding)) if padding else mixed)
            gate, up = layer.gate_up(layer.post_norm(h)).chunk(2, dim=-1)
            h = h + layer.down(silu(gate).mul_(up))
        return weights.norm(h[: len(h) - padding])

    def _projections(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, H] -> query [M, Hq, D] and key [M, Hkv, D], rotated, and value [M, Hkv, D]."""
        qkv = layer.qkv(x).unflatten(-1, (-1, layer.head_dim))  # [M, Hq + 2 Hkv, D]
        qk, v = qkv[:, : -layer.kv_heads], qkv[:, -layer.kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            qk = torch.cat([layer.query_norm(qk[:, : layer.heads]), layer.key_norm(qk[:, layer.heads :])], dim=1)
        qk = _rotate(qk.to(self.dtype), cos, sin)
        return qk[:, : layer.heads], qk[:, layer.heads :], v

    def logits(self, hidden: Tensor) -> Tensor:
        """See Runner."""
        weights = self._ready()
        return cap_logits(weights.head(hidden), weights.head_parameters)

    def expect(self, passes: int) -> None:
        """Pack when that pays; what is packed already stays so."""
        packs = self.can_pack and passes >= _PAYBACK_PASSES
        if packs and not self.packs:
            self.release()
        if self._weights is None:
            self.packs = packs

    def refresh(self) -> None:
        """Copies are made anew at the next forward pass; now where gathering them takes every rank."""
        self.release()
        if is_sharded(self.model):
            self._ready()

    def release(self) -> None:
        """Drop the copies."""
        self._weights = None

    def _ready(self) -> Weights:
        if self._weights is None:
            with torch.inference_mode(False), torch.no_grad():  # collectives refuse inference tensors
                self._weights = self._collect()
        return self._weights

    def _collect(self) -> Weights:
        head = head_of(self.model)
        return Weights(
            embedding=_whole(self.trunk.embed_tokens.weight),
            layers=tuple(self._layer(block) for block in self.trunk.layers),
            norm=self._norm(self.trunk.norm),
            head=self._product([head.weight], [head.bias]),
            head_parameters=head,
        )

    def _layer(self, block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp

        def product(*parts: nn.Linear) -> Product:
            return self._product([p.weight for p in parts], [p.bias for p in parts])

        has_norms = hasattr(attention, "q_norm")
        return Layer(
            input_norm=self._norm(block.input_layernorm),
            qkv=product(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=self._norm(attention.q_norm) if has_norms else None,
            key_norm=self._norm(attention.k_norm) if has_norms else None,
            output=product(attention.o_proj),
            post_norm=self._norm(block.post_attention_layernorm),
            gate_up=product(mlp.gate_proj, mlp.up_proj),
            down=product(mlp.down_proj),
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=int(attention.head_dim),
            scaling=float(attention.scaling),
            sliding_window=_sliding_window(attention, self.trunk),
        )

    def _norm(self, module: Any) -> Norm:
        """RMSNorm in float32 or wider; the result has the type of the input, or of the products if that is smaller."""
        weight, eps, dtype = _whole(module.weight), float(module.variance_epsilon), self.dtype
        if dtype == weight.dtype:
            return lambda x: rms_norm(x, weight.shape, weight, eps)
        return lambda x: rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(dtype)

    def _product(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
        """x -> the x W_i^T + b_i side by side."""
        parts = [_whole(w).to(self.dtype) for w in weights]
        offsets = [None if b is None else _whole(b).to(self.dtype) for b in biases]
        if self.packs:
            return PackedProduct(parts, offsets)
        one = _onednn_linear if self.can_pack else linear
        if len(parts) == 1:
            return lambda x: one(x, parts[0], offsets[0])
        return lambda x: torch.cat([one(x, w, b) for w, b in zip(parts, offsets)], dim=-1)


class PackedProduct:
    """x -> the x W_i^T + b_i side by side; the blocked copy is made at the first call."""

    def __init__(self, parts: list[Tensor], offsets: list[Tensor | None]) -> None:
        self.parts, self.packed = parts, None
        self.bias = None if offsets[0] is None else torch.cat([b for b in offsets if b is not None])

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            joined = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
            self.packed = torch.ops.mkldnn._reorder_linear_weight(joined.contiguous(), _PACK_ROWS)
            self.parts = []
        return _onednn_linear(x, self.packed, self.bias)


def _onednn_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [M, I] weight^T + bias; weight [O, I], plain or packed. On plain float32 ones still faster than MKL."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, h, D] rotated in the planes (i, i + D/2) by the angles of cos, sin [M, 1, D]."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank holds only parts of the parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def _whole(tensor: Tensor) -> Tensor:
    """A sharded parameter gathered, any other as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sliding_window(attention: Any, base: Any) -> int | None:
    holder = base.config if _plain_name(base) == "MistralModel" else attention  # Mistral reads it from its config
    return getattr(holder, "sliding_window", None)


def _plain_name(base: nn.Module) -> str | None:
    """The class name, seen through the subclass that sharding makes."""
    cls = type(base).__mro__[2] if isinstance(base, FSDPModule) else type(base)
    return cls.__name__ if cls.__name__ in _PLAIN else None


def why_not_plain(model: PreTrainedModel) -> str | None:
    """None if the model's trunk is one that PlainDecoder computes; otherwise the first thing that is different."""
    base = trunk(model)
    if _plain_name(base) is None:
        return f"{type(base).__name__} is not a plain decoder"
    for name, module in base.named_modules():
        if (module._forward_hooks or module._forward_pre_hooks) and not isinstance(module, FSDPModule):
            return f"{name or 'the model'} has forward hooks"
        last = name.rpartition(".")[2]
        if last.endswith("_proj") and type(module) not in (nn.Linear, OneDnnLinear):
            return f"{name} is {type(module).__name__}, not a plain linear layer"
        if last == "act_fn" and type(module).__name__ not in ("SiLU", "SiLUActivation"):
            return f"the activation is {type(module).__name__}"
    return None


@torch.inference_mode()
def largest_difference(a: Runner, b: Runner, device: torch.device, vocabulary_size: int) -> float:
    """Largest difference of the logits of two runners on a short probe, over the largest logit."""
    prompts = [[(7 * i + 3 * j) % vocabulary_size for i in range(6 - j)] for j in range(2)]
    logits = []
    for runner in (a, b):
        packed = PackedPrompts(prompts)
        rows = runner.hidden(packed.tokens, packed.positions, PrefillLayout(packed, device))
        logits.append(runner.logits(rows).double())
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
