"""On-policy distillation: a teacher scores the tokens that the student sampled.  https://arxiv.org/abs/2306.13649

as reward       A_t = teacher_log_prob - log_prob, detached: minus the per-token reverse KL
as loss         k1 or k3 of log_prob against the teacher (`kl_divergence`)
forward KL      sum_v q_v (log q_v - log p_v), q the teacher, over the vocabulary or over the teacher's top k tokens
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl(logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) of each row over the vocabulary: logits, teacher_logits [N, V] -> [N] float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(wide) / temperature, -1)
    log_q = torch.log_softmax(teacher_logits.detach().to(wide) / temperature, -1)
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), torch.zeros_like(q)).sum(-1)


def top_k_forward_kl(
    logits: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor, *, temperature: float = 1.0, tail: bool = True
) -> Tensor:
    """KL(teacher || student) over the teacher's top k tokens.

    Args:
        logits: [N, V] of the student. teacher_ids: [N, K] int64. teacher_log_prob: [N, K], at the same temperature.
        tail: count all other tokens as one more outcome, so that the result stays a KL (never negative).

    Returns:
        [N] float32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(wide) / temperature, -1).gather(-1, teacher_ids)
    log_q = teacher_log_prob.detach().to(wide)
    q = log_q.exp()
    top = torch.where(q > 0, q * (log_q - log_p), torch.zeros_like(q)).sum(-1)
    if not tail:
        return top
    tiny = torch.finfo(wide).tiny
    rest_q = (1.0 - q.sum(-1)).clamp(min=0.0)
    rest_p = (1.0 - log_p.exp().sum(-1)).clamp(min=tiny)
    return top + torch.where(rest_q > 0, rest_q * (rest_q.clamp(min=tiny).log() - rest_p.log()), 0.0)


def teacher_advantage(
    log_prob: Tensor, teacher_log_prob: Tensor, advantages: Tensor | None = None, *, weight: Tensor | float = 1.0
) -> Tensor:
    """[advantages +] weight (teacher_log_prob - log_prob): [T], detached; weight may differ by token."""
    signal = weight * (teacher_log_prob - log_prob).detach()
    return signal if advantages is None else advantages + signal
