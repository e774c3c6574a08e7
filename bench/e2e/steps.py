"""A trainer in a process of its own as a variant of a case: a call is one training step."""

from __future__ import annotations

from typing import Any

import torch

from bench.e2e.grpo_step import Worker


class Step:
    """Steps of `ours_worker.py` or `trl_worker.py`; `result` is loss and gradient norm of the first one.

    The clock is the process's CPU time, and the memory the whole process's.
    """

    clock = "process"

    def __init__(self, python: str, script: str, settings: dict[str, Any]) -> None:
        self.worker = Worker(python, script, settings)
        self.rows: list[dict[str, Any]] = []

    def step(self) -> dict[str, Any]:
        """One step's figures."""
        self.rows.append(self.worker.step())
        return self.rows[-1]

    def result(self) -> tuple[list[torch.Tensor], float]:
        row = self.step()
        return [torch.tensor(float(row["loss"])), torch.tensor(float(row["grad_norm"]))], row["cpu_s"]

    def seconds(self, loops: int) -> float:
        return sum(self.step()["cpu_s"] for _ in range(loops)) / loops

    def peak_bytes(self) -> int:
        return int(self.rows[-1]["peak_rss_gib"] * 2**30)

    def close(self) -> None:
        self.worker.close()
