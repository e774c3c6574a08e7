"""What the project holds itself to, looked up in the measured rows. Each is reported whether it holds or not."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bar(NamedTuple):
    """`figure` of the variant `variant` of the case `case`, compared with `wanted`."""

    text: str
    case: str
    variant: str
    figure: str  # a key of the row, or "memory": its peak over ours; "time": ours over its median
    at_least: bool
    wanted: float


GAE = [
    Bar(f"GAE {size}: at least 10x verl's function", f"gae {size} prefix", "verl", "ratio", True, 10.0)
    for size in ("64x1024", "256x2048", "512x4096")
]
GROUPS = [
    Bar(f"grouped normalisation {size}: at least 50x verl's default", f"groups {size}", "verl", "ratio", True, 50.0)
    for size in ("1024/8", "4096/16", "16384/16")
]
POLICY = [
    Bar(f"policy loss {mode}: at least verl's", f"policy loss 256x2048 {mode}", "verl", "ratio", True, 1.0)
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
]
HEAD = [
    bar
    for rows in (256, 512, 1024, 2048)
    for bar in (
        Bar(
            f"head fp32 N {rows}: at most 1.0x of naive in time", f"head float32 N {rows}", "naive", "time", False, 1.0
        ),
        Bar(
            f"head fp32 N {rows}: at most half of naive's memory",
            f"head float32 N {rows}",
            "naive",
            "memory",
            False,
            0.5,
        ),
        Bar(f"head bf16 N {rows}: at most 1.0x of the best peer", f"head bfloat16 N {rows}", "*", "time", False, 1.0),
    )
]
ENGINE = [Bar("embedded engine: at least 1.5x generate", "engine 4x8x32", "generate", "ratio", True, 1.5)]
TRAIN = [
    Bar(f"train phase {case}: at least 3x TRL's", f"train phase {case}", "trl", "ratio", True, 3.0)
    for case in ("sums", "long")
]
BARS = [*GAE, *GROUPS, *POLICY, *HEAD, *ENGINE, *TRAIN]


def measured(bar: Bar, rows: list[dict[str, Any]]) -> float | None:
    """The bar's figure, None where it was not measured."""
    found = {row["variant"]: row for row in rows if row["case"] == bar.case and "ms_median" in row}
    ours = next((row for name, row in found.items() if name.startswith("fastrl")), None)
    others = [row for name, row in found.items() if not name.startswith("fastrl") and bar.variant in ("*", name)]
    if ours is None or not others:
        return None
    if bar.figure == "memory":
        return ours["peak_mib"] / others[0]["peak_mib"] if others[0].get("peak_mib") else None
    best = min(others, key=lambda row: row["ms_median"])
    return ours["ms_median"] / best["ms_median"] if bar.figure == "time" else best[bar.figure]


def check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars that these rows can answer."""
    found = []
    for bar in BARS:
        value = measured(bar, rows)
        if value is not None:
            holds = value >= bar.wanted if bar.at_least else value <= bar.wanted
            found.append({"bar": bar.text, "wanted": bar.wanted, "measured": round(value, 3), "holds": holds})
    return found
