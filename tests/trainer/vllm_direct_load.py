"""Run in a process of its own: vLLM loads by the plan what its own loader would load, and refuses a wrong plan."""

from __future__ import annotations

import sys

import torch
from vllm_models import move, plain_model, reference_log_probs, write_vllm_folder

from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendSettings, Draw
from fastrl.rollout.engine import SamplingParams
from fastrl.rollout.vllm import VLLMBackend
from fastrl.rollout.vllm.direct import DirectLoad, Proof, plan_direct
from fastrl.trainer.expected_weights import ExpectedWeights

PROMPT = [5 + i % 40 for i in range(70)]


def weights(model, scale: float = 1.0):
    """Every tensor in memory that is overwritten once the loop goes on, tied names one after the other."""
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        memory = state[tied[0]].detach() * scale
        for name in tied:
            yield name, memory
        memory.fill_(float("nan"))


def across_layers(model):
    """Every tensor, the same one of all layers after another: layers of one shape are incomplete at the same time."""
    state = model.state_dict()
    return [(name, state[name]) for name in sorted(state, key=lambda name: name.rsplit(".", 2)[1:])]


def check(backend: VLLMBackend, model) -> None:
    """Greedy tokens and log-probs of a response are Hugging Face's."""
    backend.add([Draw(0, PROMPT, 1, 0.0, 8)], SamplingParams(max_tokens=8, ignore_eos=True))
    done = []
    while backend.busy():
        done += backend.step()
    (drawn,) = done
    log_probs, best = reference_log_probs(model, PROMPT, drawn.token_ids, 0.0)
    assert drawn.token_ids == best
    assert (log_probs - torch.tensor(drawn.log_probs).double()).abs().max() <= 1e-4


def transfer_of(backend: VLLMBackend):
    """The transfer engine and the model of the worker."""
    (pair,) = backend.engine.collective_rpc(lambda worker: (worker.weight_transfer_engine, worker.get_model()))
    return pair


def raises(function, text: str) -> None:
    try:
        function()
    except EngineError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {text!r} was expected")


def wrong_plans(transfer, model, policy) -> None:
    """What the proof sees: exchanged parts, other values, a tensor that was never loaded, a name too many."""
    proof = Proof()
    for _ in proof.watched(weights(policy)):
        pass
    assert isinstance(plan_direct(model, proof), DirectLoad)
    mapping = {"qkv_proj": ["k_proj", "q_proj", "v_proj"], "gate_up_proj": ["up_proj", "gate_proj"]}
    problem = plan_direct(Renamed(model, mapping), proof)
    assert isinstance(problem, str) and "vLLM makes something else of" in problem
    other = Proof()
    for _ in other.watched((n, t) for n, t in weights(policy, 1.5) if "o_proj" in n or "norm" in n):
        pass
    for name in other.products:
        assert "o_proj" in plan_direct(model, with_product(proof, name, other.products[name]))
    missing = with_product(proof, "lm_head.weight", None)
    assert plan_direct(model, missing) == "lm_head.weight was not loaded, or is no matrix"
    assert plan_direct(model, with_product(proof, "extra", torch.ones(3))) == "extra has no place"
    raises(lambda: transfer.plan.load((n, t) for n, t in weights(policy) if "v_proj.weight" not in n), "did not come")
    raises(lambda: transfer.plan.load([("extra", torch.ones(3))]), "extra has no place")


class Renamed:
    """The model with another mapping of fused names."""

    def __init__(self, model, mapping) -> None:
        self.packed_modules_mapping, self.modules, self.named_modules = mapping, model.modules, model.named_modules


def with_product(proof: Proof, name: str, product) -> Proof:
    """A copy with one product replaced, or taken out."""
    other = Proof()
    other.products, other.plain = dict(proof.products), dict(proof.plain)
    other.products.pop(name, None)
    if product is not None:
        other.products[name] = product
    return other


def experts(backend: VLLMBackend, policy, expected: ExpectedWeights) -> None:
    """Experts have no plan: vLLM's own loader is given the checkpoint's names at each update."""
    for step in range(3):
        move(policy, 0.02, seed=step)
        backend.load_weights(expected.checkpoint(weights(policy)))
        transfer, _ = transfer_of(backend)
        assert isinstance(transfer.plan, str) and "of another kind" in transfer.plan, transfer.plan
        check(backend, policy)
    print("direct load: fine")


def main() -> None:
    folder, kind, tied = sys.argv[1], sys.argv[2], sys.argv[3] == "tied"
    path = write_vllm_folder(folder, kind, tied=tied)
    policy = plain_model(path)
    backend = VLLMBackend(BackendSettings(path, kv_bytes=1 << 26, max_sequence_tokens=128, max_running=4))
    if kind in ("mixtral", "qwen3_moe"):
        experts(backend, policy, ExpectedWeights(path, torch.float32))
        return
    for step in range(4):
        move(policy, seed=step)
        backend.load_weights(weights(policy))
        transfer, model = transfer_of(backend)
        assert isinstance(transfer.plan, DirectLoad), transfer.plan
        check(backend, policy)
        # from now on vLLM's loader is not asked
        transfer.receive_weights.__func__.__globals__["initialize_layerwise_reload"] = None
    wrong_plans(transfer, model, policy)
    backend.load_weights(weights(policy))
    check(backend, policy)
    move(policy, seed=9)
    transfer.plan.load(across_layers(policy))
    backend.reset_prefix_cache()
    check(backend, policy)
    print("direct load: fine")


if __name__ == "__main__":
    main()
