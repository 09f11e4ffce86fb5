"""dK and dV of tiles that are cut between CTAs along their query rows (`cut_last_round` of a schedule): each CTA leaves
its part in a slot, in fp32, and the parts of a tile are added in the order of their rows, whoever was ready first.

A slot has what threads hold, as they hold it (addresses of rows would take more registers than there are): dK
`[8, D / 8, 8, 4, 2, 2]`, then dV. Element (w, j, l, c, r, e) is key 16 w + 8 r + l of the tile, column 8 j + 2 c + e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.config import KEYS, Config
from jaggedtensor.problem import AttentionArgs

_KEYS, _COLUMNS = 16, 32  # of a program: a few tiles of a few parts occupy all processors


def scratch(workers: int, config: Config, device: torch.device) -> Tensor:
    """fp32 `[slots, KEYS * (D + Dv)]`: a CTA has one part at most."""
    return torch.empty(workers, KEYS * (config.block_d + config.block_dv), dtype=torch.float32, device=device)


def merge(parts: Tensor, merges: Tensor, dk: Tensor, dv: Tensor, args: AttentionArgs, config: Config) -> None:
    """The sums to rows of dK, scaled, and of dV, contiguous `[tokens, heads, columns]`, rounded once."""
    grid = (merges.shape[0], KEYS // _KEYS, (config.block_d + config.block_dv) // _COLUMNS)
    merge_kernel[grid](
        parts, merges, args.k_offsets, dk, dv, dk.shape[1], args.scale,
        KEYS=KEYS, ROWS=_KEYS, COLUMNS=_COLUMNS, D=config.block_d, DV=config.block_dv,
        WIDTH=dk.shape[2], WIDTH_V=dv.shape[2], num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "scale"])
def merge_kernel(
    parts,
    merges,  # of the schedule: sequence, head, block of keys, its end, first slot, how many
    offsets,
    dk,
    dv,
    heads,
    scale,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,  # keys of a program: those of a warp
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    entry = merges + tl.program_id(0) * 6
    sequence, head, block = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    slot, count = tl.load(entry + 4), tl.load(entry + 5)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    first, column = tl.program_id(1) * ROWS, tl.program_id(2) * COLUMNS
    is_key = column < D
    at = first * D + column * ROWS
    if not is_key:
        at = KEYS * D + first * DV + (column - D) * ROWS
    at += tl.arange(0, ROWS * COLUMNS)
    total = tl.zeros([ROWS * COLUMNS], tl.float32)
    for part in range(slot, slot + count):
        total += tl.load(parts + part * (KEYS * (D + DV)) + at)
    total = tl.reshape(total, (COLUMNS // 8, 8, 4, 2, 2))
    total = tl.reshape(tl.permute(total, (3, 1, 0, 2, 4)), (ROWS, COLUMNS))
    key = start + block * KEYS + first + tl.arange(0, ROWS)
    row = (key * heads + head)[:, None]
    column += tl.arange(0, COLUMNS)[None, :]
    if is_key:
        mask = (key < end)[:, None] & (column < WIDTH)
        tl.store(dk + row * WIDTH + column, (total * scale).to(dk.dtype.element_ty), mask=mask)
    else:
        mask = (key < end)[:, None] & (column - D < WIDTH_V)
        tl.store(dv + row * WIDTH_V + column - D, total.to(dv.dtype.element_ty), mask=mask)
