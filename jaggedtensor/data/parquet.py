"""Sequences in parquet files, read by row group: a data set may be larger than memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from jaggedtensor.errors import fail
from jaggedtensor.tensor import JaggedTensor


class ParquetSequences(Dataset[dict[str, Tensor]]):
    """Rows of parquet files as dicts of tensors: a list column gives `[L, *feature]`, another one a number.

    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> table = pa.table({"history": [[1, 2, 3], [], [4]], "label": [0, 1, 0]})
    >>> pq.write_table(table, "log.parquet", row_group_size=2)
    >>> data = ParquetSequences(["log.parquet"])
    >>> data[2]
    {'history': tensor([4]), 'label': tensor(0)}
    >>> data.lengths("history"), data.groups
    (tensor([3, 0, 1]), [2, 1])

    Row groups are read when a row of theirs is asked for, and the last few are kept, in each worker of a DataLoader for
    itself. For training, let the sampler keep to groups:

        sampler = TokenBudgetSampler(data.lengths("history"), budget=8192, groups=data.groups, window=4)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=jaggedtensor.collate, num_workers=2)

    Args:
        paths: files, in order, of the same columns.
        columns: names; all if left out.
        keep: row groups held in memory, at least the sampler's `window` lest groups be read again and again.

    Raises:
        TypeError: a column whose elements are not numbers (when it is read).
        ValueError: no files; a column that is not there; nulls among the elements.
    """

    def __init__(
        self, paths: Sequence[str | PathLike[str]], columns: Sequence[str] | None = None, *, keep: int = 5
    ) -> None:
        if isinstance(paths, (str, PathLike)) or not paths:
            fail("paths", "a list of at least one path", repr(paths))
        if keep < 1:
            fail("keep", "at least 1", keep)
        self.paths, self.keep = [fspath(path) for path in paths], keep
        self._files: dict[int, Any] = {}
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._places: list[tuple[int, int]] = []  # file and row group of each group
        self._ends: list[int] = []  # row after the last of each group
        names = None
        for number, path in enumerate(self.paths):
            meta = self._file(number).metadata
            found = self._file(number).schema_arrow.names
            names = list(columns) if columns is not None else (names or found)
            missing = [name for name in names if name not in found]
            if missing:
                fail(f"columns of {path}", f"among {', '.join(found)}", ", ".join(missing))
            for group in range(meta.num_row_groups):
                self._places.append((number, group))
                self._ends.append((self._ends[-1] if self._ends else 0) + meta.row_group(group).num_rows)
        self.columns = names or []

    @property
    def groups(self) -> list[int]:
        """Rows of each row group."""
        return [end - begin for begin, end in zip([0, *self._ends], self._ends, strict=False)]

    def lengths(self, column: str) -> Tensor:
        """int64 `[rows]`: the lengths of a list column. Reads that column once, group by group; a null has length 0."""
        import pyarrow.compute as pc

        parts = [torch.zeros(0, dtype=torch.int64)]
        for file, group in self._places:
            read = self._file(file).read_row_group(group, columns=[column])[column]
            lengths = pc.fill_null(pc.list_value_length(read), 0).to_pylist()
            parts.append(torch.tensor(lengths, dtype=torch.int64))
        return torch.cat(parts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not -len(self) <= row < len(self):
            fail("row", f"in -{len(self)}..{len(self) - 1}", row, error=IndexError)
        row %= len(self)
        group = bisect_right(self._ends, row)
        within = row - (self._ends[group - 1] if group else 0)
        return {name: part[within] for name, part in self._group(group).items()}

    def __getitems__(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """What a DataLoader asks for a batch: in order of the groups, so that each is read once."""
        found = {row: self[row] for row in sorted(set(rows))}
        return [found[row] for row in rows]

    def _group(self, number: int) -> dict[str, Any]:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        file, group = self._places[number]
        table = self._file(file).read_row_group(group, columns=self.columns)
        read = {name: _tensors(table[name]) for name in self.columns}
        self._kept[number] = read
        while len(self._kept) > self.keep:
            self._kept.popitem(last=False)
        return read

    def _file(self, number: int) -> Any:
        import pyarrow.parquet as pq

        if number not in self._files:
            self._files[number] = pq.ParquetFile(self.paths[number])
        return self._files[number]

    def __getstate__(self) -> dict[str, Any]:
        """For a worker: it opens the files for itself, and has read nothing yet."""
        return {**self.__dict__, "_files": {}, "_kept": OrderedDict()}


def _tensors(column: Any) -> Tensor | tuple[Tensor, ...]:
    """Something to take row i from."""
    import pyarrow as pa

    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return JaggedTensor.from_arrow(column).unbind()
    if not pa.types.is_primitive(column.type) or pa.types.is_temporal(column.type):
        fail("a column", "of numbers or lists of numbers", str(column.type), "encode it as ids first", error=TypeError)
    if column.null_count:
        fail("a column", "without nulls", f"{column.null_count} nulls", "fill them: pyarrow.compute.fill_null")
    return torch.from_numpy(column.to_numpy().copy())
