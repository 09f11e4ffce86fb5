"""lse and delta = rowsum(out * grad_out) - grad_lse of query rows, as columns of an operand.

`[rows, Hq, 16]` in bf16: columns 0 .. 2 of a row sum up to -lse / scale, columns 8 .. 10 to -delta, and the others are
0. Three numbers of bf16 hold all bits of one of fp32. A product with a constant adds them to S and to dP, so that no
thread has to load them (see `device`):

    P = exp(scale * (Q K^T - lse / scale))        dS = P (dO V^T - delta)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.config import COLUMNS
from jaggedtensor.kernels.shared.delta import delta_of_rows

LEAST = 1e-36  # a scale of less is none: lse divided by it would not be finite
MUCH = tl.constexpr(3e38)  # of a row that sees nothing, whose P is 0; bf16 and fp32 hold it


def divisible(scale: float) -> float:
    """What lse may be divided by: the scale, or 1 where it is none, and Q must be taken for 0."""
    return scale if abs(scale) > LEAST else 1.0


def columns_of(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor, scale: float) -> Tensor:
    """Of out and grad_out `[rows, Hq, Dv]` with lse and grad_lse `[rows, Hq]`, or of `[B, Lq, Hq, Dv]` with
    `[B, Hq, Lq]`, whose rows are B * Lq. The rows of a head lie together."""
    lse = lse.contiguous()
    if out.dim() == 3:  # as of sequences of one row
        out, grad_out, lse = out[:, None], grad_out[:, None], lse[..., None]
        grad_lse = None if grad_lse is None else grad_lse[..., None]
    batch, length, heads, dim = out.shape
    columns = out.new_empty(heads, batch * length, COLUMNS, dtype=torch.bfloat16)
    if columns.numel():
        block = 16  # many small programs read faster than few large ones
        columns_kernel[(triton.cdiv(batch * length, block) * heads,)](
            out, grad_out, grad_lse, lse, columns, batch * length, length, heads, 1 / scale,
            out.stride()[:3], grad_out.stride()[:3], None if grad_lse is None else grad_lse.stride(),
            DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=block, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return columns.transpose(0, 1)


@triton.jit
def in_thirds(x, column, first):
    """`[rows, columns]` of 0, but for three bf16 from column `first` on, whose sum is x `[rows]`."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    result = tl.where(column == first, high[:, None], 0.0)
    result = tl.where(column == first + 1, middle[:, None], result)
    return tl.where(column == first + 2, low[:, None], result)


@triton.jit(do_not_specialize=["rows", "length", "heads", "inverse"])
def columns_kernel(
    out,
    grad_out,
    grad_lse,  # or None
    lse,  # [B, Hq, Lq]
    columns,  # [Hq, rows, 16]
    rows,  # of all sequences
    length,
    heads,
    inverse,  # 1 / scale
    out_steps,  # strides (sequence, row, head); columns are together
    grad_steps,
    lse_steps,  # of grad_lse: (sequence, head, row)
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows of one head. Programs that follow each other have the heads of the same rows, which lie together."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence, i = (row // length).to(tl.int64), (row % length).to(tl.int64)
    delta = delta_of_rows(
        out, grad_out, grad_lse, (sequence, i, head), inside, out_steps, grad_steps, lse_steps,
        WIDTH=DIM, COLUMNS=BLOCK_D,
    )  # fmt: skip
    x = tl.load(lse + (sequence * heads + head) * length + i, mask=inside, other=0.0)
    blind = x == float("-inf")
    x = tl.where(blind, tl.where(inverse > 0, -MUCH, MUCH), -x * inverse)
    x = tl.where(tl.abs(x) > MUCH, tl.where(x > 0, MUCH, -MUCH), x)
    place = tl.arange(0, 16)[None, :]
    both = in_thirds(x, place, 0) + in_thirds(tl.where(blind, 0.0, -delta), place, 8)
    tl.store(columns + (head * rows + row)[:, None] * 16 + place, both, mask=inside[:, None])
