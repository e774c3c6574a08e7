"""The head for `bench/gpu/kernels.py`: log-probs and token losses from logits and from hidden rows, and their peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cost_model import head_cost, logits_cost
from kernels import Case

import fastrl.kernels as K

VOCABULARIES = (32000, 49152, 151936)
LOGIT_ROWS, HEAD_SHAPE = 8192, (8192, 4096, 128256)
GRADIENT = 2e-2  # bfloat16 gradients


def sized(n: int, scale: float, least: int = 64) -> int:
    """n x scale, a multiple of 16."""
    return max(least, int(n * scale) // 16 * 16)


def find(target: str) -> Any:
    """`package.module:name`, or None where it is not installed or does not load."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a peer that cannot be loaded here is left out
        return None


def in_rows(function: Callable[..., Any], logits: torch.Tensor, labels: torch.Tensor) -> Any:
    """A float32 formula over rows of logits, a few at a time, joined."""
    found = [function(a.float(), b) for a, b in zip(logits.split(512), labels.split(512), strict=True)]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found)
    return tuple(torch.cat(x) for x in zip(*found, strict=True))


def log_softmax_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]


def with_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def clipped(value: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (value - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


class Restored:
    """A variant that overwrites its logits: they are put back before the first call, which is the checked one.

    Later calls work on what the call before left, finite numbers of the same size in memory.
    """

    def __init__(self, buffer: torch.Tensor, logits: torch.Tensor, run: Callable[[torch.Tensor], Any]):
        self.buffer, self.logits, self.run = buffer, logits, run
        self.first = True

    def __call__(self) -> Any:
        if self.first:
            self.buffer.copy_(self.logits)
            self.first = False
        return self.run(self.buffer.detach().requires_grad_())


def reading_cases(logits: torch.Tensor, labels: torch.Tensor) -> Iterator[Case]:
    """One read of the logits."""
    rows, vocabulary = logits.shape
    size = f"{rows}x{vocabulary} bf16"
    compiled = torch.compile(log_softmax_of, dynamic=False)
    variants: dict[str, Callable[[], Any]] = {
        "fastrl": lambda: K.log_prob(logits, labels).log_prob,
        "eager": lambda: log_softmax_of(logits, labels),
        "compile": lambda: compiled(logits, labels),
    }
    flash = find("flash_attn.ops.triton.cross_entropy:cross_entropy_loss")
    if flash is not None:
        variants["flash-attn cross_entropy_loss"] = lambda: -flash(logits, labels)[0]
    yield Case(
        f"log_prob {size}", logits_cost(rows, vocabulary, 1), variants, lambda: in_rows(log_softmax_of, logits, labels)
    )
    both = torch.compile(with_entropy, dynamic=False)
    yield Case(
        f"log_prob+entropy {size}",
        logits_cost(rows, vocabulary, 1),
        {
            "fastrl": lambda: tuple(K.log_prob(logits, labels, want_entropy=True)),
            "eager": lambda: with_entropy(logits, labels),
            "compile": lambda: both(logits, labels),
        },
        lambda: in_rows(with_entropy, logits, labels),
    )


def writing_cases(logits: torch.Tensor, labels: torch.Tensor) -> Iterator[Case]:
    """The gradient in the logits' place; the loss known beforehand (weights) or a callback."""
    rows, vocabulary = logits.shape
    size = f"{rows}x{vocabulary} bf16"
    old = in_rows(log_softmax_of, logits, labels) - 0.05
    advantages = torch.randn(rows, device=logits.device)
    buffer = torch.empty_like(logits)

    def gradient_of(part: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        one_hot = torch.zeros_like(part).scatter_(1, y[:, None], 1.0)
        return g[:, None] * (one_hot - torch.softmax(part, -1))

    def expected_gradient(g: torch.Tensor) -> torch.Tensor:
        triples = zip(logits.split(512), labels.split(512), g.split(512), strict=True)
        return torch.cat([gradient_of(a.float(), b, c).to(logits.dtype) for a, b, c in triples])

    def through(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(leaf: torch.Tensor) -> torch.Tensor:
            loss(leaf).backward()
            assert leaf.grad is not None
            return leaf.grad

        return run

    ones = torch.full_like(advantages, -1.0)
    nll: dict[str, Callable[[], Any]] = {
        "fastrl": Restored(buffer, logits, through(lambda x: K.logits_token_loss(x, labels, ones)[0])),
        "eager": Restored(buffer, logits, through(lambda x: -log_softmax_of(x, labels).sum())),
    }
    flash = find("flash_attn.ops.triton.cross_entropy:cross_entropy_loss")
    if flash is not None:
        nll["flash-attn, in place"] = Restored(
            buffer, logits, through(lambda x: flash(x, labels, inplace_backward=True)[0].sum())
        )
    liger = find("liger_kernel.transformers:LigerCrossEntropyLoss")
    if liger is not None:
        nll["liger cross entropy"] = Restored(buffer, logits, through(lambda x: liger(reduction="sum")(x * 1, labels)))
    yield Case(
        f"forward+backward, loss known {size}",
        logits_cost(rows, vocabulary, 2),
        nll,
        lambda: expected_gradient(ones),
        GRADIENT,
    )

    def token_loss(lp: torch.Tensor, entropy: torch.Tensor | None, part: slice) -> torch.Tensor:
        return clipped(lp, old[part], advantages[part])

    compiled = torch.compile(lambda x: clipped(log_softmax_of(x, labels), old, advantages).sum(), dynamic=False)
    variants: dict[str, Callable[[], Any]] = {
        "fastrl": Restored(buffer, logits, through(lambda x: K.logits_token_loss(x, labels, token_loss)[0])),
        "eager": Restored(buffer, logits, through(lambda x: clipped(log_softmax_of(x, labels), old, advantages).sum())),
        "compile": Restored(buffer, logits, through(compiled)),
    }
    slope = token_slope(logits, labels, old, advantages)
    yield Case(
        f"forward+backward, callback {size}",
        logits_cost(rows, vocabulary, 2),
        variants,
        lambda: expected_gradient(slope),
        GRADIENT,
    )
    yield padded_case(logits, labels, old, buffer, through, expected_gradient)


def padded_case(
    logits: torch.Tensor,
    labels: torch.Tensor,
    old: torch.Tensor,
    buffer: torch.Tensor,
    through: Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]],
    expected_gradient: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    """The clipped loss on logits [8, L+1, V] and an advantage per sequence, as Liger has it."""
    rows, vocabulary = logits.shape
    advantages = torch.linspace(-1.0, 1.0, 8, device=logits.device)
    per_token = advantages.repeat_interleave(rows // 8)
    inside = torch.arange(rows, device=logits.device) % (rows // 8) != rows // 8 - 1  # no token behind the last row

    def token_loss(lp: torch.Tensor, entropy: torch.Tensor | None, part: slice) -> torch.Tensor:
        return torch.where(inside[part], clipped(lp, old[part], per_token[part]), 0.0)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return x.view(8, -1)[:, :-1].contiguous()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.where(inside, clipped(log_softmax_of(x, labels), old, per_token), 0.0).sum()

    variants: dict[str, Callable[[], Any]] = {
        "fastrl": Restored(buffer, logits, through(lambda x: K.logits_token_loss(x, labels, token_loss)[0])),
        "eager": Restored(buffer, logits, through(plain)),
    }
    liger = find("liger_kernel.transformers.grpo_loss:triton_grpo_loss")
    if liger is not None:
        data = (padded(old), None, padded(labels), advantages, None, 1.0, 0.0, 0.2, 0.2, True)
        variants["liger GRPO, in place"] = Restored(
            buffer, logits, through(lambda x: liger(x.view(8, -1, vocabulary), *data)[0].sum())
        )
    slope = token_slope(logits, labels, old, per_token) * inside
    return Case(
        f"forward+backward, [8, {rows // 8}, V] {rows}x{vocabulary} bf16",
        logits_cost(rows, vocabulary, 2),
        variants,
        lambda: expected_gradient(slope),
        GRADIENT,
    )


def token_slope(
    logits: torch.Tensor, labels: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """d loss / d log_prob of the clipped loss."""
    value = in_rows(log_softmax_of, logits, labels).requires_grad_()
    return torch.autograd.grad(clipped(value, old, advantages).sum(), value)[0]


def head_cases(device: str, scale: float) -> Iterator[Case]:
    """Hidden rows and the head's weight: no logits beforehand."""
    rows, hidden_size, vocabulary = (sized(n, s) for n, s in zip(HEAD_SHAPE, (scale, max(scale, 0.05), scale)))
    size = f"{rows}x{hidden_size}x{vocabulary} bf16"
    make = lambda *shape: torch.randn(shape, device=device).to(torch.bfloat16)  # noqa: E731
    hidden, weight = make(rows, hidden_size), 0.02 * make(vocabulary, hidden_size)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    value = torch.cat([log_softmax_of(h @ weight.t(), y) for h, y in zip(hidden.split(512), labels.split(512))])
    old, advantages = value - 0.05, torch.randn(rows, device=device)
    yield Case(
        f"linear_log_prob forward {size}",
        head_cost(rows, hidden_size, vocabulary, 1),
        {
            "fastrl": lambda: K.linear_log_prob(hidden, weight, labels).log_prob,
            "eager": lambda: log_softmax_of(hidden @ weight.t(), labels),
            "matmul alone": lambda: (torch.mm(hidden, weight.t()), value)[1],
        },
        lambda: value,
    )

    def both(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        def run() -> Any:
            a, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss(a, w).backward()
            return a.grad, w.grad

        return run

    def in_forward(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return K.linear_token_loss(a, w, labels, lambda lp, e, part: clipped(lp, old[part], advantages[part]))[0]

    variants = {
        "fastrl": both(in_forward),
        "fastrl recomputed": both(
            lambda a, w: clipped(K.linear_log_prob(a, w, labels).log_prob, old, advantages).sum()
        ),
        "eager": both(lambda a, w: clipped(log_softmax_of(a @ w.t(), labels), old, advantages).sum()),
    }
    verl = find("verl.utils.experimental.torch_functional:FusedLinearForPPO")
    if verl is not None:
        variants["verl FusedLinearForPPO"] = both(
            lambda a, w: clipped(verl()(a, w, labels)[0].float(), old, advantages).sum()
        )
    cce = find("cut_cross_entropy:linear_cross_entropy")
    if cce is not None:
        variants["cut_cross_entropy"] = both(
            lambda a, w: clipped(-cce(a, w, labels, reduction="none").float(), old, advantages).sum()
        )
    cases = both(lambda a, w: clipped(log_softmax_of(a @ w.t(), labels), old, advantages).sum())
    yield Case(f"head forward+backward {size}", head_cost(rows, hidden_size, vocabulary, 3), variants, cases, 5e-2)


def cases(device: str, scale: float) -> Iterator[Case]:
    """Every case, one at a time; the head's own first, should the time run out."""
    yield from head_cases(device, scale)
    for vocabulary in VOCABULARIES:
        rows, columns = sized(LOGIT_ROWS, scale), sized(vocabulary, scale)
        logits = (3 * torch.randn(rows, columns, device=device)).to(torch.bfloat16)
        labels = torch.randint(0, columns, (rows,), device=device)
        yield from reading_cases(logits, labels)
        yield from writing_cases(logits, labels)
        del logits
