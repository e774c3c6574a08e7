"""Log-probs and gradients the plain way: padded sequences, the model's own eager attention, own log-softmax."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastrl.data.batch import RolloutBatch
from fastrl.data.packing import pack
from fastrl.models.double import keep_double
from fastrl.models.forward import hidden_rows
from fastrl.models.head import head_of, logits_of


def padded_log_prob(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Log-probs [T] from one right-padded batch of all sequences; `model` has its eager attention."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    responses = batch.response_ids.split(batch.lengths.tolist())
    sequences = [torch.cat([prompts[g], r]) for g, r in zip(batch.group_index.tolist(), responses)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    with keep_double(model):
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
    log_prob = torch.log_softmax(logits, dim=-1)
    parts = []
    for s, (sequence, response) in enumerate(zip(sequences, responses)):
        rows = log_prob[s, len(sequence) - len(response) - 1 : len(sequence) - 1]
        parts.append(rows.gather(1, response[:, None]).squeeze(1))
    return torch.cat(parts)


def padded_gradients(model: PreTrainedModel, batch: RolloutBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs [T], gradient of sum(weights * log_prob) per parameter)."""
    model.zero_grad()
    log_prob = padded_log_prob(model, batch)
    (log_prob * weights).sum().backward()
    return log_prob.detach(), _take_gradients(model)


def packed_gradients(
    model: PreTrainedModel, batch: RolloutBatch, weights: Tensor, *, max_tokens: int, share_prompts: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same through micro-batches; log-probs that no micro-batch computed are NaN."""
    model.zero_grad()
    out = torch.full((batch.num_tokens,), torch.nan, dtype=weights.dtype)
    for micro in pack(batch, max_tokens=max_tokens, share_prompts=share_prompts):
        logits = logits_of(hidden_rows(model, micro), head_of(model))
        log_prob = torch.log_softmax(logits, dim=-1).gather(1, micro.labels[:, None]).squeeze(1)
        (log_prob * weights[micro.token_index]).sum().backward()
        out[micro.token_index] = log_prob.detach()
    return out, _take_gradients(model)


def _take_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def gradient_error(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest norm(difference) / norm over the tensors.

    A tensor whose gradient is zero but for rounding (a key bias: softmax does not see it) is measured against 1e-3 of
    the largest norm.
    """
    assert ours.keys() == reference.keys()
    floor = 1e-3 * max(float(g.norm()) for g in reference.values())
    return max(float((ours[n] - g).norm()) / max(float(g.norm()), floor) for n, g in reference.items())
