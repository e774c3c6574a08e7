"""The results file: bench/results/<machine>-<date>.json. Cases measured again on the same day replace their rows."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from bench.harness.machine import commit, describe, machine_name
from bench.harness.peers import ROOT

FOLDER = ROOT / "bench" / "results"


def default_path() -> Path:
    """Today's file of this machine."""
    return FOLDER / f"{machine_name()}-{datetime.date.today().isoformat()}.json"


def load(path: Path | str) -> dict[str, Any]:
    """A results file."""
    return json.loads(Path(path).read_text())


def save(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    ceilings: dict[str, float],
    peers: dict[str, str],
    skipped: dict[str, str],
    bars: list[dict[str, Any]],
) -> None:
    """Write, keeping the rows of cases that were not measured this time."""
    old = load(path) if path.exists() else {"rows": [], "peers": {}, "bars": []}
    now = commit()
    measured = {row["case"] for row in rows}
    kept = [row for row in old["rows"] if row["case"] not in measured]
    known = {bar["bar"]: bar for bar in old["bars"]} | {bar["bar"]: bar for bar in bars}
    result = {
        **describe(),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": now,
        "method": "one thread, CPU time, variants in turn, 5 rounds or more; ms a call; checked against float64 first",
        "ceilings": ceilings,
        "peers": old["peers"] | peers,
        "skipped": skipped,
        "bars": list(known.values()),
        "rows": kept + [row | {"commit": now} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(result))


def dumps(result: dict[str, Any]) -> str:
    """JSON with one row a line, so that two files can be compared line by line."""
    lists = {key: result[key] for key in ("bars", "rows")}
    head = json.dumps({key: value for key, value in result.items() if key not in lists}, indent=1)[:-2]
    body = [
        f' "{key}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]" for key, rows in lists.items()
    ]
    return head + ",\n" + ",\n".join(body) + "\n}\n"
