"""Sums and gathers over a process group, with the gradients of replicated tensors, and ranks that agree beforehand."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from jaggedtensor.errors import fail

# Renamed in torch 2.13.
_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_FACTS = 16  # numbers that ranks compare; always as many, so that even ranks that do different things can
_DTYPES = {zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def resolve(group: Any, device: torch.device | None = None) -> dist.ProcessGroup:
    """The process group of a group or of a mesh.

    Raises:
        TypeError: something else.
        ValueError: the mesh has several dimensions, is of another kind of device, or has no place for this rank.
    """
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(map(repr, group.mesh_dim_names or ()))
            fail(
                "mesh",
                "one-dimensional",
                f"shape {tuple(group.mesh.shape)}",
                f"pick a dimension: mesh[name] of {names}",
            )
        if device is not None and group.device_type != device.type:
            fail("mesh", f"of {device.type} devices, as the tensors", f"{group.device_type}")
        if group.get_coordinate() is None:
            fail("mesh", "one that this rank is part of", f"ranks {group.mesh.tolist()}")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        fail("group", "a ProcessGroup or a one-dimensional DeviceMesh", group, error=TypeError)
    if dist.get_rank(group) < 0:
        fail("group", "one that this rank is part of", "another")
    return group


def all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    """The "sum" or "max" over ranks; no gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[rows, ...]` of each rank to `[ranks * rows, ...]`; no gradient."""
    return functional.wait_tensor(_all_gather(x.contiguous(), 0, group))


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, the same on each; so is its gradient, which is therefore each rank's own."""
    return _Sum.apply(x, group)


def replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor on every rank, before each uses it in its own way: gradients are summed over ranks."""
    return _Replicated.apply(x, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # In fp32 at least: contract 4 rounds the gradient of a broadcast query once.
        wide = grad if grad.dtype == torch.float64 else grad.float()
        return all_reduce(wide, "sum", ctx.group).to(grad.dtype), None


def agree(
    what: str, facts: dict[str, int | torch.dtype], group: dist.ProcessGroup, device: torch.device,
    failure: Exception | None = None,
) -> None:  # fmt: skip
    """Raise on every rank if one has failed, or if the facts differ; the failed rank raises its own error.

    Args:
        what: the operation, which must be the same too.
        facts: at most 13, by name.
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        if failure is not None:
            raise failure
        return
    numbers = [zlib.crc32(what.encode()), int(failure is None)]
    numbers += [zlib.crc32(str(x).encode()) if isinstance(x, torch.dtype) else int(x) for x in facts.values()]
    numbers += [0] * (_FACTS - len(numbers))
    mine = torch.tensor([numbers], dtype=torch.int64).to(device, non_blocking=True)
    all_of_them = all_gather(mine, group)
    if failure is not None:
        raise failure
    if device.type == "cuda":
        torch._assert_async((all_of_them == mine).all(), f"{what}: the ranks disagree, or one has failed")
        return
    found = all_of_them.tolist()
    failed = [rank for rank, numbers in enumerate(found) if not numbers[1]]
    if failed:
        raise RuntimeError(
            f"{what}: rank {failed[0]} of the group has failed before data moved; its own error says why"
        )
    for place, name in [(0, "operation"), *enumerate(facts, 2)]:
        values = [numbers[place] for numbers in found]
        if len(set(values)) > 1:
            shown = [_DTYPES.get(x, x) if isinstance(facts.get(name), torch.dtype) else x for x in values]
            by_rank = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(shown))
            got = "others" if place == 0 else by_rank
            fail(f"{what}: {name}", "the same on every rank", got, "give every rank of the group the same")
