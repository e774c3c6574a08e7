"""A learned scorer: a sequence classification model with one label, frozen, run over ragged sequences.

    score = score_head(h[i]),   i the last token that is not padding's id

Prompt and response are put into the scorer's own chat template and tokenizer. Sequences lie one behind the other in a
micro-batch, none is padded. On several ranks the model is sharded as the reference is, each rank scores the samples
that it generated, and takes as many passes as the rank that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fastrl.data.packing import MicroBatch, Segment, fill_up
from fastrl.data.render import PromptRenderer
from fastrl.dist.collectives import all_reduce_max
from fastrl.dist.fsdp import reshard, resident
from fastrl.models.load import ValueModel
from fastrl.rewards.base import Failure, Outcome, RewardSample, check_score
from fastrl.trainer.critic import value_rows


class RewardModel:
    """Scores the samples that one `collect` of the reward pool hands over; every rank calls it equally often.

    Args:
        model: of `fastrl.models.load.load_reward_model`, whole or sharded.
        tokenizer: the scorer's own.
        device: where it computes.
        name: what its component is called.
        dtype: compute type.
        offload: keep the weights in CPU memory between calls.
        max_tokens: longest sequence that is scored; None takes the model's own limit.
        max_tokens_per_microbatch: tokens of one pass; a longer sequence gets a pass of its own.
    """

    def __init__(
        self,
        model: ValueModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        name: str,
        dtype: torch.dtype,
        offload: bool,
        max_tokens: int | None,
        max_tokens_per_microbatch: int,
    ) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.name, self.dtype, self.offload = name, dtype, offload
        config: Any = model.config.get_text_config()
        self.limit = max_tokens or getattr(config, "max_position_embeddings", None)
        self.padding, self.vocabulary = config.pad_token_id, config.vocab_size
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.tokens = 0  # scored since `take_tokens`
        with resident(model, device, offload=offload):
            pass

    def __call__(self, samples: Sequence[RewardSample]) -> list[Outcome]:
        """One outcome per sample: its score, or a Failure where it cannot be read or is too long."""
        rendered = [self._read(sample) for sample in samples]
        outcomes: list[Outcome] = [ids if isinstance(ids, Failure) else self._refused(ids) for ids in rendered]
        fitting = [i for i, outcome in enumerate(outcomes) if outcome is None]
        for i, score in zip(fitting, self.scores([cast(list[int], rendered[i]) for i in fitting])):
            outcomes[i] = check_score(self.name, score)
        return outcomes

    def _read(self, sample: RewardSample) -> list[int] | Failure:
        """Ids of the sample; a template may refuse it, e.g. for its roles."""
        try:
            return sequence_ids(self.tokenizer, sample)
        except TemplateError as error:
            return Failure(self.name, f"its chat template refuses the sample: {error}")

    def _refused(self, ids: Sequence[int]) -> Failure | None:
        length = len(ids)
        if length == 0:
            return Failure(self.name, "prompt and response have no token")
        if max(ids) >= self.vocabulary:
            return Failure(
                self.name,
                f"its tokenizer makes id {max(ids)}, its model knows {self.vocabulary}: give it its own tokenizer",
            )
        if self.limit is None or length <= self.limit:
            return None
        return Failure(
            self.name, f"prompt and response are {length} tokens long, more than {self.limit} (reward.model_max_tokens)"
        )

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence of ids; a rank without any takes part in the others' passes."""
        made = pack_whole(sequences, self.max_tokens_per_microbatch, self.padding)
        self.tokens += sum(micro.num_rows for micro in made)
        scores = [0.0] * len(sequences)
        (count,) = all_reduce_max([len(made)])
        if not count:
            return scores
        with resident(self.model, self.device, offload=self.offload):
            for micro in fill_up(made, count, "cpu"):
                here = micro.to(self.device)
                values = value_rows(self.model, here, here.head_index, self.dtype).tolist()
                for sequence, value in zip(micro.sequences.tolist(), values):
                    scores[sequence] = value
            reshard(self.model)
        return scores

    def take_tokens(self) -> int:
        """Tokens scored since the last call."""
        taken, self.tokens = self.tokens, 0
        return taken


def sequence_ids(tokenizer: PreTrainedTokenizerBase, sample: RewardSample) -> list[int]:
    """Prompt and response in the tokenizer's chat template; one behind the other where it has none."""
    prompt, response = sample.prompt, sample.response_text
    renderer = PromptRenderer(tokenizer)
    if not renderer.chat:
        return renderer.encode_text(prompt.text) + tokenizer.encode(response, add_special_tokens=False)
    messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
    begun = ""
    if messages[-1].get("role") == "assistant":  # the response goes on where the prompt's last message ends
        begun = messages.pop().get("content") or ""
    answered = [*messages, {"role": "assistant", "content": begun + response}]
    ids: Any = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
    return list(ids)


def pack_whole(sequences: Sequence[Sequence[int]], max_tokens: int, padding: int | None) -> list[MicroBatch]:
    """Micro-batches of whole sequences, long ones first; `head_index` is the row that each one's score is read from.

    Args:
        sequences: ids of each; an empty one cannot be scored and must not be among them.
        max_tokens: rows of a micro-batch; a longer sequence is alone in one.
        padding: id that a score is never read from at a sequence's end; None reads from the last token.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        fits = next((b for b, left in enumerate(room) if len(sequences[i]) <= left), None)
        if fits is None:
            bins.append([i])
            room.append(max_tokens - len(sequences[i]))
        else:
            bins[fits].append(i)
            room[fits] -= len(sequences[i])
    return [_micro_batch([(i, sequences[i]) for i in members], padding) for members in bins]


def _micro_batch(members: Sequence[tuple[int, Sequence[int]]], padding: int | None) -> MicroBatch:
    ids = torch.cat([torch.tensor(sequence, dtype=torch.int64) for _, sequence in members])
    segments, last, start = [], [], 0
    for _, sequence in members:
        end = start + len(sequence)
        segments.append(Segment(start, end, ()))
        last.append(start + scored_position(sequence, padding))
        start = end
    numbers, none = torch.tensor([i for i, _ in members], dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(len(sequence)) for _, sequence in members]),
        segments=tuple(segments),
        head_index=torch.tensor(last, dtype=torch.int64),
        labels=none,
        token_index=none,
        sequences=numbers,
        bootstrap_index=none,
        bootstrap_sequence=none,
    )


def scored_position(ids: Sequence[int], padding: int | None) -> int:
    """The last token that is not the padding id, as Hugging Face's classifiers read it; the first where all are."""
    return max((i for i, token in enumerate(ids) if token != padding), default=0)
