"""Reductions, softmax and cumulative sums along the ragged dimension, one sequence at a time, on the packed rows.

Every function takes `values` `[rows, *feature]` and a `JaggedLayout`. An empty sequence gives 0, as an empty bag of
`torch.nn.EmbeddingBag` does, and -inf for `logsumexp`, the logarithm of an empty sum; it never adds to a gradient.
Half precision is accumulated in fp32 and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.errors import check_floating
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops.segment import segment_cumsum, segment_expand, segment_max, segment_sum


def sum(values: Tensor, layout: JaggedLayout, dtype: torch.dtype | None = None) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`; integers and booleans give int64, as torch.sum."""
    values = values if dtype is None else values.to(dtype)
    return _wide_sum(values, layout).to(dtype or _sum_dtype(values))


def mean(values: Tensor, layout: JaggedLayout, dtype: torch.dtype | None = None) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`."""
    values = values if dtype is None else values.to(dtype)
    check_floating(values, "values", "mean")
    return (_wide_sum(values, layout) / _lengths(values, layout).clamp(min=1)).to(values.dtype)


def amax(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`; equal maxima share the gradient, as in torch.amax."""
    if values.dtype == torch.bool:
        return amax(values.to(torch.uint8), layout).to(torch.bool)
    return _where_tokens(segment_max(values, *_segments(values, layout)), layout)


def amin(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`; equal minima share the gradient, as in torch.amin."""
    if values.dtype == torch.bool:
        return amin(values.to(torch.uint8), layout).to(torch.bool)
    if values.is_floating_point():
        return _where_tokens(-segment_max(-values, *_segments(values, layout)), layout)
    return _where_tokens(~segment_max(~values, *_segments(values, layout)), layout)  # ~ reverses the order, no overflow


def std(values: Tensor, layout: JaggedLayout, correction: float = 1) -> Tensor:
    """Two passes; NaN where a non-empty sequence has at most `correction` tokens, as torch.std."""
    check_floating(values, "values", "std")
    wide = _widen(zero_slack(values, layout))
    centred = wide - _expand(_wide_sum(wide, layout) / _lengths(values, layout).clamp(min=1), values, layout)
    squares = _wide_sum(centred.square(), layout)
    lengths = _lengths(values, layout)
    variance = squares / torch.where(lengths > correction, lengths - correction, 1)
    spread = variance > 0  # the derivative of the root at 0 is taken as 0, as in torch.std
    root = torch.where(spread, torch.where(spread, variance, 1).sqrt(), torch.where(variance.isnan(), variance, 0))
    root = torch.where((lengths > correction) | (lengths == 0), root, math.nan)
    return root.to(values.dtype)


def logsumexp(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[rows, *feature]` -> `[B, *feature]`; no exponential overflows."""
    check_floating(values, "values", "logsumexp")
    wide = _widen(zero_slack(values, layout))
    peak = _finite_peak(wide, layout)
    total = _wide_sum((wide - _expand(peak, values, layout)).exp(), layout)
    some = _lengths(values, layout) > 0
    return torch.where(some, torch.where(some, total, 1).log() + peak, -math.inf).to(values.dtype)


def softmax(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[rows, *feature]` -> the same shape; the tokens of each sequence sum to 1; slack rows are 0."""
    check_floating(values, "values", "softmax")
    wide = _widen(zero_slack(values, layout))
    weights = (wide - _expand(_finite_peak(wide, layout), values, layout)).exp()
    total = _expand(_wide_sum(weights, layout), values, layout)
    total = zero_slack(total, layout, fill=1)  # not 0 / 0, whose gradient is NaN
    return zero_slack(weights / total, layout).to(values.dtype)


def log_softmax(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[rows, *feature]` -> the same shape, the logarithm of `softmax`; slack rows are 0."""
    check_floating(values, "values", "log_softmax")
    wide = _widen(zero_slack(values, layout))
    return zero_slack(wide - _expand(logsumexp(wide, layout), values, layout), layout).to(values.dtype)


def cumsum(values: Tensor, layout: JaggedLayout, dtype: torch.dtype | None = None) -> Tensor:
    """`[rows, *feature]` -> the same shape, each sequence from its own start; slack rows are 0."""
    sums = segment_cumsum(values, *_segments(values, layout), False)
    return sums.to(dtype or _sum_dtype(values))


def _segments(values: Tensor, layout: JaggedLayout) -> tuple[Tensor, Tensor]:
    return layout.offsets(), layout.sequence_ids(values.shape[0])


def _wide_sum(values: Tensor, layout: JaggedLayout) -> Tensor:
    return segment_sum(values, *_segments(values, layout))


def _expand(per_sequence: Tensor, values: Tensor, layout: JaggedLayout) -> Tensor:
    return segment_expand(per_sequence, *_segments(values, layout))


def _lengths(values: Tensor, layout: JaggedLayout) -> Tensor:
    """`[B, 1, ...]`, to stand beside `[B, *feature]`."""
    return layout.lengths().view(-1, *[1] * (values.dim() - 1))


def _where_tokens(per_sequence: Tensor, layout: JaggedLayout) -> Tensor:
    """`[B, *feature]` with 0 for the empty sequences."""
    some = (layout.lengths() > 0).view(-1, *[1] * (per_sequence.dim() - 1))
    return torch.where(some, per_sequence, torch.zeros((), dtype=per_sequence.dtype, device=per_sequence.device))


def _finite_peak(wide: Tensor, layout: JaggedLayout) -> Tensor:
    """`[B, *feature]`: what to subtract before exp; 0 where the maximum is infinite, so that inf - inf never occurs."""
    peak = amax(wide.detach(), layout)
    return torch.where(peak.isinf(), 0, peak)


def zero_slack(values: Tensor, layout: JaggedLayout, *, fill: float = 0) -> Tensor:
    """The same tensor where there is no slack; else a copy with `fill` there, which gives slack no gradient either."""
    if not layout.has_slack(values.shape[0]):
        return values
    mask = layout.row_mask(values.shape[0]).view(-1, *[1] * (values.dim() - 1))
    return torch.where(mask, values, torch.full((), fill, dtype=values.dtype, device=values.device))


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _sum_dtype(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() or values.is_complex() else torch.int64
