"""The benchmarks' own machinery: the gate refuses what is wrong, rows say what was measured, two files compare."""

import json

import pytest
import torch

from bench.compare import compare, rows_of
from bench.harness.bars import Bar, measured
from bench.harness.calls import loops_for, peak_bytes, tensors_of
from bench.harness.measure import Case, Measured, distance
from bench.harness.peers import PEERS, Peers
from bench.harness.results import save
from bench.harness.table import table
from bench.harness.variants import Inputs, Local
from bench.kernels.cost_model import Cost
from bench.kernels.head_variants import Data, make, naive, reference
from bench.kernels.plain import chunked_gae, eager_aggregate, eager_gae, eager_groups

RATES = {"copy_bytes_s": 1e9, "matmul_flops_float32": 1e9}


def test_distance_by_hand():
    x = [torch.tensor([3.0, 4.0])]
    assert distance([torch.tensor([3.0, 4.5])], x) == pytest.approx(0.5 / 5)
    assert distance([torch.tensor([3.0, float("nan")])], x) == float("inf")
    assert distance([torch.tensor([3.0])], x) == float("inf")
    assert distance([], x) == float("inf")


def test_a_wrong_result_is_not_timed():
    case = Case(
        "c",
        {
            "fastrl": Local(lambda: torch.ones(3)),
            "peer": Local(lambda: torch.full((3,), 1.01)),
            "absent": None,
        },
        expected=lambda: [torch.ones(3, dtype=torch.float64)],
        tolerance=1e-3,
        cost=Cost(1000, 0),
    )
    m = Measured(case, RATES)
    m.gate()
    assert list(m.times) == ["fastrl"]
    assert m.rows["peer"]["wrong"] and m.rows["peer"]["error"] == pytest.approx(0.01)
    m.times["fastrl"] = [2e-3, 4e-3, 3e-3]
    row = m.finish()[0]
    assert (row["ms_min"], row["ms_median"], row["rounds"]) == (2.0, 3.0, 3)
    assert row["floor_ms"] == 0.001 and row["of_floor"] == 0.0005  # 1000 bytes at 1e9 bytes/s
    lines = table(m.rows.values())
    assert "WRONG, not timed" in lines[2] and lines[2].startswith("  ")


def test_ratio_is_the_medians():
    case = Case("c", {"fastrl": Local(int), "peer": Local(int)}, error=lambda t: 0.0)
    m = Measured(case, RATES)
    m.gate()
    m.times = {"fastrl": [1.0, 2.0, 9.0], "peer": [5.0, 6.0, 40.0]}
    rows = {row["variant"]: row for row in m.finish()}
    assert rows["peer"]["ratio"] == 3.0 and rows["peer"]["ratio_min"] == 5.0
    assert measured(Bar("", "c", "peer", "ratio", True, 1.0), list(rows.values())) == 3.0
    assert measured(Bar("", "c", "*", "time", False, 1.0), list(rows.values())) == pytest.approx(1 / 3)
    assert measured(Bar("", "other", "peer", "ratio", True, 1.0), list(rows.values())) is None


def test_peak_memory_of_a_call():
    size = 64 << 20
    peak = peak_bytes(lambda: torch.ones(size, dtype=torch.uint8))
    if peak is None:
        pytest.skip("no /proc/self/clear_refs")
    assert 0.98 * size <= peak < 1.2 * size


def test_loops_cover_the_clock():
    assert loops_for(1e-3) == 5 and loops_for(1.0) == 1 and loops_for(1e-9) == 64
    assert len(tensors_of({"a": torch.ones(1), "b": [torch.ones(1), (torch.ones(1), 3)]})) == 3


def test_a_peer_process_makes_the_same_numbers():
    peers = Peers({})
    PEERS["here"] = PEERS["verl"]._replace(module="torch", distribution="torch")
    try:
        x = torch.tensor([[1.0, 2.0], [5.0, -1.0]])
        variant = peers.variant("here", "plain_functions:softmax", Inputs(x=x), dim=0)
        assert variant is not None and peers.versions["here"] == torch.__version__
        (got,), _ = variant.result()
        assert torch.equal(got, torch.softmax(x, 0))
        assert variant.seconds(3) > 0
        assert peers.variant("here", "plain_functions:nothing", Inputs()) is None
        assert "nothing" in peers.skipped["here plain_functions:nothing"]
    finally:
        peers.close()
        del PEERS["here"]


def results(path, rows):
    save(path, rows, ceilings=RATES, peers={}, skipped={}, bars=[])


def test_two_files_compare(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    row = {"case": "c", "variant": "fastrl", "error": 1e-7, "ms_min": 10.0, "peak_mib": 10.0}
    results(a, [row, row | {"case": "d"}, row | {"case": "e"}, row | {"case": "f"}, row | {"case": "g"}])
    results(b, [
        row | {"ms_min": 11.0}, row | {"case": "d", "ms_min": 12.0}, row | {"case": "e", "wrong": True, "error": 1.0},
        row | {"case": "f", "peak_mib": 20.0}, row | {"case": "h"},
    ])  # fmt: skip
    found = compare(rows_of(str(a)), rows_of(str(b)), 1.15)
    assert found["slower"] == ["d [fastrl]: 10.000 -> 12.000 ms (1.20x)"]
    assert found["wrong"] == ["e [fastrl]: error 1.0e-07 -> 1.0e+00"]
    assert found["heavier"] == ["f [fastrl]: 10.0 -> 20.0 MiB (2.00x)"]
    assert found["gone"] == ["g [fastrl]"] and found["new"] == ["h [fastrl]"] and found["faster"] == []


def test_a_case_measured_again_replaces_its_rows(tmp_path):
    path = tmp_path / "a.json"
    results(path, [{"case": "c", "variant": "fastrl", "ms_min": 1.0}, {"case": "d", "variant": "fastrl"}])
    results(path, [{"case": "c", "variant": "fastrl", "ms_min": 2.0}])
    rows = json.loads(path.read_text())["rows"]
    assert [(r["case"], r.get("ms_min")) for r in rows] == [("d", None), ("c", 2.0)]
    assert all("commit" in r for r in rows)


def test_the_references_by_hand():
    r, v = torch.tensor([[1.0, 0.0, 2.0, 7.0]]).double(), torch.tensor([[0.5, 9.0, 1.0, 9.0]]).double()
    mask = torch.tensor([[True, False, True, False]])
    advantages, returns = eager_gae(r, v, mask, 0.5, 0.5)
    # t = 2: 2 - 1 = 1;  t = 0: 1 + 0.5 * 1 - 0.5 = 1, plus 0.25 * 1
    assert advantages.tolist() == [[1.25, 0.0, 1.0, 0.0]] and returns.tolist() == [[1.75, 0.0, 2.0, 0.0]]
    scores = torch.tensor([1.0, 3.0, 5.0, 5.5]).double()
    got = eager_groups(scores, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(got, torch.tensor([-1, 1, -0.25, 0.25]).double() / (
        torch.tensor([2**0.5, 2**0.5, 0.125**0.5, 0.125**0.5]).double() + 1e-6))  # fmt: skip
    loss, m = torch.tensor([[1.0, 3.0], [8.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    assert eager_aggregate(loss, m, "token-mean") == 4
    assert eager_aggregate(loss, m, "seq-mean-token-mean") == 5
    assert eager_aggregate(loss, m, "seq-mean-token-sum") == 6
    assert eager_aggregate(loss, m, "seq-mean-token-sum-norm") == 3


def test_the_scan_is_the_loop():
    torch.manual_seed(0)
    r, v = torch.randn(5, 150).double(), torch.randn(5, 150).double()
    mask = torch.arange(150)[None] < torch.tensor([150, 1, 64, 65, 130])[:, None]
    for got, want in zip(chunked_gae(r, v, mask, 0.99, 0.95), eager_gae(r, v, mask, 0.99, 0.95)):
        torch.testing.assert_close(got, want)


def test_the_head_reference_is_autograd():
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in make(24, torch.float32, 8, 40).items()}
    data = Data.of(inputs)
    ratio = (torch.log_softmax(data.hidden @ data.weight.t(), -1)[range(24), data.labels] - data.old).exp()
    a = data.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).sum() / 24
    want = [loss.detach(), *torch.autograd.grad(loss, (data.hidden, data.weight))]
    for got, expected in zip(reference(inputs), want):
        torch.testing.assert_close(got, expected)
    assert float(naive(data)) == pytest.approx(float(loss), rel=1e-6)


def test_a_peer_that_dies_fails_alone():
    peers = Peers({})
    PEERS["here"] = PEERS["verl"]._replace(module="torch", distribution="torch")
    try:
        x = Inputs(x=torch.ones(2, 2))
        case = Case(
            "c",
            {
                "fastrl": Local(lambda: torch.full((2, 2), 0.5)),
                "here": peers.variant("here", "plain_functions:softmax", x, dim=0),
            },
            expected=lambda: [torch.full((2, 2), 0.5).double()],
        )
        m = Measured(case, RATES)
        m.gate()
        assert set(m.times) == {"fastrl", "here"}
        peers.processes["here"].process.kill()
        peers.processes["here"].process.wait()
        m.turn("here")
        assert "ended" in m.rows["here"]["failed"] and set(m.times) == {"fastrl"}
        m.close()
        again = peers.variant("here", "plain_functions:softmax", x, dim=0)
        assert again is not None and again.seconds(1) > 0
    finally:
        peers.close()
        del PEERS["here"]
