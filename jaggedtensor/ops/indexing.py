"""Choosing, cutting and joining sequences of packed rows, with the semantics of a list of tensors.

Functions take `values` `[rows, *feature]` with a `JaggedLayout` and give the new pair. What can be a view is one; the
rest gathers rows once. On a GPU, a gather needs the number of chosen rows on the host, which is one synchronisation.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.errors import check_tensor, fail
from jaggedtensor.layout import JaggedLayout

Packed = tuple[Tensor, JaggedLayout]


def one_sequence(values: Tensor, layout: JaggedLayout, index: int) -> Tensor:
    """`[L, *feature]`: sequence `index`, a view.

    Raises:
        IndexError: the index is outside -B..B-1.
    """
    batch = layout.batch_size
    if not -batch <= index < batch:
        fail(
            "index",
            f"in -{batch}..{batch - 1} (batch_size {batch})" if batch else "absent: the batch is empty",
            index,
            error=IndexError,
        )
    begin, end = layout.host_offsets()[index % batch : index % batch + 2].tolist()
    return values[begin:end]


def sequence_range(values: Tensor, layout: JaggedLayout, begin: int, end: int) -> Packed:
    """Sequences begin..end-1 (0 <= begin <= end <= B), a view of their rows."""
    host = layout.host_offsets()
    first, last = int(host[begin]), int(host[end])
    offsets = layout.offsets()[begin : end + 1]
    shifted = offsets - first if first else offsets.clone()
    part = JaggedLayout(shifted, max_length=layout.declared_max_length, validate=False)
    part._num_tokens, part._host_offsets = last - first, host[begin : end + 1] - first
    return values[first:last], part


def pick_sequences(values: Tensor, layout: JaggedLayout, index: Tensor) -> Packed:
    """The sequences that an int tensor `[n]` names or a bool mask `[B]` marks, in that order."""
    check_tensor(index, "index")
    if index.dim() != 1:
        fail("index", "of rank 1", index)
    if index.dtype == torch.bool:
        if index.shape[0] != layout.batch_size:
            fail("a bool index", f"of length {layout.batch_size} (batch_size)", index, error=IndexError)
        index = index.nonzero().squeeze(1)
    elif index.is_floating_point():
        fail("index", "int32, int64 or bool", index, error=TypeError)
    index = index.to(device=layout.device, dtype=torch.int64)
    if (
        index.device.type == "cpu"
        and index.numel()
        and not -layout.batch_size <= int(index.min()) <= int(index.max()) < layout.batch_size
    ):
        fail(
            "index",
            f"in -{layout.batch_size}..{layout.batch_size - 1}",
            f"{int(index.min())}..{int(index.max())}",
            error=IndexError,
        )
    index = torch.where(index < 0, index + layout.batch_size, index)
    offsets = layout.offsets().to(torch.int64)
    return _gather(values, offsets[index], layout.lengths()[index])


def cut_sequences(values: Tensor, layout: JaggedLayout, cut: slice) -> Packed:
    """`x[cut]` of every sequence, by Python's rules for slices; the step must be positive, as in torch."""
    start, stop, step = (_int_or_none(bound) for bound in (cut.start, cut.stop, cut.step))
    step = 1 if step is None else step
    if step < 1:
        fail("the step of a slice", "positive", step, "reverse a sequence with map over jt.unbind()")
    if start is None and stop is None and step == 1:
        return values, layout
    lengths = layout.lengths().to(torch.int64)

    def resolve(bound: int | None, default: Tensor) -> Tensor:
        if bound is None:
            return default
        place = lengths + bound if bound < 0 else torch.full_like(lengths, bound)
        return torch.minimum(place.clamp(min=0), lengths)

    begin = resolve(start, torch.zeros_like(lengths))
    end = resolve(stop, lengths)
    count = ((end - begin).clamp(min=0) + step - 1) // step
    return _gather(values, layout.offsets().to(torch.int64)[:-1] + begin, count, step)


def _int_or_none(bound: Any) -> int | None:
    if bound is not None and not hasattr(bound, "__index__"):
        fail("the bounds of a slice", "ints or None", bound, error=TypeError)
    return None if bound is None else operator.index(bound)


def first_tokens(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[B, *feature]`; 0 for an empty sequence."""
    return _ends(values, layout, layout.offsets()[:-1])


def last_tokens(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[B, *feature]`; 0 for an empty sequence."""
    return _ends(values, layout, layout.offsets()[1:] - 1)


def join_batches(parts: Sequence[Packed]) -> Packed:
    """The sequences of each part after those of the one before."""
    live = [values[: layout.num_tokens] for values, layout in parts]
    lengths = torch.cat([layout.lengths().to(torch.int64) for _, layout in parts])
    return torch.cat(live), _layout_of(lengths, sum(x.shape[0] for x in live))


def join_sequences(parts: Sequence[Packed]) -> Packed:
    """Sequence i of the result is sequence i of each part, one after the other."""
    layouts = [layout for _, layout in parts]
    live = [values[: layout.num_tokens] for values, layout in parts]
    total = sum(x.shape[0] for x in live)
    lengths = torch.stack([layout.lengths().to(torch.int64) for layout in layouts])  # [parts, B]
    joined = _layout_of(lengths.sum(0), total)
    before = lengths.cumsum(0) - lengths + joined.offsets()[:-1]  # [parts, B]: where each piece starts
    target = torch.cat(
        [
            before[p][layout.sequence_ids(x.shape[0])] + layout.positions(x.shape[0])
            for p, (x, layout) in enumerate(zip(live, layouts, strict=True))
        ]
    )
    source = torch.empty_like(target)
    source[target] = torch.arange(total, device=target.device)
    return torch.cat(live).index_select(0, source), joined


def _gather(values: Tensor, starts: Tensor, lengths: Tensor, step: int = 1) -> Packed:
    """Rows starts[i], starts[i] + step, ... (lengths[i] of them) for each i."""
    layout = JaggedLayout.from_lengths(lengths, validate=False)
    rows = layout.num_tokens
    ids = layout.sequence_ids(rows)
    index = starts.to(torch.int64)[ids] + step * layout.positions(rows)
    return values.index_select(0, index), layout


def _ends(values: Tensor, layout: JaggedLayout, rows: Tensor) -> Tensor:
    some = (layout.lengths() > 0).view(-1, *[1] * (values.dim() - 1))
    if values.shape[0] == 0:  # no row to point at: the sum of none is 0, and hangs on values
        return values.sum(0, keepdim=True, dtype=values.dtype).expand(layout.batch_size, *values.shape[1:]).clone()
    rows = rows.to(torch.int64).clamp(0, values.shape[0] - 1)
    return torch.where(some, values.index_select(0, rows), torch.zeros((), dtype=values.dtype, device=values.device))


def _layout_of(lengths: Tensor, total: int) -> JaggedLayout:
    layout = JaggedLayout.from_lengths(lengths, validate=False)
    layout._num_tokens = total
    return layout
