"""Sums, extrema and scans over the sequences of packed rows: the primitives that ragged operations are made of.

Each is a torch operator of its own, so that autograd (also twice) and `torch.compile` see it whole. All of them ignore
slack rows and give them 0. Arguments: `values` `[rows, *feature]`, `offsets` `[B + 1]`, `ids` `[rows]` int64 as made by
`JaggedLayout.sequence_ids`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.errors import check_no_forward_mode

_lib = torch.library.Library("jaggedtensor", "FRAGMENT")
_lib.define("segment_sum(Tensor values, Tensor offsets, Tensor ids) -> Tensor")
_lib.define("segment_expand(Tensor per_sequence, Tensor offsets, Tensor ids) -> Tensor")
_lib.define("segment_max(Tensor values, Tensor offsets, Tensor ids) -> Tensor")
_lib.define("segment_cumsum(Tensor values, Tensor offsets, Tensor ids, bool reverse) -> Tensor")

segment_sum = torch.ops.jaggedtensor.segment_sum.default
segment_expand = torch.ops.jaggedtensor.segment_expand.default
segment_max = torch.ops.jaggedtensor.segment_max.default
segment_cumsum = torch.ops.jaggedtensor.segment_cumsum.default


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in fp32; integers and booleans in int64, as in torch.sum."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _sum(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]` in the accumulator's dtype; 0 for an empty sequence."""
    batch = offsets.shape[0] - 1
    wide = values.to(_accumulator(values.dtype))
    if values.is_cuda and wide.is_floating_point() and wide.numel():
        # Ordered within each sequence, where index_add on a GPU adds in any order.
        return torch.segment_reduce(wide.contiguous(), "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    sums = wide.new_zeros(batch + 1, *values.shape[1:])  # the last row collects slack
    return sums.index_add_(0, ids, wide)[:batch].clone()


def _expand(per_sequence: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """`[B, *feature]` -> `[rows, *feature]`; 0 for slack."""
    padded = torch.cat((per_sequence, per_sequence.new_zeros(1, *per_sequence.shape[1:])))
    return padded.index_select(0, ids)


def _max(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`; the lowest value of the dtype for an empty sequence."""
    batch = offsets.shape[0] - 1
    lowest = -math.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    maxima = values.new_full((batch + 1, *values.shape[1:]), lowest)
    index = ids.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return maxima.scatter_reduce_(0, index, values, "amax")[:batch].clone()


def _cumsum(values: Tensor, offsets: Tensor, ids: Tensor, reverse: bool) -> Tensor:
    """`[rows, *feature]` in the accumulator's dtype: sums from each sequence's start (or end, reversed).

    Hillis and Steele's scan ("Data parallel algorithms", 1986): log2(rows) steps, and no sequence meets the values of
    another, as it would in a cumulative sum over all rows less the sum at the sequence's start.
    """
    sums = values.to(_accumulator(values.dtype)).clone(memory_format=torch.contiguous_format)
    slack = ids == offsets.shape[0] - 1
    sums.masked_fill_(slack.view(-1, *[1] * (values.dim() - 1)), 0)
    longest = int(offsets.diff().max()) if offsets.device.type == "cpu" and offsets.shape[0] > 1 else sums.shape[0]
    step = 1
    while step < longest:
        same = (ids[step:] == ids[:-step]).view(-1, *[1] * (values.dim() - 1))
        if reverse:
            earlier = torch.where(same, sums[step:], 0)
            sums[:-step] += earlier
        else:
            earlier = torch.where(same, sums[:-step], 0)
            sums[step:] += earlier
        step *= 2
    return sums


def _refusing_forward_mode(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Below autograd a tangent would be lost without a word."""

    @functools.wraps(kernel)
    def checked(values: Tensor, *args: Any) -> Tensor:
        check_no_forward_mode(values, "a reduction or scan over sequences", "use reverse mode (torch.func.vjp)")
        return kernel(values, *args)

    return checked


for _name, _kernel in (
    ("segment_sum", _sum),
    ("segment_expand", _expand),
    ("segment_max", _max),
    ("segment_cumsum", _cumsum),
):
    _lib.impl(_name, _refusing_forward_mode(_kernel), "CPU")
    _lib.impl(_name, _refusing_forward_mode(_kernel), "CUDA")


@torch.library.register_fake("jaggedtensor::segment_sum", lib=_lib)
def _sum_fake(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:], dtype=_accumulator(values.dtype))


@torch.library.register_fake("jaggedtensor::segment_expand", lib=_lib)
def _expand_fake(per_sequence: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    return per_sequence.new_empty(ids.shape[0], *per_sequence.shape[1:])


@torch.library.register_fake("jaggedtensor::segment_max", lib=_lib)
def _max_fake(values: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:])


@torch.library.register_fake("jaggedtensor::segment_cumsum", lib=_lib)
def _cumsum_fake(values: Tensor, offsets: Tensor, ids: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(values, dtype=_accumulator(values.dtype), memory_format=torch.contiguous_format)


# Sum and expand are each other's adjoint; so are a cumulative sum and the reversed one.


def _sum_setup(ctx, inputs, output) -> None:
    values, offsets, ids = inputs
    ctx.dtype = values.dtype
    ctx.save_for_backward(offsets, ids)


def _sum_backward(ctx, grad):
    return segment_expand(grad, *ctx.saved_tensors).to(ctx.dtype), None, None


def _expand_setup(ctx, inputs, output) -> None:
    per_sequence, offsets, ids = inputs
    ctx.dtype = per_sequence.dtype
    ctx.save_for_backward(offsets, ids)


def _expand_backward(ctx, grad):
    return segment_sum(grad, *ctx.saved_tensors).to(ctx.dtype), None, None


def _max_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output)


def _max_backward(ctx, grad):
    """Equal maxima share the gradient, as in torch.amax."""
    values, offsets, ids, maxima = ctx.saved_tensors
    hit = values == segment_expand(maxima, offsets, ids)
    hits = segment_sum(hit, offsets, ids).clamp(min=1)
    share = segment_expand(grad / hits, offsets, ids)
    return torch.where(hit, share, 0).to(values.dtype), None, None


def _cumsum_setup(ctx, inputs, output) -> None:
    values, offsets, ids, reverse = inputs
    ctx.dtype, ctx.reverse = values.dtype, reverse
    ctx.save_for_backward(offsets, ids)


def _cumsum_backward(ctx, grad):
    return segment_cumsum(grad, *ctx.saved_tensors, not ctx.reverse).to(ctx.dtype), None, None, None


for _name, _backward, _setup in (
    ("segment_sum", _sum_backward, _sum_setup),
    ("segment_expand", _expand_backward, _expand_setup),
    ("segment_max", _max_backward, _max_setup),
    ("segment_cumsum", _cumsum_backward, _cumsum_setup),
):
    torch.library.register_autograd(f"jaggedtensor::{_name}", _backward, setup_context=_setup, lib=_lib)
