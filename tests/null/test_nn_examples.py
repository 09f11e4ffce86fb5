"""Moving from padded modules, as the example does it: the same numbers, fewer rows."""

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("move_from_padded", EXAMPLES / "move_from_padded.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_moved_model_gives_the_same_numbers_on_fewer_rows(example):
    args = argparse.Namespace(device="cpu", dim=64, layers=2)
    contest = example.Contest(args, torch.float64, 12, 60)
    assert example.difference(contest) < 1e-12
    assert contest.batch.num_tokens < 0.5 * contest.rows.shape[0] * contest.rows.shape[1]
    with torch.no_grad():
        contest.jagged.layers[0].linear1.weight[0, 0] += 1e-3
    assert example.difference(contest) > 1e-6  # it looks


def test_example_reports_and_fails_if_numbers_differ(example, monkeypatch, capsys):
    monkeypatch.setattr(example, "megabytes", lambda which, args: {"padded": 30.0, "jagged": 10.0}[which])
    small = ["--batch", "8", "--longest", "40", "--dim", "32", "--layers", "1", "--passes", "1"]
    assert example.main(small) == 0
    shown = capsys.readouterr().out
    assert "3.0 times less memory" in shown
    assert "the numbers are the same" in shown
    monkeypatch.setattr(example, "difference", lambda contest: 0.5)
    assert example.main(small) == 1
    assert "THE NUMBERS DIFFER" in capsys.readouterr().out
