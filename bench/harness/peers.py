"""Peers by name: which interpreter has one, and its process, started when first needed.

An interpreter is looked for in this order: the option `--NAME-python`, the variable FASTRL_BENCH_NAME_PYTHON, the same
two for `peers`, the environments that `make bench-peers` makes (.peers/*), this interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.variants import Inputs, Remote

ROOT = Path(__file__).resolve().parents[2]


class Peer(NamedTuple):
    """A package that fastrl is compared with."""

    module: str
    distribution: str
    environment: str  # folder under .peers


PEERS = {
    "verl": Peer("verl", "verl", "verl"),
    "trl": Peer("trl", "trl", "trl"),
    "liger": Peer("liger_kernel", "liger-kernel", "kernels"),
    "cce": Peer("cut_cross_entropy", "cut-cross-entropy", "kernels"),
    "vllm": Peer("vllm", "vllm", "vllm"),
}


class PeerFailed(Exception):
    """A peer's function raised, or its process is gone."""


class Process:
    """One interpreter that runs `bench.harness.worker`."""

    def __init__(self, python: str) -> None:
        self.number = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [python, "-m", "bench.harness.worker"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, wait for its answer."""
        assert self.process.stdin and self.process.stdout
        self.number += 1
        answer: dict[str, Any] = {}
        try:
            self.process.stdin.write(json.dumps(request | {"number": self.number}) + "\n")
            self.process.stdin.flush()
            while answer.get("number") != self.number:  # one that was given up may still be answered first
                line = self.process.stdout.readline()
                if not line:
                    break
                answer = json.loads(line)
        except BrokenPipeError:
            answer = {}
        if answer.get("number") != self.number:
            raise PeerFailed(f"its process ended with code {self.process.wait()}")
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Peers:
    """The peers of a session. `skipped` says why the absent ones are."""

    def __init__(self, pythons: dict[str, str | None]) -> None:
        self.pythons = pythons
        self.processes: dict[str, Process] = {}
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def interpreters(self, name: str) -> list[str]:
        """Candidates, the likeliest first."""
        named = [
            self.pythons.get(name), os.environ.get(f"FASTRL_BENCH_{name.upper()}_PYTHON"),
            self.pythons.get("peers"), os.environ.get("FASTRL_BENCH_PEERS_PYTHON"),
            str(ROOT / ".peers" / PEERS[name].environment / "bin" / "python"), sys.executable,
        ]  # fmt: skip
        return [python for python in named if python and Path(python).exists()]

    def find(self, name: str) -> Process | None:
        """The peer's process; None, with the reason in `skipped`, where it is not installed."""
        if name in self.processes and self.processes[name].process.poll() is not None:
            self.processes.pop(name).close()  # it died in an earlier case: a new one
        if name in self.processes or name in self.skipped:
            return self.processes.get(name)
        peer = PEERS[name]
        for python in self.interpreters(name):
            process = Process(python)
            try:
                version = process.ask(do="find", module=peer.module, distribution=peer.distribution)["version"]
            except PeerFailed:
                version = None
            if version is not None:
                self.processes[name], self.versions[name] = process, version
                return process
            process.close()
        self.skipped[name] = "not installed (make bench-peers)"
        return None

    def variant(self, name: str, function: str, inputs: Inputs, /, **options: Any) -> Remote | None:
        """`function` ("module:name" of bench.peers) in the peer's process; None where that is not possible."""
        process = self.find(name)
        if process is None:
            return None
        try:
            return Remote(process.ask, f"bench.peers.{function}", inputs, **options)
        except PeerFailed as failure:
            self.skipped[f"{name} {function}"] = str(failure)
            return None

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.close()
