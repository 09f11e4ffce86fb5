"""Parquet files are read by row group, only as much at a time as is kept."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import jaggedtensor
from jaggedtensor.data import ParquetSequences, TokenBudgetSampler

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (n,), generator=generator).tolist() for n in [3, 0, 1, 7, *range(40), 0]]


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("parquet"), []
    for n, (begin, end) in enumerate(((0, 20), (20, 20), (20, 45))):
        part = rows[begin:end]
        columns = {
            "history": pa.array(part, pa.list_(pa.int64())),
            "points": pa.array([[[x, 2 * x] for x in row] for row in part], pa.large_list(pa.list_(pa.float32(), 2))),
            "label": pa.array(range(begin, end), pa.int32()),
        }
        paths.append(folder / f"part{n}.parquet")
        pq.write_table(pa.table(columns), paths[-1], row_group_size=6)
    return paths


def test_rows_are_those_of_the_files_one_after_the_other(files, rows):
    data = ParquetSequences(files)
    assert len(data) == 45
    assert data.columns == ["history", "points", "label"]
    for i in [*range(45), -1]:
        item = data[i]
        assert item["history"].tolist() == rows[i]
        assert item["points"].shape == (len(rows[i]), 2)
        assert item["points"][:, 1].tolist() == [2 * x for x in rows[i]]
        assert int(item["label"]) == i % 45
    assert data.lengths("history").tolist() == [len(row) for row in rows]
    assert data.groups == [6, 6, 6, 2, 0, 6, 6, 6, 6, 1]
    with pytest.raises(IndexError, match=r"row must be in -45\.\.44, got 45"):
        data[45]


def count_reads(data, monkeypatch):
    reads = []
    file = type(data._file(0))
    original = file.read_row_group
    monkeypatch.setattr(
        file, "read_row_group", lambda self, i, *a, **k: (reads.append(i), original(self, i, *a, **k))[1]
    )
    return reads


def test_an_epoch_reads_each_row_group_once_and_keeps_a_few(files, rows, monkeypatch):
    data = ParquetSequences(files, ["history", "label"], keep=2)
    sampler = TokenBudgetSampler(data.lengths("history"), 60, groups=data.groups, window=2)
    reads = count_reads(data, monkeypatch)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=jaggedtensor.collate)
    labels = []
    for batch in loader:
        assert batch["history"].num_tokens <= 60
        assert [x.tolist() for x in batch["history"].to_list()] == [rows[i] for i in batch["label"].tolist()]
        labels += batch["label"].tolist()
        assert len(data._kept) <= 2
    assert sorted(labels) == list(range(45))
    assert labels != sorted(labels)
    assert len(reads) == 9


def test_two_ranks_read_every_row_group_once_between_them(files, monkeypatch):
    data = ParquetSequences(files, ["history"], keep=2)
    lengths = data.lengths("history")
    reads = count_reads(data, monkeypatch)
    steps = 0
    for rank in range(2):
        sampler = TokenBudgetSampler(
            lengths, 60, groups=data.groups, window=2, num_replicas=2, rank=rank, drop_last=True
        )
        data._kept.clear()
        steps = max(steps, len(list(DataLoader(data, batch_sampler=sampler, collate_fn=jaggedtensor.collate))))
    assert steps > 3
    assert len(reads) <= 9


def test_workers_open_the_files_for_themselves(files, rows):
    data = ParquetSequences(files, ["history", "label"])
    data[0]
    assert pickle.loads(pickle.dumps(data))._kept == {}
    sampler = TokenBudgetSampler(data.lengths("history"), 100, groups=data.groups)
    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=jaggedtensor.collate, num_workers=1, multiprocessing_context="spawn"
    )
    found = {
        int(i): x.tolist() for batch in loader for i, x in zip(batch["label"], batch["history"].to_list(), strict=True)
    }
    assert found == dict(enumerate(rows))


def test_what_cannot_be_read_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="paths must be a list of at least one path"):
        ParquetSequences([])
    with pytest.raises(ValueError, match="paths must be a list"):
        ParquetSequences("one.parquet")
    with pytest.raises(ValueError, match="must be among history, points, label, got nothing, none"):
        ParquetSequences(files, ["history", "nothing", "none"])
    with pytest.raises(ValueError, match="keep must be at least 1"):
        ParquetSequences(files, keep=0)
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"word": ["a"], "null": pa.array([None], pa.int64()), "none": [[1, None]]}), path)
    for column, error, message in (
        ("word", TypeError, "a column must be of numbers or lists of numbers, got string"),
        ("null", ValueError, "a column must be without nulls, got 1 nulls"),
        ("none", ValueError, "the elements of array must be without nulls"),
    ):
        with pytest.raises(error, match=message):
            ParquetSequences([path], [column])[0]
