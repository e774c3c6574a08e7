"""What a rollout backend is: an inference engine reduced to what training needs, driven one step at a time.

A backend knows nothing of trainers, processes or prompts' texts. It is one class (`VLLMBackend` is one); the
same class runs in the trainer's process (`LocalLink`) or in a child of its own (`ProcessLink`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fastrl.rollout.engine import SamplingParams, WakePart


@dataclass(frozen=True)
class BackendSettings:
    """Everything a backend is started with. Plain values, because they travel to a child process as JSON."""

    model: str  # folder or hub name; only its configuration is read unless load_weights is set
    tokenizer: str | None = None  # folder or hub name, needed for stop strings only
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"  # float32, bfloat16 or float16
    device: str = "cpu"  # cpu or cuda
    max_sequence_tokens: int | None = None  # longest prompt with its response; None is the model's context
    kv_bytes: int | None = None  # size of the key/value space; None lets memory_fraction decide (GPU only)
    memory_fraction: float | None = None  # part of the GPU's memory that the engine may use
    max_running: int = 256  # samples generated at the same time; the others wait
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    rendezvous: str | None = None  # file shared by the processes of a tensor-parallel engine, unused before
    timeout_s: float = 600.0  # longest wait for the other processes of a tensor-parallel engine
    seed: int = 0
    sleep_mode: bool = False  # allocate so that sleep() gives memory back (GPU only)
    load_weights: bool = False  # read the folder's weights instead of waiting for the trainer's
    options: dict[str, Any] = field(default_factory=dict)  # the backend's own, handed through
    shared_weights: bool = False  # the backend computes with the trainer's weights in place instead of its own

    def to_json(self) -> dict[str, Any]:
        """As it travels to the child."""
        return asdict(self)


@dataclass(frozen=True)
class BackendInfo:
    """What a backend says when it is ready."""

    name: str  # name and version, for the console
    context: int  # longest prompt with its response, in tokens
    kv_tokens: int  # key/value space, in tokens
    warnings: tuple[str, ...] = ()


Wanted = Sequence[tuple[str, tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class SharedTensors:
    """Weights in memory that is the trainer's, for a backend that can compute with them in place.

    Args:
        fit: given (name, shape, type) of every parameter that the backend's model has, tied names once, returns the
            tensor of each. Raises a FastRLError when they do not fit.
        num_bytes: size of the memory, for a backend that counts what is in use.
    """

    fit: Callable[[Wanted], Mapping[str, Tensor]]
    num_bytes: int


@dataclass(frozen=True)
class Draw:
    """One sample to be drawn."""

    key: int  # comes back on what was drawn
    prompt_ids: Sequence[int]
    seed: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Drawn:
    """One sample that was drawn."""

    key: int
    token_ids: list[int]  # the id that ended it included
    log_probs: list[float]  # of each token under the distribution it was drawn from
    finish_reason: str  # stop, length or abort


@dataclass(frozen=True)
class Load:
    """How busy a backend is."""

    running: int = 0  # samples
    waiting: int = 0  # samples
    kv_tokens: int = 0  # key/value space in use, in tokens


class Backend(Protocol):
    """What `rollout.engine` names. Made with its settings, ready when the constructor returns."""

    info: BackendInfo

    def add(self, draws: Sequence[Draw], params: SamplingParams) -> None:
        """Queue samples; `params` has stop ids, cut-offs and stop strings, each draw its temperature and length."""
        ...

    def step(self) -> list[Drawn]:
        """One token for every running sample; returns what finished. Empty when nothing is queued."""
        ...

    def busy(self) -> bool:
        """Whether samples are unfinished."""
        ...

    def abort(self) -> list[Drawn]:
        """End every unfinished sample where it stands."""
        ...

    def load(self) -> Load:
        """How busy it is."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights by their Hugging Face names (tied ones under each name) and forget cached prefixes.

        Names, shapes and types were compared before; each tensor is valid until the iterator goes on.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: 0 keys and values, 1 weights too (kept elsewhere), 2 weights too (lost)."""
        ...

    def wake(self, what: Sequence[WakePart]) -> None:
        """Take memory again."""
        ...

    def agree(self, flag: bool) -> bool:
        """True when `flag` is set on a process of this tensor-parallel engine; all of them call it at the same step."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
