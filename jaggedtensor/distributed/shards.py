"""A batch that every rank has, cut into a part for each, and put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jaggedtensor.data.assign import SequenceCost, assign
from jaggedtensor.distributed.collectives import agree, all_gather, resolve
from jaggedtensor.errors import fail
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.tensor import JaggedTensor


@dataclass(frozen=True)
class Sharding:
    """Where the tokens of a batch are: kept with the layout of a part, so with all that is made of it by token."""

    group: dist.ProcessGroup
    whole: JaggedLayout
    mine: Tensor  # int64 [tokens of this part], rows of the whole
    place: Tensor  # int64 [tokens of the whole], rows of what `all_gather` gives
    longest: int  # tokens of the largest part

    def collect(self, values: Tensor) -> Tensor:
        """`[tokens of this part, *feature]` of each rank to `[tokens of the whole, *feature]`."""
        padded = values.new_zeros(self.longest, *values.shape[1:])
        padded[: values.shape[0]] = values
        return all_gather(padded, self.group).index_select(0, self.place)


def shard(batch: JaggedTensor, mesh: Any, dim: int = 1, cost: Callable[[Tensor], Tensor] | None = None) -> JaggedTensor:
    """This rank's part of a batch that every rank of the mesh has; see `JaggedTensor.shard`."""
    group = resolve(mesh, batch.device)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    failure: Exception | None = None
    facts: dict[str, int | torch.dtype] = {}
    try:
        if dim not in (0, 1):
            fail("dim", "0 (sequences to ranks) or 1 (the tokens of each sequence)", dim)
        layout = batch.layout
        if layout.is_static:
            fail("the layout of the batch", "one whose lengths stay", "one made by with_capacity")
        ends = layout.host_offsets().to(torch.int64)
        parts = _sequences(ends, ranks, cost or SequenceCost()) if dim == 0 else _tokens(ends, ranks)
        facts = {
            "dim": dim, "batch size": layout.batch_size, "offsets (their hash)": _digest(ends),
            "size of a token": batch.values().shape[1:].numel(), "dtype": batch.dtype,
            "requires_grad": torch.is_grad_enabled() and batch.requires_grad,
        }  # fmt: skip
    except Exception as error:  # whatever it is, the others are told
        failure = error
    agree("shard", facts, group, batch.device, failure)

    sizes = [int(lengths.sum()) for lengths, _ in parts]
    longest = max(sizes)
    place = torch.empty(int(ends[-1]), dtype=torch.int64)
    for number, (_, rows) in enumerate(parts):
        place[rows] = number * longest + torch.arange(len(rows))
    lengths, rows = parts[rank]
    sharding = Sharding(group, layout, rows.to(batch.device), place.to(batch.device), longest)
    part = JaggedLayout.from_lengths(lengths).to(batch.device)
    part._derived[Sharding] = sharding
    return batch._of(_Take.apply(batch.values(), sharding), part)


def gather(part: JaggedTensor) -> JaggedTensor:
    """The whole batch on every rank, from parts made by `shard`; see `JaggedTensor.gather`."""
    sharding = part.layout._derived.get(Sharding)
    if sharding is None:
        fail("the batch", "made by shard(mesh), token by token", "one of another layout", "shard it first")
    values = part.values()
    wants_grad = torch.is_grad_enabled() and values.requires_grad
    facts: dict[str, int | torch.dtype] = {
        "dimensions": values.dim(), "size of a token": values.shape[1:].numel(), "dtype": values.dtype,
        "requires_grad": wants_grad, "tokens in all": len(sharding.place),
    }  # fmt: skip
    agree("gather", facts, sharding.group, part.device)
    whole = _Collect.apply(values[: len(sharding.mine)], sharding)
    return part._of(whole, sharding.whole)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding, ctx.rows = sharding, values.shape[0]
        return values.index_select(0, sharding.mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = ctx.sharding.collect(grad)
        slack = ctx.rows - whole.shape[0]
        return (torch.cat((whole, whole.new_zeros(slack, *whole.shape[1:]))) if slack else whole), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sharding: Sharding) -> Tensor:
        ctx.mine = sharding.mine
        return sharding.collect(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.mine), None


def _sequences(ends: Tensor, ranks: int, cost: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For each rank the lengths of its sequences, and the rows of the whole that they are."""
    lengths = ends.diff()
    owner = assign(cost(lengths), ranks)
    row_owner = torch.repeat_interleave(owner, lengths)
    return [(lengths[owner == rank], (row_owner == rank).nonzero()[:, 0]) for rank in range(ranks)]


def _tokens(ends: Tensor, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Each sequence in consecutive parts, equal to one token; which ranks get one more changes from one to the next."""
    lengths = ends.diff()
    shift = torch.arange(len(lengths)) % ranks
    cuts = torch.stack([(rank * lengths + shift) // ranks for rank in range(ranks + 1)])  # 0 .. lengths
    parts = []
    for rank in range(ranks):
        sizes = cuts[rank + 1] - cuts[rank]
        first = ends[:-1] + cuts[rank] - (sizes.cumsum(0) - sizes)
        parts.append((sizes, torch.repeat_interleave(first, sizes) + torch.arange(int(sizes.sum()))))
    return parts


def _digest(ends: Tensor) -> int:
    """Of all offsets; sums wrap around."""
    return int((ends * (torch.arange(1, 2 * len(ends), 2) * 0x9E3779B97F4A7C1)).sum())
