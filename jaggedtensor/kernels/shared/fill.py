"""What no tile writes: outputs of queries that see no key."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jaggedtensor.problem import AttentionArgs

SMALL = 1 << 22  # elements that are filled in less time than a launch takes


def outputs(args: AttentionArgs, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """out, in another dtype than q if one is given, and lse for a kernel to write, 0 and -inf already where it may not
    write."""
    q, jagged = args.q, args.q_offsets is not None
    # Without windows and masks only empty sequences see nothing: a launch is worth not writing all rows twice.
    few_blind = not jagged and not args.problem.windowed and not args.problem.masked
    by_kernel = few_blind and not args.complete and math.prod(args.out_shape) > SMALL
    if not by_kernel and not (few_blind and args.complete):
        return q.new_zeros(args.out_shape, dtype=dtype), q.new_full(args.lse_shape, -math.inf, dtype=torch.float32)
    out, lse = q.new_empty(args.out_shape, dtype=dtype), q.new_empty(args.lse_shape, dtype=torch.float32)
    if by_kernel:
        sizes = (out[0].numel(), lse[0].numel())
        fill_kernel[(args.batch_size,)](
            out, lse, args.k_offsets, *sizes, BLOCK=1024, num_warps=4, enable_fp_fusion=True
        )
    return out, lse


@triton.jit(do_not_specialize=["out_size", "lse_size"])
def fill_kernel(out, lse, k_offsets, out_size, lse_size, BLOCK: tl.constexpr):
    """A program for each sequence."""
    fill_if_empty(out, lse, k_offsets, tl.program_id(0), out_size, lse_size, BLOCK)


@triton.jit
def fill_if_empty(out, lse, k_offsets, sequence, out_size, lse_size, BLOCK: tl.constexpr):
    """out = 0 and lse = -inf for every query of a sequence without keys; both `[B, ...]` and contiguous."""
    if tl.load(k_offsets + sequence) == tl.load(k_offsets + sequence + 1):
        number = tl.full((), 1, tl.int64) * sequence
        at = tl.arange(0, BLOCK)
        for begin in range(0, out_size, BLOCK):
            place = out + number * out_size + begin + at
            tl.store(place, tl.zeros([BLOCK], out.dtype.element_ty), mask=begin + at < out_size)
        for begin in range(0, lse_size, BLOCK):
            place = lse + number * lse_size + begin + at
            tl.store(place, tl.full([BLOCK], float("-inf"), tl.float32), mask=begin + at < lse_size)
