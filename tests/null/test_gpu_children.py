"""How tests/gpu runs: in child processes, with a watchdog, and with an account of what has not run. No GPU is needed:
the folder's conftest is copied beside tests of ours, and finds a torch that says that there is a GPU."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"
STUBS = """
import sys
from types import ModuleType

def module(name, **names):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)
    return sys.modules[name]

cuda = module("torch.cuda", is_available=lambda: True, device_count=lambda: 1, synchronize=lambda: None)
module("torch", cuda=cuda)
module("jaggedtensor.testing.compile_once", compile_once=lambda folder: folder.stat())
module("jaggedtensor.testing.guards", poison_free_memory=lambda *_: None)
"""
TIMES = """
import time
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def _times(request):
    begin = time.monotonic()
    yield
    with open(Path(__file__).with_name("times"), "a") as file:
        file.write(f"{begin} {time.monotonic()} {request.node.get_closest_marker('alone') is not None}\\n")
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest over the files given; its status and what it prints."""

    def run(*options, after=None, **files):
        folder = tmp_path / "gpu"
        folder.mkdir()
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q --strict-markers --import-mode=importlib\n")
        (tmp_path / "conftest.py").write_text(STUBS)
        (folder / "conftest.py").write_text(CONFTEST.read_text())
        for name, text in files.items():
            (folder / f"test_{name}.py").write_text(TIMES + text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "gpu"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if after is not None:
            wait_for(after)
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    return run


def wait_for(path):
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_each_test_runs_once_and_those_that_measure_time_alone(run, tmp_path):
    status, said = run(
        many="@pytest.mark.parametrize('i', range(40))\ndef test_many(i):\n    time.sleep(0.02)\n",
        mixed="""
def test_any(): pass
@pytest.mark.limit(9)
def test_long(): pass
@pytest.mark.alone
@pytest.mark.parametrize("i", range(3))
def test_it(i): pass
""",
    )
    assert status == 0, said
    assert "45 passed" in said
    assert re.search(r"test_many.py: through, \d+ s; 4[0-2] of 45 tests in all", said)
    assert re.search(r"test_mixed.py: through, \d+ s; 45 of 45 tests in all", said)
    assert "tests/gpu: 45 of 45 tests were run; none is missing" in said
    lines = [line.split() for line in (tmp_path / "gpu" / "times").read_text().splitlines()]
    assert len(lines) == 45
    alone = [float(begin) for begin, _, is_alone in lines if is_alone == "True"]
    assert len(alone) == 3
    assert min(alone) > max(float(end) for _, end, is_alone in lines if is_alone == "False")


def test_a_test_that_fails_crashes_or_hangs_fails_alone(run):
    status, said = run(
        bad="""
import os
def test_before(): pass
def test_fails(): assert 1 == 2
def test_crashes(): os._exit(3)
@pytest.mark.limit(1)
def test_hangs(): time.sleep(60)
@pytest.fixture
def faulty():
    yield
    raise RuntimeError("a fault of the GPU")
def test_spoils(faulty): pass
def test_after(): pass
"""
    )
    assert status == 1, said
    assert "3 failed, 3 passed, 1 error" in said
    assert "the process ended with status 3" in said
    assert "no end after 1 s: killed by the watchdog" in said
    assert "6 of 6 tests were run; none is missing" in said


def test_a_run_that_is_ended_says_what_is_missing(run, tmp_path):
    status, said = run(
        quick="def test_quick(): pass\n",
        slow=f"""
def test_first(): pass
@pytest.mark.parametrize("i", range(2))
def test_slow(i):
    Path({str(tmp_path / "begun")!r}).touch()
    time.sleep(60)
""",
        after=tmp_path / "begun",
    )
    assert status == 2, said
    found = re.search(r"tests/gpu: (\d) of 4 tests were run; not run: (.*)", said)
    assert found, said
    missing = {name: int(count) for count, name in re.findall(r"(\d) of (\w+\.py)", found[2])}
    assert missing["test_slow.py"] >= 2, said  # the others may or may not have ended when the signal comes
    assert sum(missing.values()) + int(found[1]) == 4, said


def test_the_first_failure_ends_a_run_that_asks_for_it(run):
    status, said = run(
        "-x", one="@pytest.mark.parametrize('i', range(20))\ndef test_one(i):\n    time.sleep(0.2)\n    assert i\n"
    )
    assert status == 1, said
    assert "not run: " in said
    assert "stopping after 1 failures" in said
