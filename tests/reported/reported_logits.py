"""Cases about log-probs and entropies of logits, positions and labels, and what the engine samples."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
from reported_data import make_batch, tensor
from torch import Tensor

from fastrl.data.batch import FinishReason, RolloutBatch
from fastrl.data.packing import pack
from fastrl.errors import EngineError
from fastrl.kernels import log_prob
from fastrl.rollout import sampling
from fastrl.rollout.engine import GenerationRequest, SamplingParams, check_requests

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def of_logits(logits: Tensor, labels: Tensor, i: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, entropies and every gradient that a case may ask for."""
    options = {"temperature": i.get("temperature", 1.0), "ignore_index": i.get("ignore_index", -100)}
    out: dict[str, Any] = {}
    upstream = tensor(i["upstream"]) if "upstream" in i else torch.ones(()).expand(labels.shape)  # stride 0
    for name, pick in (
        ("grad_logits_of_sum_logp", "log_prob"),
        ("grad_logits_of_sum_entropy", "entropy"),
        ("grad_logits", "log_prob"),
    ):
        z = logits.detach().clone().requires_grad_() if logits.is_contiguous() else logits.detach().requires_grad_()
        result = log_prob(z, labels, want_entropy=True, **options)
        value = getattr(result, pick)
        (value * upstream if name == "grad_logits" else value).sum().backward()
        out |= {"logp": result.log_prob.detach(), "entropy": result.entropy.detach(), name: z.grad}
    return out


def logprob_entropy(i: dict[str, Any]) -> dict[str, Any]:
    return of_logits(tensor(i["logits"]), torch.tensor(i["labels"]), i)


def logprob_entropy_view(i: dict[str, Any]) -> dict[str, Any]:
    storage = tensor(i["storage"])
    columns = int(re.search(r":(\d+)\]", i["view"]).group(1))  # "storage[:, :3]"
    return of_logits(storage[:, :columns], torch.tensor(i["labels"]), i)


def generated(text: str, columns: Tensor, row: int = 0) -> Tensor:
    """Logits from the cases' words: a formula of the column j (and row r), or a constant but for one index."""
    special = re.fullmatch(r"\s*(\S+) at index (\d+), (\S+) elsewhere\s*", text)
    if special:
        value, index, other = float(special[1]), int(special[2]), float(special[3])
        return torch.where(columns == index, value, other).double()
    code = text.replace(" mod ", " % ")
    names = {"j": columns.double(), "r": row, "sin": torch.sin, "cos": torch.cos, "sqrt": torch.sqrt, "exp": torch.exp}
    return eval(code, {"__builtins__": {}}, names) * torch.ones_like(columns, dtype=torch.float64)


def logprob_entropy_formula2(i: dict[str, Any]) -> dict[str, Any]:
    dtype = DTYPES[i.get("logits_dtype", "float32")]
    logits = generated(i["logits"], torch.arange(i["V"])).to(dtype)[None]
    result = log_prob(logits, torch.tensor([i["label"]]), want_entropy=True, temperature=i.get("temperature", 1.0))
    return {"logp": float(result.log_prob), "entropy": float(result.entropy)}


def logprob_entropy_formula(i: dict[str, Any]) -> dict[str, Any]:
    sizes = i.get("V", i.get("vocab_sizes", i.get("Vs")))
    labels = i.get("labels", i.get("label", 0))
    rows = [
        logprob_entropy_formula2(i | {"V": v, "label": labels[k] if isinstance(labels, list) else labels})
        for k, v in enumerate(sizes if isinstance(sizes, list) else [sizes])
    ]
    return {name: [row[name] for row in rows] for name in ("logp", "entropy")}


def logprob_entropy_rows(i: dict[str, Any]) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[i.get("logits_dtype", "float32")]
    pattern = torch.stack([generated(i["logits"], torch.arange(i["V"]), r) for r in range(8)]).to(dtype).to(device)
    logits = pattern.repeat((i["N"] + 7) // 8, 1)[: i["N"]]
    result = log_prob(logits, torch.full((i["N"],), i["label"], device=device), want_entropy=True)
    rows = torch.tensor(i["check_rows"], device=device)
    out = {"logp_at_rows": result.log_prob[rows].cpu(), "entropy_at_rows": result.entropy[rows].cpu()}
    by_class = torch.full((8, 2), torch.nan)
    for row in i["check_rows"]:  # rows that disagree with their class must not hide behind each other
        seen = torch.tensor([float(result.log_prob[row]), float(result.entropy[row])])
        old = by_class[row % 8]
        by_class[row % 8] = seen if bool(old.isnan().all()) or torch.allclose(old, seen, rtol=1e-6) else torch.inf
    first = torch.arange(8)
    base = log_prob(pattern, torch.full((8,), i["label"], device=device), want_entropy=True)
    for column, name, value in ((0, "logp_by_r_mod_8", base.log_prob), (1, "entropy_by_r_mod_8", base.entropy)):
        unseen = by_class[:, column].isnan()
        out[name] = torch.where(unseen, value.cpu().float()[first], by_class[:, column])
    return out


def engine_logprob_consistency(i: dict[str, Any]) -> dict[str, Any]:
    logits = tensor(i["probs_at_T1"], torch.float64).log()[None]
    token = i["sampled"]
    temperature = i["temperature"]

    def engine(params: SamplingParams) -> float:
        p = sampling.probabilities(logits.clone(), temperature, params)
        cdf = p[0].cumsum(0)
        u = np.array([float(cdf[token] - p[0, token] / 2)])  # a uniform that falls on the token
        tokens, log_probs = sampling.draw(logits.clone(), np.zeros(1, np.int64), np.array([temperature]), u, params)
        assert tokens[0] == token
        return float(log_probs[0])

    trainer = float(log_prob(logits, torch.tensor([token]), temperature=temperature).log_prob)
    cut = engine(SamplingParams(temperature=temperature, top_p=i["top_p"]))
    return {
        "trainer_logp": trainer,
        "engine_logp_no_filter": engine(SamplingParams(temperature=temperature)),
        "engine_logp_top_p": cut,
        "weight_if_mixed": float(np.exp(trainer - cut)),
    }


def one_token_prompts(sequences: list[list[int]]) -> RolloutBatch:
    """Each sequence as a prompt of one token and its other tokens as the response."""
    lengths = [len(s) - 1 for s in sequences]
    return make_batch(
        lengths,
        prompt_ids=torch.tensor([s[0] for s in sequences]),
        response_ids=torch.tensor([t for s in sequences for t in s[1:]], dtype=torch.int64),
    )


def packed_next_token(i: dict[str, Any]) -> dict[str, Any]:
    borders = np.cumsum([0, *i["seq_lens"]]).tolist()
    sequences = [i["ids"][a:b] for a, b in pairwise(borders)]
    batch = one_token_prompts(sequences)
    (micro,) = pack(batch, max_tokens=len(i["ids"]), extra_row=True)
    labels: list[int | None] = [None] * len(i["ids"])
    row_of_stream = {}
    row = 0
    for s in micro.sequences.tolist():  # the rows of a sequence stand together: its prompt token, then its response
        for position in range(len(sequences[s])):
            row_of_stream[row] = borders[s] + position
            row += 1
    for head, label in zip(micro.head_index.tolist(), micro.labels.tolist()):
        labels[row_of_stream[head]] = label
    assert [i["ids"][row_of_stream[r]] for r in range(row)] == micro.input_ids.tolist()
    return {"labels": labels}


def position_ids(i: dict[str, Any]) -> dict[str, Any]:
    out = []
    for row in i["mask"]:
        places = [t for t, m in enumerate(row) if m]
        batch = make_batch(
            [0],
            prompt_ids=torch.zeros(len(places), dtype=torch.int64),
            prompt_cu_seqlens=torch.tensor([0, len(places)]),
        )
        (micro,) = pack(batch, max_tokens=len(row), extra_row=True)
        positions: list[int | None] = [None] * len(row)
        for place, position in zip(places, micro.position_ids.tolist()):
            positions[place] = position
        out.append(positions)
    return {"position_ids": out}


def vocab_guard(i: dict[str, Any]) -> dict[str, Any]:
    size = i.get("vocab_size", i.get("V"))
    trainable = []
    for ids in i.get("samples", i.get("ids")):
        try:
            check_requests([GenerationRequest(0, ids)], size)
            trainable.append(True)
        except EngineError:
            trainable.append(False)
    return {"trainable": trainable}


def tiny_engine(stop_ids: list[int]) -> Any:
    """The embedded engine on a random model of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastrl.models.load import prepare_model
    from fastrl.rollout.native import NativeEngine

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return NativeEngine(prepare_model(LlamaForCausalLM(config)), stop_token_ids=stop_ids, fast_path=False)


def completion_mask(i: dict[str, Any]) -> dict[str, Any]:
    """What the embedded engine makes of a policy that wants to say exactly these ids."""
    engine = tiny_engine(i["eos_ids"])
    mask, lengths, truncated = [], [], []
    for wanted in i["ids"]:
        script = iter(wanted)

        def draw(logits: Tensor, rows: Any, temperatures: Any, uniforms: Any, params: Any, script: Any = script) -> Any:
            return np.array([next(script)]), np.zeros(1)

        with mock.patch.object(sampling, "draw", draw):
            (sample,) = engine.generate([GenerationRequest(0, [1])], SamplingParams(max_tokens=len(wanted)))
        length = sample.token_ids.numel()
        mask.append([1] * length + [0] * (len(wanted) - length))
        lengths.append(length)
        truncated.append(sample.finish_reason == FinishReason.length)
    engine.close()
    return {"mask": mask, "lengths": lengths, "truncated": truncated}


def unpermute(i: dict[str, Any]) -> dict[str, Any]:
    values = [v for part in i["outputs"] for v in part]
    rows = torch.tensor([r for part in i["micro_indices"] for r in part])
    batch = make_batch([1] * len(values), sample_id=torch.arange(len(values)))
    order = torch.empty_like(rows).index_put((rows,), torch.arange(len(values)))
    return {"ordered": [values[k] for k in batch.select(order).sample_id.tolist()]}


def micro_batch_count(i: dict[str, Any]) -> dict[str, Any]:
    def count(lengths: list[int], budget: int) -> int:
        return len(pack(make_batch(lengths), max_tokens=budget))

    most = max(count(lengths, i["max_tokens"]) for lengths in i["ranks"])
    dummies = []
    for lengths in i["ranks"]:  # a rank that needs fewer spreads its samples over as many as the others run
        budgets = range(i["max_tokens"], 0, -1)
        own = max(n for n in (count(lengths, budget) for budget in budgets) if n <= most)
        dummies.append(most - own)
    return {"count_all_ranks": most, "dummies": dummies}
