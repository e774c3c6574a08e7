"""Launch table: complete, overlaid by a user's file, refreshed by the fastest candidate; the bench script runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import TRITON

from fastrl.kernels import launch, tune

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(TRITON, reason="nothing of it is a kernel")


def test_every_op_has_a_default_without_limit_and_small_blocks_for_the_interpreter():
    for op, by_arch in launch.table().items():
        for arch in ("default", "interpret"):
            limits = [limit for limit, _ in by_arch[arch]]
            assert limits[-1] is None and sorted(limits[:-1]) == limits[:-1], (op, arch)
    assert launch.lookup("scan", "sm_90", 512)["ROWS"] == 32
    assert launch.lookup("scan", "sm_90", 4096)["ROWS"] == 128
    assert launch.arch_of(torch.device("cpu")) == "interpret"


def test_an_overlay_replaces_the_entries_of_its_architecture(monkeypatch, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"scan": {"sm_90": [[None, {"ROWS": 64, "num_warps": 2}]]}}))
    monkeypatch.setenv("FASTRL_LAUNCH_TABLE", str(file))
    launch.table.cache_clear()
    try:
        assert launch.lookup("scan", "sm_90", 4096) == {"ROWS": 64, "num_warps": 2}
        assert launch.lookup("scan", "sm_80", 4096)["ROWS"] == 128
    finally:
        monkeypatch.undo()
        launch.table.cache_clear()


def test_tuning_keeps_the_fastest_candidate_per_size_class(monkeypatch):
    seen = []

    def run(size):
        return lambda: seen.append((size, launch.lookup("elementwise", "sm_90", size)["BLOCK"]))

    def time_ms(call):
        call()
        size, block = seen[-1]
        if block == 512:
            raise RuntimeError("out of resources")
        return abs(block - (1024 if size < 1 << 20 else 4096))

    candidates = [{"BLOCK": b, "num_warps": 4} for b in (512, 1024, 4096)]
    monkeypatch.setitem(tune.TRIALS, "elementwise", tune.Trial(candidates, (1 << 15, 1 << 21), run))
    table = tune.tuned(["elementwise"], "sm_90", time_ms)
    limits = [limit for limit, _ in launch.table()["elementwise"]["default"]]
    assert table == {"elementwise": {"sm_90": [[limits[0], candidates[1]], [limits[1], candidates[2]]]}}
    assert launch.lookup("elementwise", "sm_90", 1)["BLOCK"] == 512  # as before


def test_every_trial_covers_the_size_classes_and_the_shipped_configuration():
    for op, trial in tune.TRIALS.items():
        entries = launch.table()[op]["default"]
        assert len(trial.sizes) == len(entries), op
        for (limit, _), size in zip(entries, trial.sizes, strict=True):
            assert limit is None or size <= limit, op
        assert {k for c in trial.candidates for k in c} == {k for _, c in entries for k in c}, op


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--out", str(tmp_path / "x.json")])
    assert "a GPU is needed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--out", "x", "--only", "gea"])
    assert "--only gea: use some of aggregate" in capsys.readouterr().err


def test_floors_of_the_cost_model():
    sys.path.insert(0, str(REPOSITORY / "bench" / "kernels"))
    try:
        from cost_model import Cost, batch_cost, head_cost, logits_cost
    finally:
        sys.path.pop(0)
    assert batch_cost("gae", 1).bytes == 17
    assert batch_cost("clipped_policy_loss", 1).bytes == 13
    # 8192 x 151936 bfloat16 logits at 4.3 TB/s; 8192 x 4096 x 128256 products at 790 TFLOP/s
    assert logits_cost(8192, 151936, 1).floor_s(4.3e12, 7.9e14) == pytest.approx(0.58e-3, rel=0.01)
    assert head_cost(8192, 4096, 128256, 1).floor_s(4.3e12, 7.9e14) == pytest.approx(10.9e-3, rel=0.01)
    assert head_cost(8192, 4096, 128256, 3).floor_s(4.3e12, 7.9e14) == pytest.approx(32.7e-3, rel=0.01)
    assert Cost(100, 0).floor_s(50.0, 1.0) == 2.0


def test_the_gpu_bench_runs_small_on_a_cpu(tmp_path):
    out = tmp_path / "rows.jsonl"
    script = REPOSITORY / "bench" / "gpu" / "kernels.py"
    subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--scale", "0.001", "--only", "group", "--out", str(out)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    first, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["copy_bytes_s"] > 0 and first["matmul_flops"] > 0
    assert {row["variant"] for row in rows} == {"fastrl", "eager"}
    assert all(row["error"] < 1e-3 and row["ms"] > 0 for row in rows)
