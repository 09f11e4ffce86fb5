"""Reading a schedule on the device: one 32-byte row for each tile (see jaggedtensor.schedules.types.Tile)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    sequence: Any  # -1: a surplus row, to be skipped before any address is formed
    head: Any
    q_begin: Any  # blocks of query rows
    q_end: Any
    kv_begin: Any  # blocks of keys, or places in the schedule's list of them
    kv_end: Any


@triton.jit
def load_tile(tiles, index):
    row = tiles + tl.full((), 8, tl.int64) * index
    return Tile(tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5))


@triton.jit
def block_at(listed, n, end):
    """Block number n of a range that ends at `end`: in the schedule's list of blocks, the last one past the end; or n
    itself, without a list."""
    if listed is not None:
        n = tl.load(listed + tl.minimum(n, end - 1))
    return n
