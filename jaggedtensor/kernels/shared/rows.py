"""Blocks of rows of jagged operands on the device: addresses, loads and stores.

Addresses are 64-bit, since rows times strides pass 2^31 in ordinary batches.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operand(NamedTuple):
    """A tensor seen as (batch, row, head, column), strides in elements; the columns are contiguous."""

    pointer: Any
    batch: Any
    row: Any
    head: Any


class Sequence(NamedTuple):
    """Where a sequence's rows are."""

    number: Any
    start: Any  # int64: its first row
    count: Any  # int32


class QueryRows(NamedTuple):
    """A block of query rows; row r of a tile is query r // group of head r % group, so a group shares its keys."""

    i: Any  # [M]: query within the sequence
    head: Any  # [M]: query head
    inside: Any  # [M] bool


@triton.jit
def sequence_at(offsets, number, length):
    """Sequence `number`; without offsets each has `length` rows, from row 0 of its own batch entry."""
    if offsets is None:
        start = tl.full((), 0, tl.int64)
        count = length
    else:
        start = tl.load(offsets + number).to(tl.int64)
        count = (tl.load(offsets + number + 1) - start).to(tl.int32)
    return Sequence(number, start, count)


@triton.jit
def query_rows(block, head, count, C: tl.constexpr):
    """Block `block` of the query rows that belong to key-value head `head`."""
    row = block * C.block_m + tl.arange(0, C.block_m)
    i = row // C.group
    return QueryRows(i, head * C.group + row % C.group, i < count)


@triton.jit
def query_span(block, count, C: tl.constexpr):
    """First and last query of a block."""
    return block * C.block_m // C.group, tl.minimum(((block + 1) * C.block_m - 1) // C.group, count - 1)


@triton.jit
def query_places(operand, sequence, rows, ALIGNED: tl.constexpr = False):
    """[M] pointers to column 0, known to be multiples of 16 bytes if ALIGNED."""
    base = operand.pointer + sequence.number.to(tl.int64) * operand.batch + sequence.start * operand.row
    places = base + rows.i.to(tl.int64) * operand.row + rows.head.to(tl.int64) * operand.head
    if ALIGNED:
        places = tl.multiple_of(places, 16)
    return places


@triton.jit
def key_places(operand, sequence, head, j, ALIGNED: tl.constexpr):
    """[N] pointers to column 0 of keys j of one head, known to be multiples of 16 bytes if ALIGNED."""
    base = operand.pointer + sequence.start * operand.row + head.to(tl.int64) * operand.head
    places = base + j.to(tl.int64) * operand.row
    if ALIGNED:
        places = tl.multiple_of(places, 16)
    return places


@triton.jit
def load_rows(places, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """[rows, BLOCK]: 0 outside of `inside` (if MASK) and of WIDTH columns."""
    column = tl.arange(0, BLOCK)
    at = places[:, None] + column[None, :]
    if WIDTH == BLOCK:
        if MASK:
            block = tl.load(at, mask=inside[:, None], other=0.0)
        else:
            block = tl.load(at)
    else:
        if MASK:
            block = tl.load(at, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
        else:
            block = tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return block


@triton.jit
def store_rows(places, block, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores [rows, BLOCK] in the operand's dtype, where inside and within WIDTH columns."""
    column = tl.arange(0, BLOCK)
    at = places[:, None] + column[None, :]
    mask = inside[:, None]
    if WIDTH != BLOCK:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(at, block.to(places.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b, acc, C: tl.constexpr):
    """acc + a @ b in fp32. Widened first where interpreted: the interpreter multiplies the bit patterns of bf16."""
    if C.widen:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=C.precision)
