"""The last proof of a delivery: the engine's log-probs of a short greedy response are the trainer's.

Checksums show that the bytes arrived; the probe shows that the engine computes with them.
"""

from __future__ import annotations

import time

import torch

from fastrl.data.packing import pack
from fastrl.data.prompts import Prompt
from fastrl.dist.weight_verify import VerifySchedule
from fastrl.errors import WeightError
from fastrl.rollout.engine import Engine, GenerationRequest, SamplingParams
from fastrl.rollout.native import NativeEngine
from fastrl.trainer.actor import PolicyModel
from fastrl.trainer.generation import ScoredSample, build_batch
from fastrl.trainer.metrics import Metrics

PROMPT_TOKENS = 64
# nats, mean over the tokens: two right implementations differ by less, a weight of the wrong version by more
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class DeliveryProbe:
    """Compares engine and trainer on one prompt after an update, when the schedule says so.

    Args:
        engine: what generates.
        policy: the trainer's model.
        prompt: where the prompt comes from; its last 64 tokens are used.
        schedule: which updates are probed.
        num_tokens: length of the greedy response.
        tolerance: largest mean difference of log-probs in nats; None takes that of the policy's compute type.
    """

    def __init__(
        self,
        engine: Engine,
        policy: PolicyModel,
        prompt: Prompt,
        schedule: VerifySchedule,
        *,
        num_tokens: int = 4,
        tolerance: float | None = None,
    ) -> None:
        self.engine, self.prompt, self.schedule, self.num_tokens = engine, prompt, schedule, num_tokens
        self.policy = PolicyModel(policy.model, temperature=1.0, dtype=policy.dtype)
        self.tolerance = TOLERANCE[policy.dtype] if tolerance is None else tolerance

    def after_update(self, version: int, metrics: Metrics) -> None:
        """Probe the update to `version` if it is due.

        Raises:
            WeightError: the log-probs differ by more than the tolerance, or the engine answers with another version.
        """
        if not self.schedule.due():
            return
        started = time.perf_counter()
        difference = self.difference(version)
        metrics.add_max("mismatch/probe", difference)
        metrics.add_seconds("time/sync_weights/probe_s", time.perf_counter() - started)
        if not difference <= self.tolerance:
            raise WeightError(
                f"after the update to version {version} the engine's log-probs of a greedy response differ from the "
                f"trainer's by {difference:.3g} nats on average (at most {self.tolerance:g} is rounding): the engine "
                "does not compute with the weights it was sent (a tied or fused tensor of which it keeps a copy, a "
                "model of another kind). rollout.verify_weights = off skips this check"
            )

    def difference(self, version: int) -> float:
        """Mean absolute difference of the response's log-probs, in nats."""
        ids = self.prompt.token_ids[-PROMPT_TOKENS:]
        request = GenerationRequest(0, ids, 1, seeds=[0], temperature=0.0, max_tokens=self.num_tokens)
        (sample,) = self.engine.generate([request], SamplingParams(max_tokens=self.num_tokens))
        if sample.policy_version != version:
            raise WeightError(f"the engine answered with version {sample.policy_version} after the update to {version}")
        prompt = Prompt(0, ids, "", None, "probe", None)
        scored = ScoredSample(prompt, 0, 0, sample, "", 0.0, True, {})
        device = next(self.policy.model.parameters()).device
        batch = build_batch([scored]).to(device)
        ours = self.policy.log_prob(batch, pack(batch, max_tokens=len(ids) + self.num_tokens))["log_prob"]
        return float((ours - batch.need("rollout_log_prob")).abs().mean())


def make_probe(engine: Engine, policy: PolicyModel, prompt: Prompt, verify_weights: str) -> DeliveryProbe | None:
    """The probe of a run; None for an engine that uses the trainer's own weights, or when it is off."""
    if isinstance(engine, NativeEngine) or verify_weights == "off":
        return None
    return DeliveryProbe(engine, policy, prompt, VerifySchedule(verify_weights))
