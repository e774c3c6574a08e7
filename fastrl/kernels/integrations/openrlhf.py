"""OpenRLHF's advantage, loss, KL and log-prob functions (0.11; padded layout) on `fastrl.kernels`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .. import clipped_policy_loss, clipped_value_loss, gae, kl_divergence, log_prob
from . import replace_everywhere


def get_advantages_and_returns(
    values: torch.Tensor,
    rewards: torch.Tensor,
    action_mask: torch.Tensor | None,
    gamma: float,
    lambd: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [B, T]; OpenRLHF's rule: a masked token is a step with reward and value 0."""
    if action_mask is not None:
        inside, nothing = action_mask != 0, torch.zeros((), dtype=values.dtype, device=values.device)
        values = torch.where(inside, values, nothing)
        rewards = torch.where(inside, rewards, nothing.to(rewards.dtype))
    return gae(rewards, values, gamma=gamma, gae_lambda=lambd)


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    log_probs_old: torch.Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> torch.Tensor:
    """Per-token KL estimate held inside [-10, 10]."""
    if unbiased_gradient:
        raise ValueError("compute_approx_kl: unbiased_gradient = True: only False is supported")
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"compute_approx_kl: kl_estimator = {kl_estimator!r}: use one of k1, k2, k3")
    return kl_divergence(log_probs, log_probs_base, kind=kl_estimator).clamp(-10, 10)


def log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the labels under logits / temperature, shaped like labels; the logits are left as they are."""
    return log_prob(logits, labels, temperature=temperature).log_prob


def _mode(token_level_loss: bool) -> str:
    return "token-mean" if token_level_loss else "seq-mean-token-mean"


class PolicyLoss(torch.nn.Module):
    """The clipped loss; forward gives (loss, clip ratio, ppo_kl, None, None). No GSPO, no rollout correction."""

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        **_: Any,
    ) -> None:
        super().__init__()
        if policy_loss_type != "ppo":
            raise ValueError(f"PolicyLoss: policy_loss_type = {policy_loss_type!r}: only ppo is supported")
        if is_correction_level != "off":
            raise ValueError(f"PolicyLoss: is_correction_level = {is_correction_level!r}: only off is supported")
        self.clip_eps_low, self.clip_eps_high, self.dual_clip = clip_eps_low, clip_eps_high, dual_clip
        self.token_level_loss = token_level_loss

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """All [B, T]."""
        loss, stats = clipped_policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            action_mask,
            clip_low=self.clip_eps_low,
            clip_high=self.clip_eps_high,
            dual_clip=self.dual_clip,
            loss_agg_mode=_mode(self.token_level_loss),
            num_tokens=batch_num_tokens,
            num_sequences=global_batch_size,
        )
        given = batch_num_tokens if self.token_level_loss else global_batch_size
        scale = 1 if given is None else dp_size
        return loss * scale, stats["clip_high"] + stats["clip_low"], stats["k1"], None, None


class ValueLoss(torch.nn.Module):
    """The clipped value loss; forward gives the scalar."""

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        self.clip_eps, self.token_level_loss = clip_eps, token_level_loss

    def forward(
        self,
        values: torch.Tensor,
        old_values: torch.Tensor,
        returns: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> torch.Tensor:
        """All [B, T]."""
        loss = clipped_value_loss(
            values,
            old_values,
            returns,
            action_mask,
            value_clip=self.clip_eps,
            loss_agg_mode=_mode(self.token_level_loss),
            num_tokens=batch_num_tokens,
            num_sequences=global_batch_size,
        ).loss
        given = batch_num_tokens if self.token_level_loss else global_batch_size
        return loss * (1 if given is None else dp_size)


def install() -> Callable[[], None]:
    """Replace OpenRLHF's functions in every loaded module of it; returns the function that undoes it."""
    loss = importlib.import_module("openrlhf.models.loss")
    utils = importlib.import_module("openrlhf.models.utils")
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    pairs = [
        (loss.PolicyLoss, PolicyLoss),
        (loss.ValueLoss, ValueLoss),
        (utils.compute_approx_kl, compute_approx_kl),
        (utils.log_probs_from_logits, log_probs_from_logits),
    ]
    undo, original = replace_everywhere("openrlhf", pairs), maker.get_advantages_and_returns
    maker.get_advantages_and_returns = lambda self, *args, **kwargs: get_advantages_and_returns(*args, **kwargs)

    def restore() -> None:
        undo()
        maker.get_advantages_and_returns = original

    return restore
