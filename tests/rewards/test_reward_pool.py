"""The pool's contract: order, abstention, failures that are counted and never a silent 0, limits, shutdown."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fastrl.data.prompts import Prompt
from fastrl.errors import ConfigError, RewardError
from fastrl.rewards import RewardPool, RewardSample

TIMEOUT_S = 1.5


def sample(text, number=0, answer="4", num_tokens=3, **extra):
    prompt = Prompt(number, (1, 2), "2+2?", None, "test", answer, extra)
    return RewardSample(prompt, text, tuple(range(num_tokens)), "stop", number)


def judge(functions, texts, weights=None, answer="4", **options):
    """The result of scoring the texts in one pool."""
    options = {"timeout_s": TIMEOUT_S, "max_failure_fraction": 1.0, **options}
    with RewardPool(functions, weights, **options) as pool:
        for number, text in enumerate(texts):
            pool.submit(sample(text, number, answer))
        return pool.collect()


def test_exact_and_math_start_no_process():
    with RewardPool(["exact", "math"], [1.0, 0.5]) as pool:
        for number, text in enumerate(["2+2=4", "5", "\\boxed{5}"]):
            pool.submit(sample(text, number))
        pool.submit(sample("#### 4", 3))
        assert all(lane.worker is None for lane in pool._lanes) or pool._pending[1].num_open == 1
        result = pool.collect()
    assert result.scores.tolist() == [1.5, 0.0, 0.0, 1.5]
    assert result.components["math"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_exact_costs_microseconds():
    with RewardPool(["exact"]) as pool:
        samples = [sample("7+8=15 15-6=9", i, "9") for i in range(4000)]
        start = time.thread_time()
        for one in samples:
            pool.submit(one)
        spent = time.thread_time() - start
        assert pool.collect().scores.sum() == 4000
        assert threading.active_count() >= 1
    assert spent / 4000 < 200e-6  # measured 14 us; the bound only tells a process hop from a function call


def test_outcomes_of_one_function():
    texts = ["0.5", "none", "nan", "inf", "string", "list", "raise", "true", "numpy", "print"]
    result = judge(["python:judges:by_text"], texts)
    assert result.valid.tolist() == [True, False, False, False, False, False, False, True, True, True]
    assert result.scores.tolist() == [0.5, 0, 0, 0, 0, 0, 0, 1.0, 0.25, 1.0]
    assert (result.num_failed, result.num_abstained) == (5, 1)
    assert [math.isnan(x) for x in result.components["by_text"].tolist()] == (~result.valid).tolist()
    assert "returned nan" in result.errors[0]
    assert "the judge is out" in result.errors[4] and "Traceback" in result.errors[4]


def test_scores_beyond_float32_are_failures():
    """1e39 is infinity in float32, and the square of 1e16 is beyond what a group's variance can hold for long."""
    result = judge(["python:judges:number"], ["1e15", "-1e15", "1e16", "-1e39"])
    assert result.valid.tolist() == [True, True, False, False]
    assert result.errors[0].endswith("returned 1e+16, larger than a score may be (1e+15)")


def test_abstention_uses_the_others_and_a_failure_never_does():
    # exact abstains without a reference; by_text answers, abstains, or raises
    result = judge(["exact", "python:judges:by_text"], ["2", "none", "raise"], [1.0, 0.5], answer=None)
    assert result.valid.tolist() == [True, False, False]
    assert result.scores[0] == 1.0
    result = judge(["exact", "python:judges:by_text"], ["4", "raise"], [1.0, 0.5])
    assert result.valid.tolist() == [True, False]  # exact answered for the second: still not a partial score
    assert result.scores[0] == 1.0 + 0.5 * 4


def test_a_hanging_call_is_killed_and_its_process_replaced():
    start = time.monotonic()
    result = judge(["python:judges:by_text"], ["1", "hang", "0.5", "spin", "die", "0.25"])
    assert time.monotonic() - start < 4 * TIMEOUT_S + 10
    assert result.valid.tolist() == [True, False, True, False, False, True]
    assert result.scores.tolist() == [1.0, 0, 0.5, 0, 0, 0.25]
    assert "timed out after 1.5 s" in result.errors[0]
    assert "exit code 7" in result.errors[2]


def test_a_hanging_coroutine_costs_only_itself():
    result = judge(["python:judges:async_by_text"], ["a", "hang", "raise", "b"])
    assert result.valid.tolist() == [True, False, False, True]
    assert "timed out" in result.errors[0] and "async judge is out" in result.errors[1]


def test_a_coroutine_that_blocks_the_loop_is_killed(monkeypatch):
    monkeypatch.setattr("fastrl.rewards.processes.ASYNC_GRACE_S", 0.5)
    with RewardPool(["python:judges:async_by_text"], timeout_s=1.0, max_failure_fraction=1.0) as pool:
        pool.submit(sample("block", 0))
        pool.submit(sample("c", 1))
        time.sleep(0.1)
        with pytest.raises(RewardError, match=r"2 of 2.*blocked the event loop"):
            pool.collect()
        pool.submit(sample("d", 2))
        assert pool.collect().scores.tolist() == [2.0]


@pytest.mark.parametrize("function", ["slow_first", "slow_first_async"])
def test_order_is_kept_and_each_sample_judged_once(function, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    monkeypatch.setenv("FASTRL_TEST_CALLS", str(calls))
    result = judge([f"python:judges:{function}"], [str(i) for i in range(8)], num_workers=3, timeout_s=10.0)
    assert result.scores.tolist() == [float(i) for i in range(8)]
    assert sorted(calls.read_text().split()) == [str(i) for i in range(8)]


def test_collect_in_the_order_of_sample_ids():
    with RewardPool(["python:judges:length"]) as pool:
        for number in (4, 2, 9):
            pool.submit(sample("x" * number, number))
        result = pool.collect([2, 4, 9])
        assert result.sample_ids == [2, 4, 9] and result.scores.tolist() == [2.0, 4.0, 9.0]
        pool.submit(sample("x", 1))
        with pytest.raises(RewardError, match="asked for"):
            pool.collect([1, 2])
        assert pool.collect().scores.tolist() == []
        pool.submit(sample("x", 1))
        pool.submit(sample("x", 1))
        with pytest.raises(RewardError, match="same sample_id"):
            pool.collect()


def test_submit_does_not_wait():
    with RewardPool(["python:judges:by_text"], timeout_s=TIMEOUT_S, max_failure_fraction=1.0) as pool:
        start = time.monotonic()
        pool.submit(sample("hang", 0))
        pool.submit(sample("1", 1))
        assert time.monotonic() - start < 0.5
        assert pool.collect().valid.tolist() == [False, True]


def test_batch_functions(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    monkeypatch.setenv("FASTRL_TEST_CALLS", str(calls))
    functions = ["python:judges:batch_lengths", "python:judges:batch_async", "python:judges:Judge"]
    with RewardPool(functions, [1.0, 10.0, 100.0]) as pool:
        pool.submit(sample("ab", 0, "1", level=1))
        pool.submit(sample("abc", 1, None))
        assert pool.collect().scores.tolist() == [312.0, 303.0]
        pool.submit(sample("abcd", 0, "0"))
        assert pool.collect().scores.tolist() == [304.0]
    assert calls.read_text().split() == ["2", "1"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("batch_one_score", "batch_one_score returned 1 scores for 3 responses"),
        ("batch_text", "batch_text returned a str"),
        ("batch_nested", "batch_nested: returned a list"),
    ],
)
def test_a_batch_function_that_breaks_its_contract_stops_the_run(function, message):
    with pytest.raises(RewardError, match=message):
        judge([f"python:judges:{function}"], ["a", "b", "c"])


def test_batch_nan_and_exception_are_counted():
    result = judge(["python:judges:batch_one_nan"], ["a", "b", "c"])
    assert result.valid.tolist() == [False, True, True] and result.num_failed == 1
    with pytest.raises(RewardError, match=r"3 of 3 samples could not be scored.*no verdict"):
        judge(["python:judges:batch_raises"], ["a", "b", "c"], max_failure_fraction=0.5)


def test_the_failure_fraction_stops_the_run_with_the_traceback():
    texts = ["1", "raise", "1", "1"]
    assert judge(["python:judges:by_text"], texts, max_failure_fraction=0.25).num_failed == 1
    with pytest.raises(RewardError, match=r"1 of 4 samples.*max_failure_fraction = 0\.2") as caught:
        judge(["python:judges:by_text"], texts, max_failure_fraction=0.2)
    assert "by_text: RuntimeError: the judge is out" in str(caught.value) and "Traceback" in str(caught.value)


def test_all_abstaining_stops_the_run():
    with pytest.raises(RewardError, match="exact abstained from all"):
        judge(["exact"], ["4", "5"], answer=None)


def test_columns_are_parameters():
    with RewardPool(["python:judges:from_column"]) as pool:
        pool.submit(sample("x", 0, difficulty=2, other=1))
        assert pool.collect().scores.tolist() == [3.0]
    with pytest.raises(RewardError, match=r"2 of 2 samples could not be scored.*no_such_column"):
        judge(["python:judges:wants_missing", "exact"], ["4", "4"])


@pytest.mark.parametrize("where", ["main", "thread"])
def test_signals_inside_a_reward_work_from_any_thread(where):
    scores = []

    def run():
        scores.extend(judge(["python:judges:alarm", "math"], ["$\\frac{8}{2}$"], timeout_s=30.0).scores.tolist())

    if where == "main":
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert scores == [2.0]


def test_overlong_penalty_then_clip():
    options = {"max_response_tokens": 20, "overlong_buffer_tokens": 4, "overlong_penalty": 0.5, "clip_min": -0.3}
    with RewardPool(["exact"], **options) as pool:
        for number, (text, num_tokens) in enumerate([("4", 16), ("4", 18), ("5", 20), ("4", 21)]):
            pool.submit(sample(text, number, num_tokens=num_tokens))
        result = pool.collect()
    assert result.scores.tolist() == pytest.approx([1.0, 0.75, -0.3, 0.5])
    assert result.num_clipped == 1
    assert result.components["exact"].tolist() == [1.0, 1.0, 0.0, 1.0]


def test_a_pattern_that_backtracks_runs_where_it_can_be_killed():
    result = judge(["regex"], ["a" * 40, "aab"], regex_pattern="(a+)+b")
    assert result.valid.tolist() == [False, True] and result.scores[1] == 1.0
    assert "timed out" in result.errors[0]
    result = judge(["regex"], ["<a>x</a>\n", "<a>x"], regex_pattern=r"<a>.*</a>\s*")
    assert result.scores.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        (["maths"], {}, "did you mean math"),
        (["python:judges"], {}, "unknown reward"),
        (["exact"], {"weights": [1.0, 2.0]}, "2 entries"),
        (["regex"], {}, "regex_pattern"),
        (["exact"], {"answer_pattern": "("}, "not a regular expression"),
        (["exact"], {"overlong_buffer_tokens": 4}, "max_response_tokens"),
    ],
)
def test_wrong_settings(functions, options, message):
    with pytest.raises(ConfigError, match=message):
        RewardPool(functions, **options)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("judges:no_such_function", "no_such_function"),
        ("judges:positional", "filled by name"),
        ("__main__:f", "__main__"),
        ("judges:TIMEOUT", "TIMEOUT"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start(path, message):
    with pytest.raises(RewardError, match=message):
        RewardPool([f"python:{path}"])


def test_close_ends_running_calls_and_leaves_no_process():
    pool = RewardPool(["python:judges:by_text", "python:judges:async_by_text"], timeout_s=60.0, num_workers=2)
    for number in range(3):
        pool.submit(sample("hang", number))
    time.sleep(1.0)
    processes = [lane.worker.process.pid for lane in [*pool._lanes, *pool._async_lanes] if lane.worker]
    assert len(processes) >= 2 and all(map(_alive, processes))
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 5
    assert not any(map(_alive, processes))
    with pytest.raises(RewardError, match="closed"):
        pool.submit(sample("1"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphans_when_the_trainer_dies(how, tmp_path):
    code = (
        "import sys, time\n"
        "from fastrl.rewards import RewardPool, RewardSample\n"
        "from fastrl.data.prompts import Prompt\n"
        "pool = RewardPool(['python:judges:by_text'], timeout_s=600)\n"
        "pool.submit(RewardSample(Prompt(0, (1,), 'x', None, 's', '4', {}), 'spin', (1,)))\n"
        "while pool._lanes[0].worker is None: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print(pool._lanes[0].worker.process.pid, flush=True)\n"
        "pool.collect()\n"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, here])}
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    worker = int(trainer.stdout.readline())
    trainer.send_signal(how)
    trainer.wait(timeout=20)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(worker):
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_reward_processes_do_not_import_torch():
    code = "import sys, fastrl.rewards.worker; print('torch' in sys.modules, 'math_verify' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
