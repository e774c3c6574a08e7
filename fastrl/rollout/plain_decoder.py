"""A second forward pass for plain decoders (Llama, Qwen2, Qwen3, Mistral), equal to the model's own, faster on a CPU.

Queries, keys and values come from one product, gate and up from another, residuals are added inside the products, and
the weights are kept in oneDNN's blocked layout, which for 4 to 64 rows is 1.4 to 1.7 times as fast as MKL on the plain
one. In float32 the copies also take in the weights of the norms before them and the order and scale that the rotation
and the attention want. They cost the size of the parameters while generating; `release` frees them, and where few
passes are expected none are made. Where oneDNN cannot (float64, other devices) the model's own tensors are read in
place by the usual products. Sharded parameters are gathered once per update instead of once per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, pad, silu
from transformers import PreTrainedModel

from fastrl.models.cpu import OneDnnLinear
from fastrl.models.head import HeadParameters, cap_logits, head_of, trunk
from fastrl.rollout.layouts import RowsLayout
from fastrl.rollout.prefill import PackedPrompts, PrefillLayout
from fastrl.rollout.products import Norm, PackedProduct, Part, Product, fold_of, folded_norm, interleaved, norm_of
from fastrl.rollout.runner import Runner

_PLAIN = frozenset(["LlamaModel", "Qwen2Model", "Qwen3Model", "MistralModel"])
_LEAST_ROWS = 4  # fewer rows are filled up: oneDNN takes a slower path below this
_PAYBACK_PASSES = 8  # packing costs what it saves in about 6 passes (docs/decisions/002-embedded-generation.md)
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


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
    folded: bool  # norms, scale and order of the rotation are inside the products


class PlainDecoder:
    """See Runner."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, autocast_dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.device = model, device
        self.trunk: Any = trunk(model)
        self.parameter_dtype = next(model.parameters()).dtype
        self.dtype = autocast_dtype or self.parameter_dtype
        self.can_pack = device.type == "cpu" and torch.backends.mkldnn.is_available() and self.dtype in _PACKED_DTYPES
        self.packs = self.can_pack
        self._weights: Weights | None = None

    def hidden(self, tokens: np.ndarray, positions: np.ndarray, layout: RowsLayout) -> Tensor:
        """See Runner."""
        weights = self._ready()
        padding = max(0, _LEAST_ROWS - len(tokens)) if self.packs else 0
        tokens, positions = np.pad(tokens, (0, padding)), np.pad(positions, (0, padding))
        h = embedding(torch.from_numpy(tokens).to(self.device), weights.embedding)
        cos, sin = self.trunk.rotary_emb(h[None], torch.from_numpy(positions).to(self.device)[None])
        turn = _turn(cos[0], sin[0], weights.folded)
        for index, layer in enumerate(weights.layers):
            qkv = layer.qkv(layer.input_norm(h)).unflatten(-1, (-1, layer.head_dim))  # [M, Hq + 2 Hkv, D]
            self._rotate(layer, qkv, turn, weights.folded)
            mixed = layout.attend_rows(
                index, qkv[: len(qkv) - padding], layer.heads, layer.scaling, layer.sliding_window
            )
            h = layer.output(pad(mixed, (0, 0, 0, padding)) if padding else mixed, h)
            gate, up = layer.gate_up(layer.post_norm(h)).chunk(2, dim=-1)
            h = layer.down(silu(gate).mul_(up), h)
        return weights.norm(h[: len(h) - padding])

    @staticmethod
    def _rotate(layer: Layer, qkv: Tensor, turn: tuple[Tensor, ...], folded: bool) -> None:
        """Norms of queries and keys where the model has them, and the rotary embedding; in place."""
        if layer.query_norm is not None and layer.key_norm is not None:
            qkv[:, : layer.heads] = layer.query_norm(qkv[:, : layer.heads])
            qkv[:, layer.heads : -layer.kv_heads] = layer.key_norm(qkv[:, layer.heads : -layer.kv_heads])
        qk = qkv[:, : -layer.kv_heads]
        if folded:
            torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turn[0])
            return
        cos, sin = turn
        half = qk.shape[-1] // 2
        out = qk * cos
        out[..., :half].addcmul_(qk[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(qk[..., :half], sin[..., half:])
        qk.copy_(out)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Runner."""
        weights = self._ready()
        return cap_logits(weights.head(hidden), weights.head_parameters)

    def expect(self, passes: int) -> None:
        """Pack when that pays. Nothing else decides: a resumed run must compute what an uninterrupted one does."""
        packs = self.can_pack and passes >= _PAYBACK_PASSES
        if packs != self.packs:
            self.packs = packs
            self.refresh()

    def refresh(self) -> None:
        """Copies are made anew at the next forward pass; now where gathering them takes every rank."""
        self.release()
        self.prepare()

    def prepare(self) -> None:
        """Sharded parameters are gathered here; later some ranks may have nothing to generate and not take part."""
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
        folded = self.packs and self.dtype == self.parameter_dtype == torch.float32
        whole = Part(self._cast(head.weight), None if head.bias is None else self._cast(head.bias))
        norm = self.trunk.norm
        return Weights(
            embedding=_whole(self.trunk.embed_tokens.weight),
            layers=tuple(self._layer(block, folded) for block in self.trunk.layers),
            norm=norm_of(_whole(norm.weight), float(norm.variance_epsilon), self.dtype),
            head=PackedProduct([whole]) if self.packs else Product([whole], onednn=self.can_pack),
            head_parameters=head,
            folded=folded,
        )

    def _layer(self, block: Any, folded: bool) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        dim, has_norms = int(attention.head_dim), hasattr(attention, "q_norm")
        turned = {"interleave": dim} if folded else {}
        scale = float(attention.scaling) if folded and not has_norms else 1.0
        input_norm, input_columns = self._norm(block.input_layernorm, folded)
        post_norm, post_columns = self._norm(block.post_attention_layernorm, folded)
        query, key = self._part(attention.q_proj, factor=scale, **turned), self._part(attention.k_proj, **turned)
        return Layer(
            input_norm=input_norm,
            qkv=self._product([query, key, self._part(attention.v_proj)], input_columns),
            query_norm=self._head_norm(attention.q_norm, folded) if has_norms else None,
            key_norm=self._head_norm(attention.k_norm, folded) if has_norms else None,
            output=self._product([self._part(attention.o_proj)]),
            post_norm=post_norm,
            gate_up=self._product([self._part(mlp.gate_proj), self._part(mlp.up_proj)], post_columns),
            down=self._product([self._part(mlp.down_proj)]),
            heads=attention.q_proj.out_features // dim,
            kv_heads=attention.k_proj.out_features // dim,
            head_dim=dim,
            scaling=1.0 if scale != 1.0 else float(attention.scaling),
            sliding_window=_sliding_window(attention, self.trunk),
        )

    def _cast(self, tensor: Tensor) -> Tensor:
        return _whole(tensor).to(self.dtype)

    def _part(self, module: nn.Linear, **options: Any) -> Part:
        return Part(self._cast(module.weight), None if module.bias is None else self._cast(module.bias), **options)

    def _product(self, parts: list[Part], columns: Tensor | None = None) -> Product:
        return PackedProduct(parts, columns) if self.packs else Product(parts, onednn=self.can_pack)

    def _norm(self, module: Any, folded: bool) -> tuple[Norm, Tensor | None]:
        """A norm before a product, and what of it the product has to take in."""
        weight, eps = _whole(module.weight), float(module.variance_epsilon)
        if folded:
            return folded_norm(len(weight), eps, self.dtype), fold_of(weight)
        return norm_of(weight, eps, self.dtype), None

    def _head_norm(self, module: Any, folded: bool) -> Norm:
        """A norm of queries or keys, over the head's dimensions in their order."""
        weight = _whole(module.weight)
        return norm_of(interleaved(weight, len(weight)) if folded else weight, module.variance_epsilon, self.dtype)


def _turn(cos: Tensor, sin: Tensor, folded: bool) -> tuple[Tensor, ...]:
    """cos, sin [M, D] of the rotary embedding -> the factors [M, 1, D/2] complex, or [M, 1, D] twice."""
    if folded:
        half = cos.shape[-1] // 2
        return (torch.complex(cos[:, None, :half], sin[:, None, :half]),)
    return cos[:, None], sin[:, None]


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
