"""What launchers of backward passes have in common."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from jaggedtensor.kernels.shared.ragged import takes
from jaggedtensor.kernels.shared.slack import clear_slack
from jaggedtensor.problem import AttentionArgs

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def chosen(dq: Tensor, dk: Tensor, dv: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None


def addressable(x: Tensor) -> Tensor:
    """The same for TMA: a copy where it cannot address the tensor, or rows are expanded."""
    return x if takes(x) and 0 not in x.stride() else x.clone(memory_format=torch.contiguous_format)


def new_gradient(x: Tensor, args: AttentionArgs) -> Tensor:
    """Contiguous; the kernel writes every row but those past the last sequence, which are 0."""
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    return clear_slack(gradient, args.k_offsets) if args.slack else gradient


def new_key_gradient(x: Tensor, args: AttentionArgs, some: bool) -> Tensor:
    """Contiguous; 0 where keys may have no tile, as no query sees them, and past the last sequence. `some`: whether
    there are tiles."""
    # Where sequences have as many queries as keys, each key is seen by the query at its place, whatever the window.
    itself = args.q_offsets is not None and args.q_offsets.data_ptr() == args.k_offsets.data_ptr()
    seen = (itself or (args.q_offsets is None and not args.problem.windowed)) and not args.problem.masked
    return new_gradient(x, args) if some and seen else torch.zeros_like(x, memory_format=torch.contiguous_format)


def flat(x: Tensor) -> Tensor:
    """`[rows, heads, D]`, also of queries of each sequence `[B, Lq, heads, D]`."""
    return x if x.dim() == 3 else x.flatten(0, 1)


def key_of(args: AttentionArgs, *more: Hashable) -> Hashable | None:
    """What a compiled kernel depends on, besides `more` and the descriptors' maps; None if some pointer is not aligned.
    Results are new and aligned."""
    offsets = [x for x in (args.q_offsets, args.k_offsets) if x is not None]
    places = 0
    for x in (*args.schedule, *offsets):
        places |= x.data_ptr()
    return None if places % 16 else (args.problem, *(x.dtype for x in offsets), *more)


def sum_of_shares(shares: Tensor, q: Tensor, group: int, scale: float = 1.0) -> Tensor:
    """dQ `[Lq, Hq, D]` of shares `[Hkv, workers, rows, columns]` of its packed rows: `scale` times the sum over the
    workers in their order, rounded once."""
    length, heads, dim = q.shape
    packed = shares.sum(1)[:, : length * group, :dim].unflatten(1, (length, group))  # (Hkv, Lq, group, D)
    dq = torch.empty(length, heads, dim, dtype=q.dtype, device=q.device)
    dq.view(length, -1, group, dim).copy_((packed if scale == 1.0 else packed * scale).transpose(0, 1))
    return dq


def sum_of_slots(slots: Tensor, merges: Tensor, q: Tensor, group: int) -> Tensor:
    """dQ `[Lq, Hq, D]` of scratch `[slots, rows, columns]` of its packed rows: for each head of keys the sum of the
    slots that the schedule's `merges` name, always in the same order, rounded once."""
    length, heads, dim = q.shape
    dq, block = torch.empty_like(q, memory_format=torch.contiguous_format), 256
    slots_kernel[(heads // group, triton.cdiv(length * group * slots.shape[2], block))](
        slots, merges, dq, length, heads, dim, slots.shape[1],
        GROUP=group, COLUMNS=slots.shape[2], BLOCK=block, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["length", "heads", "dim", "rows"])
def slots_kernel(
    slots,
    merges,  # of the schedule, a row for each head
    dq,
    length,
    heads,
    dim,
    rows,  # of a slot
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    first, count = tl.load(merges + head * 6 + 4), tl.load(merges + head * 6 + 5)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # in a slot
    row, column = at // COLUMNS, at % COLUMNS
    inside = (row < length * GROUP) & (column < dim)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count, 16):
        some = i + tl.arange(0, 16)
        place = (first + some).to(tl.int64)[:, None] * (rows * COLUMNS) + at[None, :]
        total += tl.sum(tl.load(slots + place, mask=(some < count)[:, None] & inside[None, :], other=0.0), 0)
    to = (row // GROUP).to(tl.int64) * heads + head * GROUP + row % GROUP
    tl.store(dq + to * dim + column, total.to(dq.dtype.element_ty), mask=inside)


def scaled(total: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * total, of a contiguous fp32 sum, rounded once."""
    result, block = torch.empty_like(total, dtype=dtype), 4096
    if total.numel():
        scale_kernel[(triton.cdiv(total.numel(), block),)](
            total, result, scale, total.numel(), BLOCK=block, num_warps=8, enable_fp_fusion=True
        )
    return result


@triton.jit(do_not_specialize=["scale"])
def scale_kernel(total, result, scale, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, (tl.load(total + at, mask=at < size) * scale).to(result.dtype.element_ty), mask=at < size)
