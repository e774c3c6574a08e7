"""A backend whose samples can be worked out by hand, and the program that runs it in a child process.

    token t of a sample = (sum of all weights + sum of the prompt + seed + t) mod 50,   log_prob t = -t/8

With weights in common (`shared`) the sum is taken from them whenever the prefix cache is reset.

Options: `refuse_shared` refuses such weights; `step_s` slows every step; `die_at` names a file: the process kills
itself in the step after it appears and removes it first; `hang_at` stops answering likewise; `die_in_update` ends it
after the first tensor, once per file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from fastrl.dist.weight_plan import TensorSpec
from fastrl.errors import EngineError
from fastrl.rollout.backend import BackendInfo, Drawn, Load
from fastrl.rollout.child import serve
from fastrl.trainer.engine_child import BucketReceiver, Program, abandon

VOCABULARY = 50
WANTED = [("weight", (3, 2), torch.float32), ("bias", (3,), torch.float32)]


class ScriptedBackend:
    def __init__(self, settings, shared=None):
        if settings.model == "unknown":
            raise EngineError("model.path = unknown: the scripted backend does not know it")
        if settings.model == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        self.options, self.settings = settings.options, settings
        self.info = BackendInfo("scripted 1", 64, 1000, ("a warning",))
        self.total, self.running, self.calls = None, [], []
        if shared is not None and settings.options.get("refuse_shared"):
            raise EngineError("rollout.zero_copy: the scripted backend has no use for them")
        self.shared = None if shared is None else shared.fit(WANTED)

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
        if self.shared is not None:
            self.total = int(sum(tensor.sum() for tensor in self.shared.values()))

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake(self, what):
        self.calls.append("wake " + " ".join(what))

    def agree(self, flag):
        return flag

    def close(self):
        if self.options.get("calls"):
            Path(self.options["calls"]).write_text("\n".join(self.calls))


class ScriptedProgram(Program):
    """An engine process whose expected weights are those of a small linear layer."""

    def receiver(self, settings):
        return make_receiver(settings) if self.shared is None else super().receiver(settings)


def make_receiver(settings):
    shape = tuple(settings.options.get("shape", (3, 2)))
    specs = [TensorSpec("weight", shape, torch.float32), TensorSpec("bias", shape[:1], torch.float32)]
    expected = SimpleNamespace(specs=specs, checkpoint=lambda tensors: tensors)  # one name for trainer and checkpoint
    return lambda address: BucketReceiver(address, expected)


if __name__ == "__main__":
    program = ScriptedProgram(ScriptedBackend)
    serve(int(sys.argv[1]), program.backend, program.receiver, abandon)
