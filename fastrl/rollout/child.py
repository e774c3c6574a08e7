"""The engine's process: reads requests from the trainer, drives a backend, writes samples as they finish.

A second thread watches the trainer: when it is gone (the channel ends, or the process has another parent) this process
ends at once, whatever the engine is doing, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fastrl.errors import FastRLError
from fastrl.rollout.backend import Backend, BackendSettings, Draw, Drawn
from fastrl.rollout.channel import Channel, ChannelClosed
from fastrl.rollout.link import params_from_json
from fastrl.rollout.shared_folder import remove_shared

REPORT_EVERY_S = 0.5  # how often a busy backend says how busy it is; also proves that it is not stuck
WATCH_EVERY_S = 0.5
ORPHANED_WITHIN_S = 1.0  # after the channel has ended


class Receiver(Protocol):
    """Where new weights come from."""

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the next update, compared with the expected ones before the first of them is given."""
        ...

    def close(self) -> None:
        """Close the line; the trainer removes what is its own."""
        ...

    def in_place(self) -> bool:
        """For weights that are the trainer's own memory: wait until they are new, True. False where they are sent."""
        ...


class HalfLoaded(Exception):
    """An update failed after its first tensor: this engine is of no use any more."""


class Watch:
    """Reads the channel in a thread of its own, so that an abort or the trainer's end is noticed in mid-step."""

    def __init__(self, channel: Channel, parent: int, mark: Path | None, abandon: Callable[[], None]) -> None:
        self.channel, self.parent, self.mark, self.abandon = channel, parent, mark, abandon
        self.rendezvous: str | None = None
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.aborted = -1  # number of the last call of generate that was aborted
        threading.Thread(target=self._run, name="fastrl-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                message = self.channel.receive(WATCH_EVERY_S)
            except ChannelClosed:
                self.end()
            if message is not None:
                if message["do"] == "abort":
                    self.aborted = message["call"]
                else:
                    self.messages.put(message)
            elif os.getppid() != self.parent or (self.mark is not None and self.mark.exists()):
                self.end()

    def end(self) -> None:
        """End this process, with the files of a trainer that cannot remove them any more."""
        with contextlib.suppress(Exception):
            self.abandon()
            if self.rendezvous is not None and self._orphaned():
                remove_shared(self.rendezvous)
        os._exit(0)

    def _orphaned(self) -> bool:
        """Whether the trainer is gone; a killed one's socket ends a moment before the process does."""
        end = time.monotonic() + ORPHANED_WITHIN_S
        while os.getppid() == self.parent and time.monotonic() < end:
            time.sleep(0.02)
        return os.getppid() != self.parent


class Server:
    """Answers the trainer's messages, one after the other."""

    def __init__(
        self,
        channel: Channel,
        watch: Watch,
        backend: Backend,
        make_receiver: Callable[[dict[str, Any]], Receiver],
    ) -> None:
        self.channel, self.watch, self.backend, self.make_receiver = channel, watch, backend, make_receiver
        self.receiver: Receiver | None = None

    def run(self) -> None:
        """Until the trainer says close."""
        answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "generate": self.generate,
            "update": self.update,
            "sleep": lambda m: self.backend.sleep(m["level"]),
            "wake": lambda m: self.backend.wake(m["what"]),
            "reset_prefix_cache": lambda m: self.backend.reset_prefix_cache(),
        }
        while (message := self.watch.messages.get())["do"] != "close":
            try:
                answers[message["do"]](message)
            except FastRLError as error:
                self.channel.send({"failed": str(error), "fatal": self.backend.busy()})
            else:
                self.channel.send({"done": True})

    def generate(self, message: dict[str, Any]) -> None:
        """Draw the samples, and send them in the step in which they finish."""
        backend, prompts, call = self.backend, message["prompts"], message["call"]
        draws = [Draw(k, prompts[p], seed, temperature, n) for k, p, seed, temperature, n in message["draws"]]
        backend.add(draws, params_from_json(message["params"]))
        last = 0.0
        while backend.busy():
            stop = backend.agree(self.watch.aborted >= call)
            finished = backend.abort() if stop else backend.step()
            if finished or time.monotonic() - last > REPORT_EVERY_S:
                last = time.monotonic()
                load = backend.load()
                self.channel.send(
                    {
                        "drawn": [drawn_to_json(d) for d in finished],
                        "load": [load.running, load.waiting, load.kv_tokens],
                    }
                )

    def update(self, message: dict[str, Any]) -> None:
        """Load the next update. A refusal comes before the first tensor and leaves the engine as it was."""
        if self.receiver is None:
            self.receiver = self.make_receiver(message["address"])
        self.channel.send({"connected": True})  # the sender waits for nobody who is not there
        if self.receiver.in_place():
            self.backend.reset_prefix_cache()
            return
        weights = iter(self.receiver.updates())
        first = next(weights)
        try:
            self.backend.load_weights(chain([first], weights))
        except Exception as error:  # from here on a failure leaves an engine of both weights
            raise HalfLoaded(f"{type(error).__name__}: {error}") from error


def drawn_to_json(drawn: Drawn) -> list[Any]:
    """One sample as it travels."""
    return [drawn.key, drawn.token_ids, drawn.log_probs, drawn.finish_reason]


def serve(
    descriptor: int,
    make_backend: Callable[[BackendSettings, dict[str, Any]], Backend],
    make_receiver: Callable[[BackendSettings], Callable[[dict[str, Any]], Receiver]],
    abandon: Callable[[dict[str, Any]], None],
) -> None:
    """The life of an engine process; returns when the trainer closes the engine.

    Args:
        descriptor: of the socket to the trainer.
        make_backend: makes the backend from its settings and the sender's address.
        make_receiver: from settings, a function from the sender's address to the receiver of its weights.
        abandon: the trainer is gone: removes what its sender left at that address. Called from another thread.
    """
    channel = Channel.from_descriptor(descriptor)
    hello = channel.receive()
    assert hello is not None
    mark = Path(hello["mark"]) if hello["mark"] else None
    watch = Watch(channel, int(hello["parent"]), mark, lambda: abandon(hello["address"]))
    settings = BackendSettings(**hello["settings"])
    watch.rendezvous = settings.rendezvous
    try:
        backend = make_backend(settings, hello["address"])
        receiver = make_receiver(settings)
    except FastRLError as error:
        channel.send({"failed": str(error), "fatal": True})
        return
    info = backend.info
    ready = {"name": info.name, "context": info.context, "kv_tokens": info.kv_tokens, "warnings": list(info.warnings)}
    channel.send({"ready": ready})
    server = Server(channel, watch, backend, receiver)
    try:
        server.run()
        if server.receiver is not None:
            server.receiver.close()
        backend.close()
    except ChannelClosed:
        watch.end()
    except BaseException:
        # what an engine is in after an unknown exception is unknown: the trainer starts another
        traceback.print_exc()
        with contextlib.suppress(ChannelClosed):
            channel.send({"failed": traceback.format_exc(limit=-3).strip(), "fatal": True})
        os._exit(1)
    channel.send({"done": True})
