"""Between packed rows and the other forms people have: padded tensors, torch.nested, Arrow lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jaggedtensor.errors import check_integers, check_tensor, fail, is_readable
from jaggedtensor.layout import JaggedLayout

if TYPE_CHECKING:
    import pyarrow

Packed = tuple[Tensor, JaggedLayout]


def to_padded(values: Tensor, layout: JaggedLayout, fill: float | int | bool, max_length: int | None) -> Tensor:
    """`[rows, *feature]` -> `[B, max_length, *feature]`."""
    width = _width(layout, max_length)
    batch, rows = layout.batch_size, values.shape[0]
    place = layout.sequence_ids(rows) * width + layout.positions(rows)
    if layout.has_slack(rows):
        place = torch.where(layout.row_mask(rows), place, batch * width)
    padded = values.new_full((batch * width + 1, *values.shape[1:]), fill)  # one more row collects slack
    return padded.index_copy(0, place, values)[:-1].unflatten(0, (batch, width))


def mask(layout: JaggedLayout, max_length: int | None) -> Tensor:
    """`[B, max_length]` bool: true where `to_padded` has a token."""
    return torch.arange(_width(layout, max_length), device=layout.device) < layout.lengths()[:, None]


def _width(layout: JaggedLayout, max_length: int | None) -> int:
    if max_length is None:
        return layout.max_length
    if max_length < 0:
        fail("max_length", "at least 0", max_length)
    if is_readable(layout.offsets()) and (layout.known_max_length is None or layout.known_max_length > max_length):
        longest = int(layout.host_offsets().diff().max()) if layout.batch_size else 0
        if longest > max_length:
            fail(
                "max_length",
                f"at least {longest} (the longest sequence)",
                max_length,
                f"cut first: jt[:, :{max_length}]",
            )
    return max_length


def from_padded(padded: Tensor, lengths: Tensor | None, mask: Tensor | None) -> Packed:
    """The first `lengths[i]` tokens of row i of `[B, L, *feature]`, or those where `mask` is true."""
    check_tensor(padded, "padded")
    if padded.dim() < 2:
        fail("padded", "of shape [B, L, *feature]", padded)
    batch, width = padded.shape[:2]
    if lengths is not None and mask is not None:
        fail("lengths and mask", "given one at a time", "both", "drop one", error=TypeError)
    if mask is not None:
        check_tensor(mask, "mask")
        if mask.dtype != torch.bool or mask.shape != padded.shape[:2]:
            fail("mask", f"bool of shape {[batch, width]} (true where there is a token)", mask)
        mask = mask.to(padded.device)
        layout = JaggedLayout.from_lengths(mask.sum(1), validate=False)
        return padded.flatten(0, 1)[mask.flatten()], layout
    if lengths is None:
        lengths = torch.full((batch,), width, dtype=torch.int64, device=padded.device)
    check_integers(lengths, "lengths")
    if lengths.shape[0] != batch:
        fail("lengths", f"of shape [{batch}] (the batch of padded)", lengths)
    if is_readable(lengths) and batch and int(lengths.max()) > width:
        fail("lengths", f"at most {width} (the width of padded)", int(lengths.max()))
    layout = JaggedLayout.from_lengths(lengths.to(padded.device))
    rows = layout.num_tokens
    place = layout.sequence_ids(rows) * width + layout.positions(rows)
    return padded.flatten(0, 1).index_select(0, place), layout


def from_nested(nested: Tensor) -> Packed:
    """The values and offsets of a `torch.jagged` nested tensor; shared where it has no holes."""
    if not isinstance(nested, Tensor) or not nested.is_nested:
        fail("nt", "a nested tensor", nested, "for a list of tensors use JaggedTensor.from_list", error=TypeError)
    if nested.layout != torch.jagged:
        return from_nested(torch.nested.as_nested_tensor(list(nested.unbind()), layout=torch.jagged))
    if nested._ragged_idx != 1:  # type: ignore[attr-defined]  # torch.nested has no public question for it
        fail("the ragged dimension of nt", "dimension 1", str(nested._ragged_idx), "transpose it back first")  # type: ignore[attr-defined]
    offsets, lengths = nested.offsets(), nested.lengths()  # type: ignore[attr-defined]  # of jagged ones only
    values = nested.values()
    if lengths is None:
        return values, JaggedLayout(offsets)
    layout = JaggedLayout.from_lengths(lengths)  # narrowed: the rows have holes
    rows = layout.num_tokens
    index = offsets[:-1][layout.sequence_ids(rows)] + layout.positions(rows)
    return values.index_select(0, index), layout


def to_nested(values: Tensor, layout: JaggedLayout) -> Tensor:
    """A view as a nested tensor of layout `torch.jagged`."""
    live = values[: layout.num_tokens]
    return torch.nested.nested_tensor_from_jagged(live, layout.offsets())


def from_arrow(array: Any) -> Packed:
    """A pyarrow list array (plain, large, fixed-size, chunked; lists of fixed-size lists for features).

    A null list becomes an empty sequence. No Python loop over rows.

    Raises:
        TypeError: not a list array, or its elements are not numbers.
        ValueError: nulls among the elements.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        kind = f"{type(array).__name__} of {array.type}" if isinstance(array, pa.Array) else type(array).__name__
        fail("array", "a pyarrow list array", kind, "pass the column itself, e.g. table['history']", error=TypeError)
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    elements, feature = array.flatten(), []
    while isinstance(elements, pa.FixedSizeListArray):
        _refuse_nulls(elements)
        feature.append(elements.type.list_size)
        elements = elements.flatten()
    _refuse_nulls(elements)
    if not (pa.types.is_primitive(elements.type) and not pa.types.is_temporal(elements.type)):
        fail(
            "the elements of array",
            "numbers or booleans",
            str(elements.type),
            "encode them as ids first",
            error=TypeError,
        )
    flat = torch.from_numpy(np.array(elements.to_numpy(zero_copy_only=False)))  # a copy: Arrow's memory is read-only
    values = flat.view(-1, *feature) if feature else flat
    return values, JaggedLayout.from_lengths(torch.from_numpy(np.array(lengths)))


def _refuse_nulls(elements: pyarrow.Array) -> None:
    if elements.null_count:
        fail(
            "the elements of array",
            "without nulls",
            f"{elements.null_count} nulls",
            "fill them: pyarrow.compute.fill_null",
        )


def to_arrow(values: Tensor, layout: JaggedLayout) -> pyarrow.Array:
    """A `LargeListArray`; features become fixed-size lists. Copies to the CPU; bf16 becomes float32, Arrow has none."""
    import pyarrow as pa

    live = values[: layout.num_tokens].detach().cpu()
    if live.dtype == torch.bfloat16:
        live = live.float()
    elements = pa.array(live.reshape(-1).numpy())
    for size in reversed(live.shape[1:]):
        elements = pa.FixedSizeListArray.from_arrays(elements, size)
    return pa.LargeListArray.from_arrays(pa.array(layout.host_offsets().to(torch.int64).numpy()), elements)
