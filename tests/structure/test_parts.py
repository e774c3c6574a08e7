"""Parts of the slow tests: together they are all of them, and none is begun when the time is over."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import time, pytest
@pytest.mark.parametrize("i", range(5))
def test_it(i):
    print("test number", i)
    time.sleep(WAIT)
"""


def run(folder, wait, *options):
    """The numbers of the tests that ran, and pytest's exit code."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", folder / "conftest.py")
    (folder / "test_parts_example.py").write_text(TESTS.replace("WAIT", str(wait)))
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder)
    return [int(number) for number in re.findall(r"test number (\d)", done.stdout)], done.returncode


def test_parts_cover_all_once(tmp_path):
    parts = [run(tmp_path, 0, "--part", f"{k}/2")[0] for k in range(2)]
    assert parts == [[0, 2, 4], [1, 3]]
    assert run(tmp_path, 0)[0] == [0, 1, 2, 3, 4]


def test_a_part_that_does_not_exist_is_refused(tmp_path):
    for part in ("2/2", "x/2", "1"):
        assert run(tmp_path, 0, "--part", part) == ([], 4)


def test_no_test_begins_after_the_budget(tmp_path):
    ran, code = run(tmp_path, 0.3, "--budget-s", "0.1")
    assert ran == [0] and code == 0
