"""Sequences dealt to ranks by what they cost: the zigzag and LPT of the schedules, one level up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor.errors import check_tensor, fail
from jaggedtensor.schedules.deal import deal_items
from jaggedtensor.schedules.types import ScheduleKind

KINDS = (ScheduleKind.LPT, ScheduleKind.ZIGZAG, ScheduleKind.ROUND_ROBIN, ScheduleKind.CONTIGUOUS)
_RESOLUTION = 2**40  # of the largest cost; with it the sum of eight million fits an int64


@dataclass(frozen=True)
class SequenceCost:
    """What a sequence of a length costs, in any unit: `pair * L^2 + token * L + sequence`.

    >>> SequenceCost(pair=1, token=100)(torch.tensor([0, 10, 200]))
    tensor([    0.,  1100., 60000.], dtype=torch.float64)
    """

    pair: float = 0.0  # of each query with each key
    token: float = 1.0
    sequence: float = 0.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """float64 `[B]`."""
        lengths = lengths.to(torch.float64)
        return (self.pair * lengths + self.token) * lengths + self.sequence

    @classmethod
    def of_encoder(cls, dim: int, hidden: int | None = None, *, causal: bool = False) -> SequenceCost:
        """FLOPs of the forward pass of a layer of self-attention: the projections and the net of each token, and
        two products for each pair."""
        hidden = 4 * dim if hidden is None else hidden
        return cls(pair=4 * dim / (2 if causal else 1), token=8 * dim**2 + 4 * dim * hidden)

    @classmethod
    def of_pooling(cls, dim: int, q_len: int = 1, hidden: int | None = None) -> SequenceCost:
        """FLOPs of the forward pass of `PMAPooling`: each token meets every one of `q_len` learned queries."""
        hidden = 4 * dim if hidden is None else hidden
        return cls(token=4 * dim**2 + 4 * dim * q_len, sequence=q_len * (2 * dim**2 + 4 * dim * hidden))


def assign(costs: Tensor | Sequence[float], ranks: int, kind: ScheduleKind = ScheduleKind.LPT) -> Tensor:
    """The rank of each item, int64 `[n]`, so that all have about equally much to do.

    >>> assign([9, 1, 1, 1, 5, 3], ranks=2)
    tensor([0, 1, 0, 1, 1, 1])

    No rank is without an item if there are as many items as ranks.

    Args:
        costs: `[n]`, finite, 0 and more.
        kind: `LPT` (Graham 1969; on the host), `ZIGZAG`, `ROUND_ROBIN` or `CONTIGUOUS`, as in the schedules.

    Raises:
        ValueError: a cost is negative or not finite; no ranks; another kind.
    """
    costs = torch.as_tensor(costs)
    check_tensor(costs, "costs")
    if costs.dim() != 1:
        fail("costs", "of rank 1", costs)
    if ranks < 1:
        fail("ranks", "at least 1", ranks)
    if kind not in KINDS:
        fail("kind", f"one of {', '.join(k.value for k in KINDS)}", str(getattr(kind, "value", kind)))
    if costs.numel():
        largest = float(costs.max())
        if not (float(costs.min()) >= 0 and largest < float("inf")):
            fail("costs", "finite and at least 0", f"{float(costs.min())}..{largest}")
        if costs.is_floating_point():
            costs = costs.double() * (_RESOLUTION / largest if largest else 1.0)
            costs = costs.round()
    return deal_items(costs.to(torch.int64), ranks, kind)


def imbalance(costs: Tensor | Sequence[float], owners: Tensor, ranks: int) -> float:
    """What the busiest rank has to do over the mean: 1 is perfect, and is what no work at all gives.

    >>> imbalance([9, 1, 1, 1, 5, 3], torch.tensor([0, 1, 1, 1, 1, 1]), ranks=2)
    1.1
    """
    costs = torch.as_tensor(costs).double()
    loads = costs.new_zeros(ranks).index_add_(0, owners, costs)
    return float(loads.max() / loads.mean()) if float(loads.sum()) else 1.0
