"""Tests that need a CUDA GPU run in child processes under a watchdog: a kernel that hangs or faults spoils its process,
but not the tests that come after. A child takes a few tests of a file, and several children run at a time, so that they
compile side by side, no kernel twice; where there are several GPUs, each child begins with another one.

    python -m pytest tests/gpu --durations 20                        # all, and which took longest
    timeout 120 python -m pytest tests/gpu                           # as many as that allows, and which are missing
    JAGGEDTENSOR_GPU_CHILD=0 python -m pytest tests/gpu -k stride    # in this process, for a debugger or a sanitizer

A test may say that it takes longer than two minutes, `@pytest.mark.limit(seconds)`: it begins first, in a child of its
own (13 seconds until that begins, with 24 side by side). And that it measures time, `@pytest.mark.alone`: it runs last,
with no other test beside it.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jaggedtensor.testing.compile_once import compile_once
from jaggedtensor.testing.guards import poison_free_memory

HERE = Path(__file__).parent
CHILD = "JAGGEDTENSOR_GPU_CHILD"  # the number of the pipe that a child reports to
LOCKS = "JAGGEDTENSOR_GPU_LOCKS"  # the folder by which children agree who compiles a kernel
AT_A_TIME = max(2, (os.cpu_count() or 1) * 3 // 4)
FEW = 16  # tests of a child
LIMIT = 120.0  # seconds for a test, compilation included
START = 120.0  # seconds until the first test
SPOILED = 77  # status of a child whose GPU has faulted: nothing more can be learned from it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): how long the watchdog of GPU tests waits")
    config.addinivalue_line("markers", "alone: a GPU test that measures time")
    if int(os.environ.get(CHILD, 0)):
        compile_once(Path(os.environ[LOCKS]))
        config.pluginmanager.register(_Child(config, int(os.environ[CHILD])))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """What the allocator hands out next is NaN; and a fault belongs to the test that caused it."""
    torch.cuda.synchronize()
    poison_free_memory(1 << 26, "cuda")
    yield
    torch.cuda.synchronize()


# -- the parent ------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    if CHILD in os.environ or session.config.option.collectonly or not torch.cuda.is_available():
        return (yield)
    mine = [item for item in session.items if HERE in item.path.parents]
    session.items = [item for item in session.items if HERE not in item.path.parents]
    tally = _Tally(mine)
    session.config.pluginmanager.register(tally)
    before = signal.signal(signal.SIGTERM, _interrupt)  # of `timeout`, say
    with tempfile.TemporaryDirectory(prefix="locks-", ignore_cleanup_errors=True) as locks:
        os.environ[LOCKS] = locks
        try:
            result = yield  # whatever is not in this folder
            for alone in (False, True):
                _run_all(session, [item for item in mine if _is_alone(item) == alone], tally, 1 if alone else AT_A_TIME)
        finally:
            _CHILDREN.kill()
            signal.signal(signal.SIGTERM, before)
    return result


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


class _Children:
    """Those that run; none after `kill`."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.over, self.lock = False, threading.Lock()

    def start(self, *args: Any, **options: Any) -> subprocess.Popen[bytes] | None:
        with self.lock:
            if self.over:
                return None
            self.all.append(subprocess.Popen(*args, **options))
            return self.all[-1]

    def kill(self) -> None:
        with self.lock:
            self.over = True
            for child in self.all:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)


_CHILDREN = _Children()


class _Tally:
    """How many tests of each file have run: said when a file is through, and at the end."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self.waiting = Counter(item.path.name for item in items)
        self.seconds: Counter[str] = Counter()
        self.count, self.done = len(items), 0

    def add(self, item: pytest.Item) -> None:
        name, reporter = item.path.name, item.config.pluginmanager.get_plugin("terminalreporter")
        self.waiting[name] -= 1
        self.done += 1
        if not self.waiting[name] and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(
                f"{name}: through, {self.seconds[name]:.0f} s; {self.done} of {self.count} tests in all"
            )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        missing = [f"{count} of {name}" for name, count in self.waiting.items() if count]
        said = f"not run: {', '.join(missing)}" if missing else "none is missing"
        terminalreporter.write_line(f"tests/gpu: {self.done} of {self.count} tests were run; {said}")


def _run_all(session: pytest.Session, items: list[pytest.Item], tally: _Tally, at_a_time: int) -> None:
    """Run tests, a few of a file to a child, and hand on their reports as they come."""
    waiting: queue.Queue[list[pytest.Item]] = queue.Queue()
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("limit") is not None:
            waiting.put([item])
        else:
            files.setdefault(item.path, []).append(item)
    for of_file in files.values():
        for i in range(0, len(of_file), FEW):
            waiting.put(of_file[i : i + FEW])
    reports: queue.Queue[tuple[pytest.Item, Any]] = queue.Queue()
    for number in range(at_a_time):
        threading.Thread(target=_serve, args=(waiting, reports, number), daemon=True).start()
    hook, missing = session.config.hook, {item.nodeid for item in items}
    while missing:
        item, data = reports.get()
        if isinstance(data, str):
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", data, "call")
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
        if report.when == "setup":
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        hook.pytest_runtest_logreport(report=report)
        tally.seconds[item.path.name] += report.duration
        if report.when == "teardown" or isinstance(data, str):
            missing.discard(item.nodeid)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            tally.add(item)
            if session.shouldfail:  # -x, --maxfail
                raise session.Failed(session.shouldfail)


def _serve(waiting: queue.Queue[list[pytest.Item]], reports: queue.Queue[tuple[pytest.Item, Any]], number: int) -> None:
    while True:
        try:
            left = waiting.get_nowait()
        except queue.Empty:
            return
        while left:
            left = _run(left, reports, number)


def _gpus(number: int) -> str:
    """All GPUs in an order whose first is child `number`'s."""
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    first = number % count
    return ",".join(seen[first:] + seen[:first])


def _run(items: list[pytest.Item], reports: queue.Queue[tuple[pytest.Item, Any]], number: int) -> list[pytest.Item]:
    """Run tests in a child until it ends or has to be ended; those that it did not come to."""
    by_id = {item.nodeid: item for item in items}
    read, write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(items[0].config.rootpath),
    ]
    child = _CHILDREN.start(
        [*command, *by_id],
        cwd=items[0].config.rootpath,
        env={"OMP_NUM_THREADS": "2", **os.environ, CHILD: str(write), "CUDA_VISIBLE_DEVICES": _gpus(number)},
        pass_fds=(write,),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(write)
    if child is None:
        os.close(read)
        return []
    said: list[bytes] = []
    assert child.stdout is not None
    listener = threading.Thread(target=said.extend, args=(child.stdout,), daemon=True)
    listener.start()
    current: pytest.Item | None = None
    verdict = ""
    limit, begin = START, time.monotonic()
    with os.fdopen(read, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        text = b""
        while True:
            if not selector.select(max(0.0, begin + limit - time.monotonic())):
                verdict = f"no end after {limit:.0f} s: killed by the watchdog"
                break
            more = os.read(pipe.fileno(), 1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                nodeid, data = json.loads(line)
                current = by_id[nodeid]
                if data is None:
                    marker = current.get_closest_marker("limit")
                    limit, begin = (marker.args[0] if marker else LIMIT), time.monotonic()
                else:
                    reports.put((current, data))
                    if data["when"] == "teardown":
                        del by_id[nodeid]
                        current, limit, begin = None, START, time.monotonic()
    if verdict:
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    listener.join()
    child.stdout.close()
    if not by_id:
        return []
    if status == SPOILED and current is None:
        return list(by_id.values())
    verdict = verdict or f"the process ended with status {status}"
    output = b"".join(said).decode(errors="replace")[-4000:]
    failed = current if current is not None else next(iter(by_id.values()))
    del by_id[failed.nodeid]
    reports.put((failed, f"{verdict}\n{output}"))
    return list(by_id.values())


# -- the child -------------------------------------------------------------------------------------------------------


class _Child:
    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self.config, self.pipe = config, pipe

    def _tell(self, nodeid: str, data: Any) -> None:
        os.write(self.pipe, json.dumps([nodeid, data]).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self._tell(report.nodeid, hook.pytest_report_to_serializable(config=self.config, report=report))
        if report.failed and report.when == "teardown":
            os._exit(SPOILED)
