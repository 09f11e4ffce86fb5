"""Runs a script of this folder on several ranks of one machine, over gloo, and waits no longer than it is told."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Ranks:
    """Starts processes with what `torch.distributed` reads from the environment, and looks after them."""

    def __init__(self, folder):
        self.folder, self.runs = folder, 0

    def run(self, script, *args, world=2, seconds=120):
        """Exit status and output of each rank; who is still there when time is over is killed, and says so."""
        self.runs += 1
        common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "PYTHONUNBUFFERED": "1"}
        common["STORE"] = str(self.folder / f"store{self.runs}")
        common["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
        outputs = [self.folder / f"run{self.runs}.rank{rank}" for rank in range(world)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                command = [sys.executable, str(HERE / script), *map(str, args)]
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + seconds
        late = []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(rank)
        texts = [output.read_text(errors="replace") for output in outputs]
        for rank in late:
            texts[rank] += f"\nkilled after {seconds} s"
        return [process.returncode for process in processes], texts

    def check(self, script, *args, **options):
        """All ranks end well."""
        statuses, texts = self.run(script, *args, **options)
        shown = "\n".join(
            f"-- rank {rank}, status {s}\n{text}" for rank, (s, text) in enumerate(zip(statuses, texts, strict=True))
        )
        assert not any(statuses), shown


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)
