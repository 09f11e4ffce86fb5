"""Rows of packed tensors by sequence: those of a long sequence as a view, those of many short ones as a copy.

Shape tags: G sequences, n rows of each, H heads of the keys, g query heads that share one of them, D features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.cpu.memory import ask_for_huge_pages


class Packed:
    """Rows by heads, (H, g, rows, D) with g left out where it is 1, and a view of each sequence that goes alone."""

    def __init__(self, rows: Tensor, alone: list[tuple[int, int]]):
        """`alone` has the first row and the length of these sequences, in order."""
        self.rows = rows
        sizes, places, end = [], [], 0
        for start, length in alone:
            if start > end:
                sizes.append(start - end)
            places.append(len(sizes))
            sizes.append(length)
            end = start + length
        parts = rows.split([*sizes, rows.shape[-2] - end], -2)
        self.views = [parts[place] for place in places]


class One:
    """A sequence that goes alone, or some of its rows and heads. `number` is its place among `Packed.views`."""

    count, repeated = 1, None

    def __init__(self, number: int | None, length: int, start: int | None = None, heads: slice | None = None):
        self.number, self.length, self.start, self.heads = number, length, start, heads

    def part(self, rows: slice) -> One:
        return One(self.number, rows.stop - rows.start, (self.start or 0) + rows.start, self.heads)

    def view(self, x: Packed) -> Tensor:
        rows = x.rows if self.number is None else x.views[self.number]
        rows = rows if self.heads is None else rows[self.heads]
        return rows if self.start is None else rows.narrow(-2, self.start, self.length)

    def take(self, x: Packed, dtype: torch.dtype, repeat: bool = True) -> Tensor:
        """(H, g n, D): a view if dtype and g allow."""
        view = self.view(x)
        view = view if view.dim() == 3 else view.flatten(1, 2)
        return view if view.dtype == dtype else view.to(dtype)

    def room(self, y: Packed, dtype: torch.dtype) -> Tensor:
        """Where to work out a value, (H, g n, D), before it is `put`: in place if dtype and g allow."""
        view = self.view(y)
        if view.dim() == 3 and view.dtype == dtype:
            return view
        return torch.empty(view.shape[0], math.prod(view.shape[1:-1]), view.shape[-1], dtype=dtype)

    def put(self, y: Packed, value: Tensor) -> None:
        view = self.view(y)
        if value is not view and value.data_ptr() != view.data_ptr():
            view.copy_(value.view(view.shape))

    def add_product(self, y: Packed, a: Tensor, b: Tensor, scale: float) -> None:
        """Adds a multiple of the product of a, (H N, g n, L), and b, (H N, L, D), summed over N."""
        view = self.view(y)
        if view.shape[:-1] == a.shape[:-1]:
            view.baddbmm_(a, b, alpha=scale)
        else:
            value = torch.bmm(a, b).unflatten(0, (view.shape[0], -1)).sum(1)
            view.add_(value.view(view.shape), alpha=scale)


class Many:
    """Sequences that go together, as a grid (G, n) in which a short one repeats its last row."""

    def __init__(self, starts: Tensor, lengths: Tensor, total: int):
        """What belongs to repeated rows is written to row `total`, the one after the last token."""
        self.count, self.length = starts.shape[0], int(lengths.max())
        place, last = torch.arange(self.length), lengths[:, None] - 1
        self.source = self.target = starts[:, None] + torch.minimum(place, last)
        self.repeated = None
        if int(lengths.min()) < self.length:
            self.repeated = place > last
            self.target = self.source.masked_fill(self.repeated, total)
        self.places: dict[tuple[int, ...], Tensor] = {}  # of the features of each row and head, by strides

    def take(self, x: Packed, dtype: torch.dtype, repeat: bool = True) -> Tensor:
        """(H G, g n, D), on demand with 0 for repeated rows. One copy, by heads, whatever the strides."""
        rows = x.rows if x.rows.dim() == 4 else x.rows[:, None]
        heads, group, length, features = rows.shape
        unit = math.gcd(*rows.stride()[:3]) or 1
        steps = tuple(step // unit for step in rows.stride()[:3])
        place = self.places.get(steps)
        if place is None:
            place = (torch.arange(heads) * steps[0])[:, None, None, None] + (torch.arange(group) * steps[1])[:, None]
            place = self.places[steps] = place + (self.source * steps[2])[:, None]  # (H, G, g, n)
        last = sum((size - 1) * step for size, step in zip((heads, group, length), steps, strict=True))
        taken = rows.as_strided((last + 1, features), (unit, 1)).index_select(0, place.flatten())
        if self.repeated is not None and not repeat:
            taken.view(*place.shape, features).masked_fill_(self.repeated[:, None, :, None], 0)
        taken = taken.view(heads * self.count, -1, features)
        return taken if taken.dtype == dtype else taken.to(dtype)

    def room(self, y: Packed, dtype: torch.dtype) -> Tensor:
        heads, *group, _, features = y.rows.shape
        return torch.empty(heads * self.count, math.prod(group) * self.length, features, dtype=dtype)

    def put(self, y: Packed, value: Tensor) -> None:
        rows = y.rows.movedim(-2, 0)  # (rows, H, g, D), contiguous
        value = value.view(rows.shape[1], self.count, -1, self.length, rows.shape[-1]).permute(1, 3, 0, 2, 4)
        value = value.to(rows.dtype).contiguous().view(self.target.numel(), -1)
        rows.flatten(1).index_copy_(0, self.target.flatten(), value)


def by_heads(x: Tensor, heads: int) -> Tensor:
    """(.., Hq, D) -> (H, g, rows, D), g left out if it is 1; a copy where the last dimension is not contiguous."""
    x = (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, -3)
    return x.transpose(0, 1) if x.shape[1] == heads else x.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)


def new_rows(shape: tuple[int, int, int], dtype: torch.dtype, total: int, all_written: bool, fill: float) -> Tensor:
    """(rows, Hq, D) and a row after `total` for what belongs to repeated rows; filled where not all will be written."""
    rows, heads, features = shape
    y = ask_for_huge_pages(torch.empty(max(rows, total + 1), heads, features, dtype=dtype))
    return y if all_written else y.fill_(fill)


def finished(y: Tensor, rows: int, total: int, fill: float) -> Tensor:
    """The rows that were asked for, filled after the last token."""
    y[total:] = fill
    return y[:rows]
