"""The KL to the reference over the whole vocabulary: both heads in chunks of rows, no [N, V] kept for the backward.

Each chunk's logits are made again in the backward, so that at most `CHUNK_ELEMENTS` of them exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastrl.algorithms.kl import full_kl
from fastrl.data.packing import MicroBatch
from fastrl.models.forward import hidden_rows
from fastrl.models.head import head_of, logits_of
from fastrl.trainer.actor import PolicyModel
from fastrl.trainer.precision import autocast
from fastrl.trainer.sequence import merge, own_rows

CHUNK_ELEMENTS = 1 << 25  # of one model's logits: 128 MiB in float32


class FullKL:
    """KL(policy || reference) of the rows of a micro-batch, for the loss (with gradient) and for the reward."""

    def __init__(self, policy: PolicyModel, reference: PolicyModel) -> None:
        self.policy, self.reference = policy, reference

    def rows(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """KL of each row: hidden [N, H] of the policy, with gradient -> [N] nats. Rows as `own_rows` leaves them."""
        device = hidden.device
        with torch.no_grad(), autocast(self.policy.dtype, device):
            ref_hidden = hidden_rows(self.reference.model, micro)
        head, ref_head = head_of(self.policy.model), head_of(self.reference.model)

        def chunk(rows: Tensor, ref_rows: Tensor) -> Tensor:
            with autocast(self.policy.dtype, device):
                logits = logits_of(rows, head)
                with torch.no_grad():
                    ref_logits = logits_of(ref_rows, ref_head)
            return full_kl(logits, ref_logits, temperature=self.policy.temperature)

        return in_chunks(chunk, hidden, ref_hidden, max(1, CHUNK_ELEMENTS // head.weight.shape[0]))

    @torch.no_grad()
    def of_batch(self, micro_batches: Sequence[MicroBatch], like: Tensor) -> Tensor:
        """KL [T] of every response token under the policy as it is; 0 where no row asks for one. like: [T] float."""
        out = torch.zeros_like(like)
        for micro in micro_batches:
            own = own_rows(self.policy.model, micro)
            with autocast(self.policy.dtype, like.device):
                hidden = hidden_rows(self.policy.model, own)
            out[own.token_index] = self.rows(own, hidden).to(out.dtype)
        return merge(self.policy.model, out)


def in_chunks(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, size: int) -> Tensor:
    """function(a, b) of row chunks, one after another, computed again in the backward: [N, ...] each -> [N]."""
    parts = [
        checkpoint(function, rows, ref_rows, use_reentrant=False, preserve_rng_state=False)
        for rows, ref_rows in zip(a.split(size), b.split(size))
    ]
    return torch.cat(parts) if parts else function(a, b)
