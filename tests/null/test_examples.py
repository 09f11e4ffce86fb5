"""The examples do what they say: they run, learn, draw, and read a log as documented."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def train_ranker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_ranker", EXAMPLES / "train_ranker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart_says_what_packing_saves_and_that_results_agree() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, encoding="utf-8", env=env
    )
    assert run.returncode == 0, run.stderr
    text = " ".join(run.stdout.split())
    padded, packed = map(int, re.search(r"Padding would make (\d+) tokens of (\d+),", text).groups())
    assert padded == 1000 * 1000
    assert f"tokens={packed}," in text
    assert 10 * packed < padded
    assert "The largest entry of the user without a history is 0;" in text
    assert 0 < float(re.search(r"its norm is (\S+)\. ", text)[1]) < 1
    assert float(re.search(r"both results agree to (\S+)\.$", text)[1]) < 1e-5


LOG = """\
user_id:token\titem_id:token\trating:float\ttimestamp:float
ann\tbook\t5\t30
bob\tpen\t4\t5
ann\tpen\t3\t10
ann\tink\t3\t20
bob\tink\t1\t5
eve\tink\t1\t1
bob\tcup\t1\t7
ann\tcup\t1\t40
"""


def test_log_is_read_by_user_in_order_of_time(train_ranker: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tiny.inter"
    path.write_text(LOG)
    histories = train_ranker.read_log(path)
    assert sorted(histories) == [["ink"], ["pen", "ink", "book", "cup"], ["pen", "ink", "cup"]]


def test_log_with_commas_and_other_columns_is_read_alike(train_ranker: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tiny.csv"
    path.write_text("Timestamp,price,ItemId,UserId\r\n2.5,9,b,u\r\n1.5,9,a,u\r\n\r\n")
    assert train_ranker.read_log(path) == [["a", "b"]]


def test_movielens_is_found_without_importing_the_package_that_has_it(
    train_ranker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "recbole"
    log = package / "dataset_example" / "ml-100k" / "ml-100k.inter"
    log.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert train_ranker.find_movielens() is None
    log.write_text(LOG)
    assert train_ranker.find_movielens() == log


def test_last_item_is_the_test_and_the_one_before_validation(train_ranker: ModuleType) -> None:
    data = train_ranker.Split([["pen", "ink", "book", "cup"], ["ink"], ["pen", "ink", "cup"]])
    pen, ink, book, cup = range(4)  # numbered as they come; the user of one event is left out
    assert data.items == 4
    assert [h.tolist() for h in data.train] == [[pen, ink], [pen]]
    assert [(x["history"].tolist(), int(x["next"])) for x in data.valid] == [([pen, ink], book), ([pen], ink)]
    assert [(x["history"].tolist(), int(x["next"])) for x in data.test] == [([pen, ink, book], cup), ([pen, ink], cup)]
    assert data.exclude_seen


def test_items_taken_twice_stay_in_the_ranking(train_ranker: ModuleType) -> None:
    assert not train_ranker.Split([["a", "a", "b", "c"], ["a", "b", "c"]]).exclude_seen


def test_rank_counts_ties_and_nan_against_the_ranking_and_leaves_seen_items_out(train_ranker: ModuleType) -> None:
    examples = [{"history": torch.tensor([0, 1]), "next": torch.tensor(2)}]
    ranked = lambda scores, seen: train_ranker.evaluate(lambda history: scores[None], examples, seen)
    falling = -torch.arange(12.0)
    assert ranked(falling, False) == pytest.approx((1, 0.5))  # third of all: 1 / log2(4)
    assert ranked(falling, True) == pytest.approx((1, 1))  # the first of those not seen
    assert ranked(torch.zeros(12), True) == pytest.approx((1, 1 / math.log2(11)))  # last of ten
    assert ranked(torch.zeros(12), False) == (0, 0)
    assert ranked(torch.full((12,), math.nan), True) == (0, 0)


def test_baselines_count_what_came_before_validation(train_ranker: ModuleType) -> None:
    from jaggedtensor import JaggedTensor

    rankings = train_ranker.baselines([torch.tensor([0, 1, 1, 2]), torch.tensor([3, 1]), torch.tensor([1])], items=4)
    history = JaggedTensor.from_list([[3, 0], [2, 1]])
    assert rankings["popularity"](history).tolist() == [[1, 4, 1, 1]] * 2
    assert rankings["after the last item"](history).argsort(1, descending=True)[:, 0].tolist() == [1, 1]


def test_pooled_history_takes_part_in_the_score(train_ranker: ModuleType) -> None:
    from jaggedtensor import JaggedTensor

    torch.manual_seed(0)
    model = train_ranker.Ranker(items=5, dim=8).eval()
    torch.nn.init.normal_(model.pool.out.weight)
    history = JaggedTensor.from_list([[1, 2, 3, 4], [2], []])
    alone = model.scores(model.states(history).last())
    differ = (model(history) != alone).any(1).tolist()
    assert differ == [True, False, False]  # of one item or none, nothing is left to pool


def test_ranker_learns_and_saves_its_picture(
    train_ranker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    losses = []
    monkeypatch.setattr(
        train_ranker, "draw", lambda found, path, draw=train_ranker.draw: (losses.extend(found), draw(found, path))
    )
    picture = tmp_path / "pictures" / "loss.png"
    status = train_ranker.main(["--invent", "80", "--epochs", "4", "--dim", "16", "--out", str(picture)])
    out = capsys.readouterr().out
    assert "INVENTED histories" in out
    assert ("the ranker beats both" in out) == (status == 0)
    early, late = torch.tensor(losses[:8]).mean(), torch.tensor(losses[-8:]).mean()
    assert late < early - 0.2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_same_seed_gives_same_losses(train_ranker: ModuleType) -> None:
    data = train_ranker.Split(train_ranker.invent_histories(20, seed=1))

    def losses() -> list[float]:
        torch.manual_seed(1)
        return train_ranker.fit(train_ranker.Ranker(data.items, dim=8), data.train, epochs=1)

    assert losses() == losses()


def test_missing_or_unfit_log_is_named(
    train_ranker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train_ranker.main(["--data", "nowhere.inter"])
    assert stop.value.code == 2
    assert "--data: there is no file nowhere.inter" in capsys.readouterr().err
    path = tmp_path / "odd.csv"
    path.write_text("user,thing\n1,2\n")
    with pytest.raises(
        SystemExit, match=r"odd\.csv must have columns named user\.\.\., item\.\.\. and time\.\.\., got user, thing"
    ):
        train_ranker.main(["--data", str(path)])
    path.write_text("user,item,time\n1,2,3\n")
    with pytest.raises(SystemExit, match="no user of the data has three events or more"):
        train_ranker.main(["--data", str(path)])
