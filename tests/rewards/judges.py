"""Reward functions of every temper, imported by the reward processes as `python:judges:NAME`."""

import asyncio
import os
import signal
import time


def one(response):
    return 1.0


def length(response, answer=None):
    return len(response)


def from_column(response, difficulty, **columns):
    assert "prompt" not in columns
    return float(difficulty) + len(columns)


def wants_missing(response, no_such_column):
    return 1.0


def by_text(response):
    """The response says what to do."""
    if response == "raise":
        raise RuntimeError("the judge is out")
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response == "inf":
        return float("inf")
    if response == "string":
        return "0.5"
    if response == "list":
        return [1.0]
    if response == "true":
        return True
    if response == "numpy":
        import numpy

        return numpy.float32(0.25)
    if response == "hang":
        time.sleep(600)
    if response == "spin":
        while True:
            pass
    if response == "die":
        os._exit(7)
    if response == "print":
        print("noise on stdout")
    return float(response) if response.replace(".", "").isdigit() else 1.0


def alarm(response):
    """Sets a signal handler and an alarm, as some math verifiers do; only a main thread may."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 30)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 1.0


def _record(line):
    with open(os.environ["FASTRL_TEST_CALLS"], "a") as calls:
        calls.write(f"{line}\n")


def slow_first(response):
    _record(response)
    time.sleep((8 - int(response)) * 0.02)
    return int(response)


async def slow_first_async(response):
    _record(response)
    await asyncio.sleep((8 - int(response)) * 0.02)
    return int(response)


async def async_by_text(response):
    if response == "hang":
        await asyncio.sleep(600)
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise RuntimeError("the async judge is out")
    return 2.0


def batch_lengths(prompts, responses, answers, **columns):
    _record(len(responses))
    assert all(len(values) == len(responses) for values in columns.values())
    return [len(response) for response in responses]


async def batch_async(completions, answer):
    await asyncio.sleep(0)
    return [None if a is None else float(a) for a in answer]


def batch_one_score(responses):
    return [1.0]


def batch_text(responses):
    return "not a list"


def batch_nested(responses):
    return [[1.0] for _ in responses]


def batch_one_nan(responses):
    return [float("nan"), *[1.0] * (len(responses) - 1)]


def batch_raises(responses):
    raise RuntimeError("no verdict")


class Judge:
    def __call__(self, response):
        return 3.0


def positional(response, /):
    return 1.0


def number(response):
    """The number that the response is."""
    return float(response)
