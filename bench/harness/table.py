"""The table that `pytest bench/` ends with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEADER = ("case", "variant", "error", "min ms", "median ms", "ratio", "floor", "peak MiB", "")
# keys of a row with a column of their own, or of no interest here; the others are shown as name=value
_SHOWN = {
    "case", "variant", "error", "tolerance", "ms_min", "ms_median", "ratio", "ratio_min", "of_floor", "floor_ms",
    "peak_mib", "rounds", "loops", "clock", "wrong", "failed", "commit",
}  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""

    def number(key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    rest = [f"{key}={value}" for key, value in row.items() if key not in _SHOWN]
    if row.get("wrong"):
        rest.insert(0, "WRONG, not timed")
    if "failed" in row:
        rest.insert(0, f"failed: {row['failed'][:80]}")
    floor = f"{100 * row['of_floor']:.0f} %" if "of_floor" in row else ""
    ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
    return [
        row["case"], row["variant"], number("error", ".1e"), number("ms_min", ".3f"), number("ms_median", ".3f"),
        ratio, floor, number("peak_mib", ".1f"), "  ".join(rest),
    ]  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Aligned lines; a case's name stands in its first line only."""
    lines, last = [list(HEADER)], None
    for row in rows:
        line = cells(row)
        if line[0] == last:
            line[0] = ""
        else:
            last = line[0]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    left = {0, 1, len(HEADER) - 1}
    return [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]


def lost(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Where somebody else's variant is faster than the best of ours."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "ms_min" in row:
            cases.setdefault(row["case"], []).append(row)
    lines = []
    for case, found in cases.items():
        ours = [row for row in found if row["variant"].startswith("fastrl")]
        for row in found:
            if row in ours or not ours or "imbalance" in row or "fill" in row:  # those are judged by their result
                continue
            time = row["ms_min"] / min(r["ms_min"] for r in ours)
            if time < 0.95:
                lines.append(f"{case}: {row['variant']} takes {time:.2f}x our time")
    return lines
