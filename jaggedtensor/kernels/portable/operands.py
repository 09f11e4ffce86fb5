"""Tensors as the device functions see them: (pointer, batch stride, row stride, head stride)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jaggedtensor.kernels.shared.rows import Operand
from jaggedtensor.problem import AttentionArgs


def columns_together(x: Tensor) -> Tensor:
    """The same with a contiguous last dimension: a copy where it is not (a transposed or expanded tensor)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def of_keys(x: Tensor) -> Operand:
    """`[rows, heads, D]`."""
    row, head, _ = x.stride()
    return Operand(x, 0, row, head)


def of_queries(x: Tensor) -> Operand:
    """`[B, Lq, heads, D]`, or `[rows, heads, D]` of a broadcast or jagged query."""
    *batch, row, head, _ = x.stride()
    return Operand(x, batch[0] if batch else 0, row, head)


def of_statistics(x: Tensor, jagged: bool) -> Operand:
    """`[rows, heads]` or `[B, heads, Lq]`."""
    if jagged:
        row, head = x.stride()
        return Operand(x, 0, row, head)
    batch, head, row = x.stride()
    return Operand(x, batch, row, head)


def device_of(args: AttentionArgs) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors'."""
    device = args.k.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
