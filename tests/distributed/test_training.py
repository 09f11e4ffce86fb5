"""Training on two ranks: the checks are in rank_training.py; here a rank is killed in the middle of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
SMALL = ["--sequences", "60", "--budget", "600", "--dim", "16", "--layers", "1", "--save-every", "2", "--steps", "5"]


@pytest.mark.filterwarnings("ignore")  # the reader of checkpoints has deprecations of its own
def test_gradients_are_those_of_one_process_and_a_killed_run_that_is_resumed_ends_the_same(ranks, tmp_path):
    ranks.check("rank_training.py", tmp_path, *SMALL)

    out = tmp_path / "killed"
    statuses, texts = ranks.run("rank_alone.py", *SMALL, "--out", out, "--fail-at", "3", seconds=120)
    assert statuses[1] == -9
    assert statuses[0] not in (0, -9), "the rank that is left ends by itself"
    assert "rank 0 stopped at step 3: " in texts[0]
    assert "if another rank is gone, start anew with --resume" in texts[0]
    assert [path.name for path in out.glob("step-*")] == ["step-000002"]

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE), *SMALL]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    resumed = subprocess.run(
        [*command, "--out", out, "--resume"],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout
    (mine, names), (wanted, same_names) = (contents(path) for path in (out / "step-000005", tmp_path / "ddp-last"))
    assert names == same_names
    assert len(wanted) > 20
    for a, b in zip(mine, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def contents(folder):
    """Everything in a checkpoint, as leaves and their names."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    return tree_flatten(torch.load(folder / "whole.pt", weights_only=True))
