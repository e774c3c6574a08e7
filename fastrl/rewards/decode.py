"""From token ids to the text that is scored: sampled tokens only, without the token that ended the response."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def scored_tokens(response_ids: Sequence[int], response_mask: Sequence[int | bool]) -> tuple[list[int], int | None]:
    """The sampled ids, and the index of the last of them (where the score lands; None when nothing was sampled).

    Args:
        response_ids: [T] ids, those that the policy did not sample (tool output) included.
        response_mask: [T] true where sampled.
    """
    sampled = [i for i, keep in enumerate(response_mask) if keep]
    return [response_ids[i] for i in sampled], (sampled[-1] if sampled else None)


def response_text(tokenizer: Any, sampled_ids: Sequence[int], stop_token_ids: Collection[int]) -> str:
    """The text of sampled ids without the stop token at the end; other special tokens stay visible."""
    ids = list(sampled_ids)
    if ids and ids[-1] in stop_token_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
