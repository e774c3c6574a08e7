"""A backend in a child process: its crash, environment, threads and random numbers stay out of the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import nn

import fastrl
from fastrl.errors import EngineError, FastRLError
from fastrl.rollout.backend import BackendInfo, BackendSettings, Draw, Drawn, Load
from fastrl.rollout.channel import Channel, ChannelClosed, channel_pair
from fastrl.rollout.engine import SamplingParams, WakePart
from fastrl.rollout.link import DeliveryRefused, EngineDied, params_to_json

# A launcher's variables describe the trainer's group; the engine's own group is another.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_", "TORCH_NCCL_", "PYTEST_")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class Sender(Protocol):
    """The trainer's side of a weight delivery."""

    def address(self) -> dict[str, Any]:
        """Where the child finds it."""
        ...

    def send(self, model: nn.Module, version: int) -> None:
        """Deliver; returns when the engine has everything.

        Raises:
            DeliveryRefused: what arrived or would arrive is not what the engine needs: trying again cannot help.
            FastRLError: anything else, such as the death of the engine.
        """
        ...

    def take_part(self) -> None:
        """Join the gathers of sharded weights without an engine to send to."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class ProcessLink:
    """See `Link` for the methods.

    Args:
        module: program of the child (`python -m module DESCRIPTOR`), which calls `fastrl.rollout.child.serve`.
        settings: of the backend.
        sender: delivers weights.
        timeout_s: longest start, and longest silence while it works, in seconds; a silent engine is killed.
        environment: variables to set for the child; None removes one.
        mark: file that tells the other processes of a tensor-parallel engine that this one is dead.
    """

    def __init__(
        self,
        module: str,
        settings: BackendSettings,
        sender: Sender,
        *,
        timeout_s: float = 600.0,
        environment: Mapping[str, str | None] | None = None,
        mark: Path | None = None,
    ) -> None:
        self.module, self.settings, self.sender, self.timeout_s = module, settings, sender, timeout_s
        self.environment, self.mark = dict(environment or {}), mark
        self.log: IO[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.info: BackendInfo | None = None
        self.call = 0
        self.generating = False
        self.last_load = Load()

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child and go on; `wait_ready` waits for it."""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (has no name: nothing is left of it, whoever dies first)
        self.channel, theirs = channel_pair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno())],
                env=child_environment(self.settings, self.environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C is the trainer's; it closes the engine
            )
        self._send(
            {
                "settings": self.settings.to_json(),
                "parent": os.getpid(),
                "mark": None if self.mark is None else str(self.mark),
                "address": self.sender.address(),
            }
        )

    def wait_ready(self) -> BackendInfo:
        """What the backend says when it is ready."""
        if self.info is None:
            if self.process is None:
                self.start()
            fields = self._receive()["ready"]
            self.info = BackendInfo(**(fields | {"warnings": tuple(fields["warnings"])}))
        return self.info

    def restart(self) -> None:
        """A new child in the place of one that died."""
        self._kill()
        self.start()

    def close(self) -> None:
        """End the child: politely, then by force. Its files go with it."""
        if self.channel is not None and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                if self.info is None or self.generating:
                    raise ChannelClosed
                self.channel.send({"do": "close"})
                self.channel.receive(5.0)
        self._kill()
        self.sender.close()

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            end_helpers(self.process.pid)
        if self.channel is not None:
            self.channel.close()
        if self.log is not None:
            self.log.close()
        self.process = self.channel = self.log = self.info = None
        self.generating, self.last_load = False, Load()

    def alive(self) -> str:
        """Empty when the child runs, else how it ended."""
        if self.process is None:
            return "the engine process is not running"
        return "" if self.process.poll() is None else f"the engine process {ending(self.process.returncode)}"

    # -- work ------------------------------------------------------------------------------------------------------

    def generate(self, draws: Sequence[Draw], params: SamplingParams) -> Iterator[Drawn]:
        """Samples as they finish."""
        self.wait_ready()
        self.call += 1
        self._send({"do": "generate", "call": self.call, "params": params_to_json(params), **draws_to_json(draws)})
        self.generating = True
        try:
            while "done" not in (message := self._receive()):
                self.last_load = Load(*message["load"])
                for key, token_ids, log_probs, reason in message["drawn"]:
                    yield Drawn(key, token_ids, log_probs, reason)
            self.generating = False
        finally:
            if self.generating and not self.alive():  # closed early: the engine must be idle for the next call
                self._drain()
            self.last_load = Load()

    def _drain(self) -> None:
        self.abort()
        with contextlib.suppress(EngineError):
            while "done" not in self._receive():
                pass
        self.generating = False

    def update(self, model: nn.Module, version: int) -> None:
        """Deliver the weights of `model`."""
        try:
            self.wait_ready()
            self._send({"do": "update", "version": version, "address": self.sender.address()})
            self._receive()  # connected
        except EngineError:
            self.sender.take_part()
            raise
        try:
            self.sender.send(model, version)
        except DeliveryRefused:
            with contextlib.suppress(EngineError):
                self._answer()
            raise
        except FastRLError:
            self._answer()  # a death is better explained by the engine
            raise
        self._answer()

    def sleep(self, level: int) -> None:
        """Give memory back."""
        self._ask({"do": "sleep", "level": level})

    def wake(self, what: Sequence[WakePart]) -> None:
        """Take memory again."""
        self._ask({"do": "wake", "what": list(what)})

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts."""
        self._ask({"do": "reset_prefix_cache"})

    def abort(self) -> None:
        """End the running generate at its next step."""
        channel = self.channel
        if channel is not None and self.generating:
            with contextlib.suppress(ChannelClosed):
                channel.send({"do": "abort", "call": self.call})

    def load(self) -> Load:
        """How busy the child was when it last said so."""
        return self.last_load

    def _ask(self, message: dict[str, Any]) -> None:
        self.wait_ready()
        self._send(message)
        self._answer()

    def _answer(self) -> None:
        while "done" not in self._receive():
            pass

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        assert self.channel is not None
        try:
            self.channel.send(message)
        except ChannelClosed:
            self._raise_death()

    def _receive(self) -> dict[str, Any]:
        """The next message; a failure that the child reports is raised, EngineDied when it does not survive it."""
        assert self.channel is not None
        message: dict[str, Any] | None = None
        try:
            message = self.channel.receive(self.timeout_s)
        except ChannelClosed:
            self._raise_death()
        if message is None:
            self._raise_death(f"said nothing for {self.timeout_s:g} s and was killed")
        assert message is not None
        if "failed" not in message:
            return message
        self.generating = False
        if not message["fatal"]:
            raise EngineError(message["failed"])
        starting = self.info is None
        self._mark_dead()
        self._kill()
        raise (EngineError if starting else EngineDied)(message["failed"])

    def _raise_death(self, how: str | None = None) -> None:
        process, starting = self.process, self.info is None
        assert process is not None
        if how is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            how = ending(process.poll())
        said = self._last_lines()
        self._mark_dead()
        self._kill()
        where = " while it started" if starting else ""
        text = f"the engine process {how}{where}" + (f"; its last lines:\n{said}" if said else "")
        raise EngineDied(text)

    def _mark_dead(self) -> None:
        if self.mark is not None:
            with contextlib.suppress(OSError):
                self.mark.touch()

    def _last_lines(self, number: int = 15) -> str:
        if self.log is None:
            return ""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 20_000))
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-number:])


def end_helpers(group: int, patience_s: float = 2.0) -> None:
    """Wait for what a dead process has started (one of them removes its shared memory), then kill what is left."""
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)


def ending(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None:
        return "closed its connection"
    if returncode < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def draws_to_json(draws: Sequence[Draw]) -> dict[str, Any]:
    """Samples to draw as they travel: each distinct prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    rows = []
    for draw in draws:
        number = prompts.setdefault(tuple(draw.prompt_ids), len(prompts))
        rows.append([draw.key, number, draw.seed, draw.temperature, draw.max_tokens])
    return {"prompts": [list(prompt) for prompt in prompts], "draws": rows}


def child_environment(settings: BackendSettings, changes: Mapping[str, str | None]) -> dict[str, str]:
    """The trainer's environment without its launcher's variables and without what vLLM's allocator refuses."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith(LAUNCHER_PREFIXES) and name != "VLLM_CPU_KVCACHE_SPACE"
    }
    for name in ALLOCATOR:
        if name in environment:
            parts = [part for part in environment[name].split(",") if "expandable_segments" not in part]
            environment[name] = ",".join(parts)
            if not parts:
                del environment[name]
    root = str(Path(fastrl.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    environment.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if Path(settings.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"  # everything is in the folder; nothing needs to be asked for
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment
