"""Prompts from any source, rendered once, walked in an order that is a pure function of (seed, epoch, position)."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from fastrl.data.render import Messages, PromptRenderer, plain_text
from fastrl.data.sources import Row, read_rows
from fastrl.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One prompt, rendered. Example: `Prompt(0, (1, 54, 70), "2+2?", None, "arithmetic", "4", {})`."""

    prompt_id: int  # row number among all rows read, dropped ones included
    token_ids: tuple[int, ...]  # exactly what the model sees
    text: str  # the question as the data holds it: the text, or the last user message
    messages: Messages | None  # the chat messages that were rendered; None for plain text
    data_source: str  # what validation is reported by
    answer: Any  # the reference answer; None where the data has none
    extra: dict[str, Any] = field(default_factory=dict)  # every other column


class PromptSet(Sequence[Prompt]):
    """Prompts in dataset order, with a fingerprint of their contents and the number of rows dropped for length."""

    def __init__(self, prompts: Sequence[Prompt], *, num_dropped: int = 0, name: str = "prompts") -> None:
        self.prompts = list(prompts)
        self.num_dropped = num_dropped
        self.name = name
        self.fingerprint = _fingerprint(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Any) -> Any:
        return self.prompts[index]

    def __repr__(self) -> str:
        dropped = f", {self.num_dropped} dropped as too long" if self.num_dropped else ""
        return f"PromptSet({self.name}: {len(self)} prompts{dropped})"

    def steps_per_epoch(self, num_prompts_per_step: int) -> int:
        """Steps in one pass when the last, smaller batch is used: ceil(len / num_prompts_per_step)."""
        return -(-len(self) // num_prompts_per_step)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(np.asarray((len(prompt.token_ids), *prompt.token_ids), dtype=np.int64).tobytes())
        digest.update(json.dumps(prompt.answer, default=str, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()


def load_prompts(
    sources: str | Sequence[str],
    tokenizer: Any,
    *,
    split: str = "train",
    options: Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    source_column: str = "data_source",
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    apply_chat_template: bool | None = None,
    max_prompt_tokens: int | None = None,
    max_prompts: int | None = None,
) -> PromptSet:
    """Read, render and filter the prompts of one source or several, one after another.

    Args:
        sources: files (.jsonl, .parquet, .csv), `task:NAME` or `hub:NAME`.
        tokenizer: the policy's tokenizer.
        split: "train" or "validation"; picks the half of a task and names the config keys in errors.
        options: options of tasks and hub datasets.
        prompt_column: text, or a list of chat messages.
        answer_column: the reference answer; `reward_model.ground_truth` is found by itself.
        source_column: the data source; rows without one take the source's name.
        system_prompt, prompt_template, apply_chat_template: see PromptRenderer.
        max_prompt_tokens: rows whose rendered prompt is longer are dropped and counted, in tokens.
        max_prompts: keep only the first so many.

    Raises:
        DataError: nothing to train on, or a column, file, option or template is missing; the message names the key.
    """
    names = [sources] if isinstance(sources, str) else list(sources)
    renderer = PromptRenderer(
        tokenizer,
        system_prompt=system_prompt,
        prompt_template=prompt_template,
        apply_chat_template=apply_chat_template,
    )
    listed = ", ".join(names)
    if options and not any(name.startswith(("task:", "hub:")) for name in names):
        raise DataError(f"data.{split}_options = {dict(options)}: a file takes no options (data.{split} = {listed})")
    columns = _Columns(prompt_column, answer_column, source_column)
    prompts: list[Prompt] = []
    num_rows = num_dropped = 0
    for source, row in _all_rows(names, split, options):
        prompt = _make_prompt(row, num_rows, source, columns, renderer)
        num_rows += 1
        if max_prompt_tokens is not None and len(prompt.token_ids) > max_prompt_tokens:
            num_dropped += 1
            continue
        prompts.append(prompt)
        if max_prompts is not None and len(prompts) == max_prompts:
            break
    if not num_rows:
        raise DataError(f"data.{split} = {listed}: no rows in it")
    if not prompts:
        raise DataError(
            f"data.{split} = {listed}: all {num_rows} prompts are longer than data.max_prompt_tokens = "
            f"{max_prompt_tokens} tokens"
        )
    return PromptSet(prompts, num_dropped=num_dropped, name=listed)


@dataclass(frozen=True)
class _Columns:
    prompt: str
    answer: str
    source: str


def _all_rows(names: Sequence[str], split: str, options: Mapping[str, Any] | None) -> Iterator[tuple[str, Row]]:
    for name in names:
        for row in read_rows(name, split=split, options=options):
            yield name, row


def _make_prompt(row: Row, number: int, source: str, columns: _Columns, renderer: PromptRenderer) -> Prompt:
    where = f"{source}, row {number}"
    if columns.prompt not in row:
        raise DataError(_no_column(where, "data.prompt_column", columns.prompt, row))
    value = row[columns.prompt]
    if value is None or value == "" or value == []:
        raise DataError(f"{where}: column {columns.prompt!r} (data.prompt_column) is empty")
    if not isinstance(value, str | list | tuple):
        raise DataError(f"{where}: column {columns.prompt!r} holds a {type(value).__name__}, not text or chat messages")
    content = value if isinstance(value, str) else list(value)
    try:
        token_ids, messages = renderer.render(content, row.get("tools"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:  # chat templates raise whatever they like, tokenizers at text that is no Unicode
        refused = "the chat template" if renderer.chat else "the tokenizer"
        raise DataError(f"{where}: {refused} refused the prompt: {type(error).__name__}: {error}") from error
    if not token_ids:
        raise DataError(f"{where}: the prompt has no tokens")
    used = {columns.prompt, columns.answer, columns.source}
    return Prompt(
        prompt_id=number,
        token_ids=tuple(token_ids),
        text=plain_text(content),
        messages=messages,
        data_source=str(row.get(columns.source) or source),
        answer=_answer_of(row, columns.answer, where),
        extra={name: content for name, content in row.items() if name not in used},
    )


def _answer_of(row: Row, column: str, where: str) -> Any:
    if column in row:
        return row[column]
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if column != "answer":  # asked for by name; without it, a dataset without answers is fine for some rewards
        raise DataError(_no_column(where, "data.answer_column", column, row))
    return None


def _no_column(where: str, key: str, column: str, row: Row) -> str:
    close = get_close_matches(column, list(row), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{where}: {key} = {column!r}: no such column{hint} (there are {', '.join(map(repr, row)) or 'none'})"


class PromptCursor:
    """Walks a PromptSet epoch after epoch; order(epoch) is a pure function of (seed, epoch), so any position resumes.

    Args:
        prompt_set: what is walked.
        seed: of the orders.
        shuffle: False walks in dataset order every epoch.
    """

    def __init__(self, prompt_set: PromptSet, *, seed: int = 0, shuffle: bool = True) -> None:
        if not len(prompt_set):
            raise DataError(f"{prompt_set.name}: no prompts")
        self.prompt_set = prompt_set
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0  # prompts of this epoch already taken, always < len(prompt_set)
        self._order: tuple[int, np.ndarray] | None = None

    def order(self, epoch: int) -> np.ndarray:
        """Indices into the set [len] int64, in the order of the given epoch."""
        if self._order is None or self._order[0] != epoch:
            indices = np.arange(len(self.prompt_set))
            if self.shuffle:
                indices = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(indices)
            self._order = (epoch, indices)
        return self._order[1]

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, across epoch ends; a set smaller than `num_prompts` repeats."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts:
            taken += self.take_within_epoch(num_prompts - len(taken))
        return taken

    def take_within_epoch(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, at most to the end of the epoch: the last batch of a pass may be smaller, never dropped."""
        order = self.order(self.epoch)
        end = min(self.position + num_prompts, len(order))
        taken = [self.prompt_set[int(i)] for i in order[self.position : end]]
        self.epoch, self.position = (self.epoch + 1, 0) if end == len(order) else (self.epoch, end)
        return taken

    def steps_per_epoch(self, num_prompts_per_step: int) -> int:
        """Batches of `take_within_epoch` in one pass."""
        return self.prompt_set.steps_per_epoch(num_prompts_per_step)

    @property
    def epochs_done(self) -> float:
        """Passes so far, e.g. 1.5."""
        return self.epoch + self.position / len(self.prompt_set)

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues with the very next prompt."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.prompt_set.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; with another dataset, start at its row 0 and warn."""
        if state["fingerprint"] != self.prompt_set.fingerprint:
            warnings.warn(
                f"the training prompts ({self.prompt_set.name}) are not those of the checkpoint: starting at their "
                "first row instead of the saved position",
                stacklevel=2,
            )
            self.epoch, self.position = 0, 0
            return
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            warnings.warn(
                f"run.seed or data.shuffle changed since the checkpoint ({state['seed']}, {state['shuffle']} -> "
                f"{self.seed}, {self.shuffle}): the rest of this epoch is in another order, so that some prompts of it "
                "come twice or not at all",
                stacklevel=2,
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
