"""Tensors as the device functions see them: (pointer, batch stride, row stride, head stride)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jaggedtensor.kernels.shared.rows import Operand
from jaggedtensor.problem import AttentionArgs, AttentionProblem


def columns_together(x: Tensor) -> Tensor:
    """The same with a contiguous last dimension: a copy where it is not (a transposed or expanded tensor)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def are_aligned(problem: AttentionProblem, *tensors: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes though Triton cannot tell: it takes a stride that is not a
    multiple of 16 elements, as of head dimension 72, for a multiple of 1, and would load such rows by elements."""
    dims, unit = (problem.head_dim, problem.value_dim), 16 // problem.dtype.itemsize
    if not any(dim % 16 for dim in dims) or any(dim % unit for dim in dims):
        return False
    return all(not x.data_ptr() % 16 and not any(step % unit for step in x.stride()[:-1]) for x in tensors)


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
