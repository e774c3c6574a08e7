"""What became slower, faster, heavier or wrong between two results files.

    python -m bench.compare A.json B.json [--threshold 1.15] [--all]

Least times are compared: on a shared machine they repeat within 15 %, medians do not always. Cases that only one file
has are listed. The exit code is 1 when B has a wrong result, and 0 otherwise: a time alone never fails anything.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench.harness.results import load

Key = tuple[str, str]


def rows_of(path: str) -> dict[Key, dict[str, Any]]:
    """Rows of a file by (case, variant)."""
    return {(row["case"], row["variant"]): row for row in load(path)["rows"]}


def change(old: dict[str, Any], new: dict[str, Any], key: str) -> float | None:
    """new / old of a figure that both have."""
    return new[key] / old[key] if old.get(key) and new.get(key) else None


def describe(key: Key, old: dict[str, Any], new: dict[str, Any], threshold: float) -> tuple[str, str] | None:
    """(kind, line) of a case and variant that changed by more than the threshold."""
    name = f"{key[0]} [{key[1]}]"
    if new.get("wrong") and not old.get("wrong"):
        return "wrong", f"{name}: error {old.get('error', 0):.1e} -> {new['error']:.1e}"
    if "failed" in new and "failed" not in old:
        return "wrong", f"{name}: {new['failed']}"
    time = change(old, new, "ms_min")
    if time is not None and not 1 / threshold < time < threshold:
        kind = "slower" if time > 1 else "faster"
        return kind, f"{name}: {old['ms_min']:.3f} -> {new['ms_min']:.3f} ms ({time:.2f}x)"
    memory = change(old, new, "peak_mib")
    if memory is not None and memory > threshold and new["peak_mib"] - old["peak_mib"] > 1:
        return "heavier", f"{name}: {old['peak_mib']:.1f} -> {new['peak_mib']:.1f} MiB ({memory:.2f}x)"
    return None


def compare(old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]], threshold: float) -> dict[str, list[str]]:
    """Lines by kind: wrong, slower, heavier, faster, gone, new."""
    found: dict[str, list[str]] = {kind: [] for kind in ("wrong", "slower", "heavier", "faster", "gone", "new")}
    for key in old.keys() & new.keys():
        if (line := describe(key, old[key], new[key], threshold)) is not None:
            found[line[0]].append(line[1])
    found["gone"] = [f"{case} [{variant}]" for case, variant in old.keys() - new.keys()]
    found["new"] = [f"{case} [{variant}]" for case, variant in new.keys() - old.keys()]
    found["wrong"] += [f"{k[0]} [{k[1]}]: {r.get('failed') or r.get('error')}" for k, r in new.items()
                       if k not in old and (r.get("wrong") or "failed" in r)]  # fmt: skip
    return {kind: sorted(lines) for kind, lines in found.items()}


def main() -> int:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--threshold", type=float, default=1.15, help="factor that counts as a change")
    parser.add_argument("--all", action="store_true", help="peers too, not fastrl's variants only")
    options = parser.parse_args()
    old, new = rows_of(options.old), rows_of(options.new)
    if not options.all:
        old, new = ({k: r for k, r in rows.items() if k[1].startswith("fastrl")} for rows in (old, new))
    a, b = load(options.old), load(options.new)
    if a["machine"] != b["machine"]:
        print(f"different machines: {a['machine']} and {b['machine']}; times say little")
    print(f"{a['commit']} ({a['date']}) -> {b['commit']} ({b['date']}), {len(old.keys() & new.keys())} in common")
    found = compare(old, new, options.threshold)
    for kind, lines in found.items():
        for line in lines:
            print(f"{kind:8s} {line}")
    if not any(found.values()):
        print("no differences")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
