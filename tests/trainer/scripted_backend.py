"""A backend whose samples can be worked out by hand, and the program that runs it in a child process.

    token t of a sample = (sum of all weights + sum of the prompt + seed + t) mod 50,   log_prob t = -t/8

Options: `step_s` slows every step; `die_at` names a file: the process kills itself in the step after it appears and
removes it first; `hang_at` stops answering likewise; `die_in_update` ends it after the first tensor, once per file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendInfo, Drawn, Load
from fastrl.rollout.child import serve

VOCABULARY = 50


class ScriptedBackend:
    def __init__(self, settings):
        if settings.model == "unknown":
            raise EngineError("model.path = unknown: the scripted backend does not know it")
        if settings.model == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        self.options, self.settings = settings.options, settings
        self.info = BackendInfo("scripted 1", 64, 1000, ("a warning",))
        self.total, self.running, self.calls = None, [], []

    def add(self, draws, params):
        self.running = [(draw, [], params) for draw in draws]

    def step(self):
        self.act("die_at", lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.act("hang_at", lambda: time.sleep(1000))
        time.sleep(self.options.get("step_s", 0))
        finished, left = [], []
        for draw, tokens, params in self.running[:4]:  # four at a time: the others wait
            tokens.append((self.total + sum(draw.prompt_ids) + draw.seed + len(tokens)) % VOCABULARY)
            reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
            if reason == "stop" or len(tokens) == draw.max_tokens:
                finished.append(self.drawn(draw, tokens, reason))
            else:
                left.append((draw, tokens, params))
        self.running = left + self.running[4:]
        return finished

    def act(self, option, action):
        path = self.options.get(option)
        if path and os.path.exists(path):
            os.remove(path)
            action()

    def drawn(self, draw, tokens, reason):
        return Drawn(draw.key, tokens, [-t / 8 for t in range(len(tokens))], reason)

    def busy(self):
        return bool(self.running)

    def abort(self):
        stopped, self.running = [self.drawn(d, tokens, "abort") for d, tokens, _ in self.running], []
        return stopped

    def load(self):
        return Load(min(4, len(self.running)), max(0, len(self.running) - 4), 10 * len(self.running))

    def load_weights(self, weights):
        total = 0
        for number, (_, tensor) in enumerate(weights):
            if number == 1:
                self.act("die_in_update", lambda: os.kill(os.getpid(), signal.SIGKILL))
            total += int(tensor.sum())
        self.total = total

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake(self, what):
        self.calls.append("wake " + " ".join(what))

    def agree(self, flag):
        return flag

    def close(self):
        if self.options.get("calls"):
            Path(self.options["calls"]).write_text("\n".join(self.calls))


def make_receiver(settings):
    import torch

    from fastrl.dist.weight_plan import TensorSpec
    from fastrl.trainer.engine_child import Receiver

    shape = tuple(settings.options.get("shape", (3, 2)))
    expected = [TensorSpec("weight", shape, torch.float32), TensorSpec("bias", shape[:1], torch.float32)]
    return lambda address: Receiver(address, expected)


if __name__ == "__main__":
    serve(int(sys.argv[1]), ScriptedBackend, make_receiver)
