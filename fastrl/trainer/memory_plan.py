"""How much device memory a run will need, worked out from a model's shape: what `docs/memory.md` is made from.

Nothing is loaded and no run reads it: the engine's share of a GPU comes from the loaded model, in
`fastrl.trainer.engine_memory`.

P parameters, N ranks that shard them, H hidden size, L layers, V vocabulary, Hq / Hkv query and key heads of D, I width
of the gated product, T rows of a micro-batch on one rank. Bytes per rank, bfloat16 compute over float32 masters:

    masters 4 P/N     AdamW 8 P/N     gradients 4 P/N  (float32, reduced)
    gathered weights      N > 1: 2 bytes x (two layers + embedding and head);   N = 1: 2 P
    gradients in flight   N > 1: 6 bytes x (one layer + embedding and head): bfloat16, and float32 for the reduction
    activations of a row  see `activation_bytes`
    head                  one chunk of logits (2 bytes), hidden rows and their gradients
    keys and values       4 L Hkv D per token (2 numbers of 2 bytes), over the engine's tensor-parallel ranks
    engine weights        2 P over its tensor-parallel ranks; nothing while it sleeps at level 2
    staging               two buckets of the weight delivery

A critic keeps masters and moments of its own and takes turns with the policy. A reference lies on the host between its
uses. The peak of a step is the largest phase. This is a model: nothing of it was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

GIB = float(2**30)
HEAD_CHUNK_LOGITS = 2**28  # logits that exist at a time (fastrl.kernels.linear_log_prob)
BUCKET_BYTES = 2.0**29  # of the weight delivery; there are two
RESERVE_BYTES = 6.0 * 2**30  # CUDA contexts of trainer and engine, libraries' workspaces, fragmentation

Checkpointing = Literal["none", "full"]


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a dense decoder with gated products that decide about memory."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = True
    qkv_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: four products of attention, three of the gated product, two norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * q + 2 * self.hidden * kv + (q + 2 * kv if self.qkv_bias else 0)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head (the same matrix when tied), last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """P."""
        return self.layers * self.layer_parameters + self.root_parameters


def activation_bytes(shape: ModelShape, checkpointing: Checkpointing = "full", *, fused: bool = True) -> float:
    """Bytes that one row keeps for the backward pass, bfloat16.

    A layer keeps its input and the normed input (4 H), query, key and value (2 (Hq + 2 Hkv) D), the attention's output
    (2 Hq D), the second norm's input and output (4 H), gate, up and their product (6 I). Without fused norms and gated
    products (model.liger) float32 copies of the norms' inputs (16 H) and the activated gate (2 I) come on top. Under
    `full` every layer keeps its input (2 H) only, and one layer at a time is computed again.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 8 * shape.hidden + 2 * (q + 2 * kv) + 2 * q + 6 * shape.intermediate
    if not fused:
        layer += 16 * shape.hidden + 2 * shape.intermediate
    if checkpointing == "full":
        return float(2 * shape.hidden * shape.layers + layer)
    return float(layer * shape.layers)


def kv_bytes(shape: ModelShape) -> float:
    """Bytes of keys and values per token in the engine, all its ranks together."""
    return 4.0 * shape.layers * shape.kv_heads * shape.head_dim


@dataclass(frozen=True)
class Setup:
    """How a run is laid out."""

    shard: int = 1  # N: ranks that share parameters, gradients and optimizer state
    rows: int = 16384  # run.max_tokens_per_microbatch
    sequence: int = 1  # ranks that share a micro-batch
    checkpointing: Checkpointing = "full"
    fused: bool = True
    critic: bool = False
    engine_ranks: int = 1  # tensor parallelism of the engine
    offload: bool = False  # masters and moments live on the host


def state_bytes(shape: ModelShape, setup: Setup) -> float:
    """Masters and moments that stay on the device through the step."""
    if setup.offload:
        return 0.0
    return 12.0 * shape.parameters / setup.shard * (2 if setup.critic else 1)


def update_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """What the update holds per rank, by name; the sum is the phase's peak."""
    sharded = setup.shard > 1
    layer, root, total = shape.layer_parameters, shape.root_parameters, shape.parameters
    rows = setup.rows / setup.sequence
    logits = min(HEAD_CHUNK_LOGITS, rows * shape.vocabulary)
    return {
        "state": state_bytes(shape, setup),
        "gradients": 4.0 * total / setup.shard,
        "gathered weights": 2.0 * (2 * layer + root) if sharded else 2.0 * total,
        "gradients in flight": 6.0 * (layer + root) if sharded else 0.0,
        "activations": rows * activation_bytes(shape, setup.checkpointing, fused=setup.fused),
        "head": 2.0 * logits + 4.0 * rows * shape.hidden,
    }


def generation_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """What generation holds per rank before the first key and value, by name."""
    return {
        "state": state_bytes(shape, setup),
        "engine weights": 2.0 * shape.parameters / setup.engine_ranks,
        "staging": 2 * BUCKET_BYTES,
    }


def kv_tokens(shape: ModelShape, setup: Setup, device_gib: float) -> int:
    """Tokens of keys and values that fit beside the rest during generation, per engine (all its ranks); 0 if none."""
    used = sum(generation_bytes(shape, setup).values()) + RESERVE_BYTES
    free = (device_gib * GIB - used) * setup.engine_ranks
    return max(int(free // kv_bytes(shape)), 0)


def fits(shape: ModelShape, setup: Setup, device_gib: float) -> bool:
    """True when the update fits, and generation with room for keys and values of 16 sequences of 4096 tokens."""
    update = sum(update_bytes(shape, setup).values()) + RESERVE_BYTES
    return update <= device_gib * GIB and kv_tokens(shape, setup, device_gib) >= 16 * 4096


def smallest_engine(shape: ModelShape, setup: Setup, device_gib: float, most: int) -> Setup | None:
    """The setup with the fewest engine ranks (1, 2, 4, ... `most`) under which the run fits; None if none does."""
    ranks = 1
    while ranks <= most:
        tried = replace(setup, engine_ranks=ranks)
        if fits(shape, tried, device_gib):
            return tried
        ranks *= 2
    return None


# Published dense decoders by size.
SHAPES = {
    "0.5B": ModelShape(24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True),
    "1.5B": ModelShape(28, 1536, 12, 2, 128, 8960, 151936, qkv_bias=True),
    "3B": ModelShape(36, 2048, 16, 2, 128, 11008, 151936, qkv_bias=True),
    "7B": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, tied=False, qkv_bias=True),
    "14B": ModelShape(48, 5120, 40, 8, 128, 13824, 152064, tied=False, qkv_bias=True),
    "32B": ModelShape(64, 5120, 40, 8, 128, 27648, 152064, tied=False, qkv_bias=True),
    "70B": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, tied=False),
}
