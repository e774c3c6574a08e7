"""The doctor says what is broken, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.util

from fastrl.report import doctor


def test_a_healthy_installation(capsys):
    assert doctor.run_doctor()
    shown = capsys.readouterr().out
    for word in ("torch", "transformers", "kernel log_prob", "kernel group_normalize", "bfloat16", "disk"):
        assert word in shown
    assert "everything that training needs works" in shown


def test_a_package_that_does_not_import_is_broken(monkeypatch, capsys):
    real = importlib.import_module

    def import_module(name, *rest):
        if name == "safetensors":
            raise ImportError("undefined symbol: x\nmore")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", import_module)
    found = {check.name: check for check in doctor.required_packages()}
    assert found["safetensors"].state == "broken"
    assert found["safetensors"].detail.startswith("ImportError: undefined symbol: x; reinstall")
    assert not doctor.run_doctor()
    assert "broken: safetensors" in capsys.readouterr().out


def test_a_missing_extra_names_the_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pyarrow" else real(name, *rest)
    )
    found = {check.name: check for check in doctor.optional_packages()}
    assert (found["parquet files"].state, found["parquet files"].detail) == ("note", "pip install 'fastrl[data]'")


def test_wrong_kernel_results_are_broken(monkeypatch):
    import torch

    import fastrl.kernels

    monkeypatch.setattr(fastrl.kernels, "group_normalize", lambda scores, group: torch.zeros(3))
    found = {check.name: check.state for check in doctor.kernels()}
    assert found["kernel group_normalize"] == "broken"


def test_a_check_that_raises_does_not_hide_the_others(monkeypatch):
    def broken():
        raise RuntimeError("no driver")
        yield

    monkeypatch.setattr(doctor, "SECTIONS", (("devices", broken), ("disk", doctor.disk)))
    report = doctor.examine()
    assert report[0][1] == [doctor.Check("devices", "broken", "RuntimeError: no driver")]
    assert report[1][1][0].name == "disk"
