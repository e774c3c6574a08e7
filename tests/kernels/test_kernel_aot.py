"""Every kernel with every shipped launch configuration through the real compiler, for GPUs that are not there.

`aot_table.json` holds registers, spilled bytes, shared memory and the widest global load of each, per target and Triton
version. They may not get worse; other versions of Triton are held to the rules only. To write the table again:

    python tests/kernels/test_kernel_aot.py [target ...]
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import kernel_oracles as oracle
import kernel_target
import pytest
import torch
import triton
from aot_scenarios import SCENARIOS
from kernel_cases import TRITON, close, mask_of, normal
from kernel_target import SHARED_LIMIT, on_target, resources

from fastrl.kernels import launch
from fastrl.kernels.clipped_policy_loss.kernel import clipped_policy_loss_triton
from fastrl.kernels.clipped_value_loss.kernel import clipped_value_loss_triton
from fastrl.kernels.gae.kernel import gae_triton
from fastrl.kernels.kl_divergence.kernel import kl_divergence_backward_triton, kl_divergence_triton
from fastrl.kernels.masked_stats.kernel import masked_stats_triton
from fastrl.kernels.mismatch_stats.kernel import mismatch_sums_triton
from fastrl.kernels.whiten.kernel import whiten_triton

pytestmark = pytest.mark.skipif(TRITON, reason="the interpreter process cannot compile")

TABLE = Path(__file__).with_name("aot_table.json")
VERSION = ".".join(triton.__version__.split(".")[:2])
TARGETS = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]


def measure(target, scenario):
    """label -> resources of every launch of a scenario."""
    with on_target(target, execute=False) as record:
        SCENARIOS[scenario]()
    found = {}
    for entry in record:
        if entry.label not in found:
            found[entry.label] = resources(entry, target)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_resources(scenario, target):
    known = json.loads(TABLE.read_text()).get(VERSION, {}).get(target, {})
    for label, now in measure(target, scenario).items():
        assert now["spill_bytes"] == 0, f"{label}: {now}"
        assert now["shared"] <= SHARED_LIMIT[target], f"{label}: {now}"
        if VERSION == "3.7":
            assert label in known, f"{label} is not in {TABLE.name}: write it again"
            before = known[label]
            assert now["registers"] <= before["registers"], f"{label}: {now}, was {before}"
            assert now["shared"] <= before["shared"], f"{label}: {now}, was {before}"
            assert now["widest_load"] >= before["widest_load"], f"{label}: {now}, was {before}"


def test_every_configuration_of_the_table_is_among_the_scenarios():
    lookup, chosen = launch.lookup, set()

    def watched(op, arch, size):
        entries = launch.table()[op].get(arch, launch.table()[op]["default"])
        chosen.add((op, next(i for i, (limit, _) in enumerate(entries) if limit is None or size <= limit)))
        return lookup(op, arch, size)

    nothing = mock.Mock(metadata=mock.Mock(num_warps=4, shared=0))
    with mock.patch.object(launch, "lookup", watched), mock.patch.object(kernel_target, "_compile", lambda *a: nothing):
        for scenario in SCENARIOS.values():
            with on_target("cuda:90", execute=False):
                scenario()
    table = {(op, i) for op, by_arch in launch.table().items() for i in range(len(by_arch["default"]))}
    assert table - chosen == set()


def full_blocks():
    """name -> call on 2 x 2048 tokens: whole blocks of the large configuration, nothing ragged."""
    x = torch.from_numpy(normal(4096, 1)).float().reshape(1, 4096)
    y = torch.from_numpy(normal(4096, 2)).float().reshape(1, 4096)
    m = torch.from_numpy(mask_of(4096, 3)).reshape(1, 4096)
    infinity = float("inf")
    clip = (0.2, 0.2, 3.0, infinity, False, True)
    return {
        "gae": lambda: gae_triton(x, y, m, None, None, None, 0.99, 0.95),
        "policy": lambda: clipped_policy_loss_triton(x, y, y, m, None, None, None, *clip),
        "value": lambda: clipped_value_loss_triton(x, y, y, m, None, None, None, 0.5, infinity, False, True),
        "kl": lambda: kl_divergence_triton(x, y, "k3", "k3"),
        "kl backward": lambda: kl_divergence_backward_triton(x, x, y, "k3"),
        "whiten": lambda: whiten_triton(x, m, y[0, 0], y[0, 1].abs(), 1, 1e-8),
        "stats": lambda: masked_stats_triton(x, m, None, True, 1),
        "mismatch": lambda: mismatch_sums_triton(x, y, m, None),
    }


@pytest.mark.parametrize("name", list(full_blocks()))
def test_the_main_loop_moves_its_bytes_in_16_byte_accesses(name, monkeypatch):
    # the configuration of a large batch, whatever the size here
    lookup = launch.lookup
    monkeypatch.setattr(launch, "lookup", lambda op, arch, size: lookup(op, arch, 1 << 30))
    with on_target("cuda:90") as record:
        full_blocks()[name]()
    moved = record[0].loads + record[0].stores
    wide = sum(n for width, n in moved.items() if width >= 16)
    # what is left are scalars: bounds, counts and partial sums that each program moves once
    assert wide >= 0.95 * sum(moved.values()), dict(moved)


def test_the_oracle_agrees_where_the_widths_were_measured():
    x, y, m = normal(4096, 1), normal(4096, 2), mask_of(4096, 3)
    with on_target("cuda:90"):
        got = full_blocks()["gae"]()
    want = oracle.gae(x.astype("f4"), y.astype("f4"), m, [0, 4096], 0.99, 0.95)
    close(got[0][0], want[0])


def write(chosen):
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    by_target = table.setdefault(VERSION, {})
    for target in chosen:
        rows = {}
        for scenario in SCENARIOS:
            rows |= measure(target, scenario)
        by_target[target] = dict(sorted(rows.items()))
    lines = json.dumps(table, indent=1, sort_keys=True)
    lines = re.sub(r"\{\s+(\"registers\".*?)\s+\}", lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", lines, flags=re.S)
    TABLE.write_text(lines + "\n")


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    write(sys.argv[1:] or TARGETS)
