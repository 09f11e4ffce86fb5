"""delta = rowsum(out * grad_out) - grad_lse, what backward kernels need first (Dao et al. 2022, appendix B.4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def delta_of(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """fp32 `[B, Hq, Lq]` of out and grad_out `[B, Lq, Hq, Dv]`, grad_lse `[B, Hq, Lq]`."""
    batch, length, heads, dim = out.shape
    delta = out.new_empty(batch, heads, length, dtype=torch.float32)
    if delta.numel():
        block = 16  # many small programs read faster than few large ones
        delta_kernel[(triton.cdiv(batch * length * heads, block),)](
            out, grad_out, grad_lse, delta, batch * length * heads, length, heads,
            out.stride()[:3], grad_out.stride()[:3], None if grad_lse is None else grad_lse.stride(),
            WIDTH=dim, COLUMNS=triton.next_power_of_2(dim), BLOCK=block, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return delta


def row_statistics(
    out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """lse, delta, and the steps (sequence, row, head) of both: out `[B, Lq, Hq, Dv]` with lse `[B, Hq, Lq]`, or of
    jagged queries `[rows, Hq, Dv]` with `[rows, Hq]`."""
    lse = lse.contiguous()
    if out.dim() == 3:  # as of sequences of one row
        row, head = lse.stride()
        grad_lse = None if grad_lse is None else grad_lse[..., None]
        return lse, delta_of(out[:, None], grad_out[:, None], grad_lse), (0, row, head)
    batch, head, row = lse.stride()
    return lse, delta_of(out, grad_out, grad_lse), (batch, row, head)


@triton.jit(do_not_specialize=["total", "length", "heads"])
def delta_kernel(
    out,
    grad_out,
    grad_lse,  # or None
    delta,
    total,  # rows of all sequences and heads
    length,
    heads,
    out_steps,  # strides (sequence, row, head); columns are together
    grad_steps,
    lse_steps,  # (sequence, head, row)
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In the order of memory of a contiguous out: the heads of a row after each other."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    one = length * heads  # rows of a sequence
    row = (begin % one).to(tl.int32) + tl.arange(0, BLOCK)  # divisions by row in 32 bits
    inside = begin + tl.arange(0, BLOCK) < total
    sequence, head, i = begin // one + row // one, row % heads, row % one // heads
    place = sequence, i, head
    result = delta_of_rows(
        out, grad_out, grad_lse, place, inside, out_steps, grad_steps, lse_steps, WIDTH=WIDTH, COLUMNS=COLUMNS
    )
    tl.store(delta + (sequence * heads + head) * length + i, result, mask=inside)


@triton.jit
def delta_of_rows(
    out,
    grad_out,
    grad_lse,  # or None
    place,  # (sequence in 64 bits, row, head) of each
    inside,
    out_steps,  # strides (sequence, row, head); columns are together
    grad_steps,
    lse_steps,  # (sequence, head, row)
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """delta of some rows, in fp32; 0 of those that are not inside."""
    sequence, i, head = place
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    at = sequence * out_steps[0] + i.to(tl.int64) * out_steps[1] + head * out_steps[2]
    o = tl.load(out + at[:, None] + column[None, :], mask=mask, other=0.0)
    at = sequence * grad_steps[0] + i.to(tl.int64) * grad_steps[1] + head * grad_steps[2]
    do = tl.load(grad_out + at[:, None] + column[None, :], mask=mask, other=0.0)
    result = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        at = sequence * lse_steps[0] + head * lse_steps[1] + i * lse_steps[2]
        result -= tl.load(grad_lse + at, mask=inside, other=0.0)
    return result
