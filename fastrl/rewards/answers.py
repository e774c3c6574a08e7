"""Finding the final answer in a response and comparing it with the reference. Plain strings, no model, no torch."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal, InvalidOperation

# A sign counts only where it cannot be a subtraction ("15-6" ends with 6, "16-17=-1" with -1). Every quantifier is
# bounded by what follows it, so matching takes linear time.
NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
ANNOUNCED = re.compile(r"(?:final answer|answer)\s*(?:is|=|:)\s*:?\s*([^\n]+)", re.IGNORECASE)
DECORATION = "$*_`\"' \t\n"


def last_number(text: str) -> str | None:
    """The last number in the text without thousands separators, or None."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "").lstrip("+") if numbers else None


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 (or the whole) of the pattern's last match in the text, stripped, or None."""
    last = deque(pattern.finditer(text), maxlen=1)
    if not last:
        return None
    match = last[0]
    found = match.group(1) if pattern.groups else match.group()
    return found.strip() if found is not None else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def reference_answer(answer: object) -> str:
    """The reference as text; of a worked GSM8K solution (`... #### 72`) only what follows the marks."""
    return str(answer).rsplit("####", 1)[-1].strip()


def marked_answer(text: str) -> str | None:
    r"""The answer that a response marks as final, or None: the last `<answer>`, else `\boxed{}`, else after `####`."""
    for found in (last_match(TAGGED, text), last_boxed(text)):
        if found is not None:
            return found.strip()
    if "####" not in text:
        return None
    return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()


def announced_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" on its line, or None."""
    announced = last_match(ANNOUNCED, text)
    return announced.lstrip(DECORATION).rstrip(DECORATION + ".") if announced else None


def as_number(text: str) -> Decimal | None:
    """The text as an exact number (separators, currency and percent signs and a final dot dropped), or None."""
    bare = text.strip(DECORATION).rstrip(".%").lstrip("$€£").replace(",", "")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_answer(found: str | None, reference: str) -> bool:
    """Whether two answers are the same number, or, where one is not a number, the same text."""
    if found is None:
        return False
    left, right = as_number(found), as_number(reference)
    if left is not None and right is not None:
        return left == right
    return found.strip() == reference.strip()
