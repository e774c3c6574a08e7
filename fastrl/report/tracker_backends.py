"""One small class per experiment tracker; packages are imported on demand, and stay offline without a way out."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any]
    run_id: str | None  # of the run that is continued; None starts a new one
    resumed_step: int | None


class Backend(Protocol):
    """A tracker; every method may raise or take its time, `Trackers` deals with that."""

    def start(self, info: RunInfo) -> str:
        """Opens the run; returns the id that continues it later."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite values of one step."""

    def finish(self, status: str) -> None:
        """Ends the run: finished, failed or interrupted."""


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def start(self, info: RunInfo) -> str:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier process logged after the step that training goes on from.
        purge = None if info.resumed_step is None else info.resumed_step + 1
        self.writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=purge)  # type: ignore[no-untyped-call]
        if info.resumed_step is None:
            text = "```json\n" + json.dumps(info.config, indent=1, default=str) + "\n```"
            self.writer.add_text("config", text)  # type: ignore[no-untyped-call]
        return info.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self.writer.flush()  # type: ignore[no-untyped-call]

    def finish(self, status: str) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class Wandb:
    """Weights & Biases; offline (`wandb sync` later) unless WANDB_MODE says otherwise or key and network are there."""

    def start(self, info: RunInfo) -> str:
        import wandb

        url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        has_key = "WANDB_API_KEY" in os.environ or _netrc_knows(url)
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key and reachable(url) else "offline")
        self.run = wandb.init(
            project=info.project,
            name=info.name,
            id=info.run_id,
            resume="allow" if info.run_id else None,
            dir=str(info.folder),
            config=info.config,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        return str(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


class SwanLab:
    """SwanLab; offline (`swanlab sync` later) unless SWANLAB_MODE says otherwise or key and network are there."""

    def start(self, info: RunInfo) -> str:
        import swanlab

        url = os.environ.get("SWANLAB_API_HOST", "https://api.swanlab.cn")
        key_files = [Path.home() / ".swanlab" / ".netrc", Path(os.environ.get("SWANLAB_SAVE_DIR", "")) / ".netrc"]
        has_key = "SWANLAB_API_KEY" in os.environ or any(path.is_file() for path in key_files)
        mode = os.environ.get("SWANLAB_MODE") or ("online" if has_key and reachable(url) else "offline")
        known = inspect.signature(swanlab.init).parameters
        options: dict[str, Any] = {"project": info.project, "config": info.config, "mode": mode}
        options["name" if "name" in known else "experiment_name"] = info.name
        options["log_dir" if "log_dir" in known else "logdir"] = str(info.folder / "swanlog")
        if mode == "online" and "log_dir" not in known:
            options["mode"] = "cloud"  # what releases before 0.10 called it
        if info.run_id and mode != "offline":
            options.update(id=info.run_id, resume="allow")
        run = swanlab.init(**options)
        self.module = swanlab
        return str(getattr(run, "id", "") or "")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        if status == "finished":
            self.module.finish()
        else:
            self.module.finish(state="aborted" if status == "interrupted" else "crashed")


class MLflow:
    """MLflow; a file store in the run folder unless MLFLOW_TRACKING_URI names a server."""

    def start(self, info: RunInfo) -> str:
        # Their defaults (2 minutes, 7 retries) would keep the queue waiting for a server that is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (info.folder.resolve() / "mlruns").as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(info.project)
        self.module = mlflow
        run = mlflow.start_run(run_id=info.run_id, run_name=None if info.run_id else info.name)
        if info.run_id is None:
            mlflow.log_dict(info.config, "config.json")
        return str(run.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Their names know letters, digits and "/_-. :", so pass@4 becomes pass_at_4.
        renamed = {re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_")): value for name, value in values.items()}
        self.module.log_metrics(renamed, step=step)

    def finish(self, status: str) -> None:
        self.module.end_run({"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that trackers can plot."""
    return {name: float(value) for name, value in values.items() if math.isfinite(float(value))}


def reachable(url: str) -> bool:
    """True when a connection to the host of `url` opens within 3 seconds, or a proxy is to be used."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    parts = urlparse(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def _netrc_knows(url: str) -> bool:
    import netrc

    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
