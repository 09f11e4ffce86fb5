"""Operands of the small kernels that show one mechanism each: integers, so that every sum is exact.

A tile has some blocks, its `trips`; tile t those from starts[t] to starts[t + 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.testing.families import Operands


def starts_of(trips: Sequence[int], device: str = "cpu") -> Tensor:
    """Where each tile's blocks begin, and the end: int32 `[tiles + 1]`."""
    return torch.tensor(list(accumulate(trips, initial=0)), dtype=torch.int32, device=device)


def sums_of_tiles(blocks: Tensor, trips: Sequence[int]) -> Tensor:
    """`[tiles, ...]` of `[blocks, ...]`: the sum of each tile's; 0 for a tile without any."""
    return torch.stack([blocks[first:end].sum(0) for first, end in pairwise(starts_of(trips).tolist())])


def tiled(x: Tensor, rows: int, device: str, columns: int | None = None, split: object = None) -> TensorDescriptor:
    """For TMA of blocks of some rows and columns (all, if left out), split between the CTAs of a cluster."""
    block = [rows, x.shape[1] if columns is None else columns]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype, cga_layout=split)
    return TensorDescriptor.from_tensor(x.to(device), block, layout)


def attention_operands(trips: Sequence[int], rows: int, keys: int, dim: int, device: str) -> Operands:
    """Of a kernel (q, k, v, out, scale, starts, tiles) with out = (scale q kᵀ) v: a tile has some rows of q, and its
    blocks are `keys` keys each."""
    random, scale = torch.Generator().manual_seed(0), 0.5
    blocks = max(1, sum(trips))
    q = torch.randint(-1, 2, (len(trips) * rows, dim), generator=random).bfloat16()
    k, v = torch.randint(-1, 2, (2, blocks * keys, dim), generator=random).bfloat16()
    starts = starts_of(trips, device)
    expected = torch.zeros(len(trips), rows, dim)
    for tile, (first, end) in enumerate(pairwise(starts.tolist())):
        seen = slice(first * keys, end * keys)
        expected[tile] = scale * (q.float().view(-1, rows, dim)[tile] @ k[seen].float().T) @ v[seen].float()
    out = torch.full((len(trips) * rows, dim), float("nan"), device=device)
    descriptors = tiled(q, rows, device), tiled(k, keys, device), tiled(v, keys, device)
    return Operands((*descriptors, out, scale, starts, len(trips)), {"out": (out, expected.view_as(out))})
