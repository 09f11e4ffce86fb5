"""The schedules of a layout, kept as long as it lives: built once, used by every layer, forward and backward."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jaggedtensor.schedules.types import Identity, ScheduleRequest, TileSchedule

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout

MOST = 16  # a model uses two or three on a batch
_LOCK = threading.RLock()  # a mask may be a function that asks for a schedule
_ALIGNED = 32  # int32 elements: every tensor in a packed one begins at a multiple of 128 bytes


@dataclass(frozen=True)
class Packed:
    """Schedules as one tensor, to be copied to another device or process at one go."""

    requests: list[tuple[ScheduleRequest, bool]]  # and whether the queries are on the layout of the keys
    slots: list[int]
    shapes: list[list[list[int] | None]]  # of each schedule's tensors
    data: Tensor  # int32


class ScheduleCache:
    """The `MOST` schedules used last, by request.

    Requests name query layouts and masks by weak references, so that nothing is kept alive; a schedule of one that is
    gone is never found again, and makes room in its turn.
    """

    def __init__(self) -> None:
        self._schedules: OrderedDict[ScheduleRequest, TileSchedule] = OrderedDict()
        self.builds = 0

    def get(self, request: ScheduleRequest, build: Callable[[], TileSchedule]) -> TileSchedule:
        """The schedule of a request, built at the first."""
        with _LOCK:
            schedule = self._schedules.get(request)
            if schedule is None:
                schedule = build()
                self.builds += 1
                self._keep(schedule)
            else:
                self._schedules.move_to_end(request)
            return schedule

    def _keep(self, schedule: TileSchedule) -> None:
        self._schedules[schedule.request] = schedule
        if len(self._schedules) > MOST:
            self._schedules.popitem(last=False)

    def __len__(self) -> int:
        return len(self._schedules)

    def __iter__(self) -> Iterator[TileSchedule]:
        return iter(list(self._schedules.values()))

    def tensors(self) -> list[Tensor]:
        """Every tensor of every schedule, for `record_stream`."""
        return [tensor for schedule in self for tensor in schedule.tensors() if tensor is not None]

    def pack(self, layout: JaggedLayout) -> Packed | None:
        """Those that depend on this layout alone, whose cache this is; other query layouts and masks don't go along."""
        going = []
        for schedule in self:
            by_itself = schedule.request.q_len == Identity(layout)
            if schedule.request.mask is None and (by_itself or isinstance(schedule.request.q_len, int)):
                going.append((schedule, by_itself))
        if not going:
            return None
        every = [tensor for schedule, _ in going for tensor in schedule.tensors()]
        flat = [torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % _ALIGNED)) for x in every if x is not None]
        return Packed(
            [(replace(s.request, q_len=0) if by_itself else s.request, by_itself) for s, by_itself in going],
            [schedule.slots for schedule, _ in going],
            [[None if x is None else list(x.shape) for x in schedule.tensors()] for schedule, _ in going],
            torch.cat(flat),
        )

    def unpack(self, packed: Packed, layout: JaggedLayout) -> None:
        """Schedules of a copy of that layout, whose cache this is."""
        begin = 0
        for (request, by_itself), slots, shapes in zip(packed.requests, packed.slots, packed.shapes, strict=True):
            tensors = []
            for shape in shapes:
                size = 0 if shape is None else torch.Size(shape).numel()
                tensors.append(None if shape is None else packed.data[begin : begin + size].view(shape))
                begin += size + -size % _ALIGNED
            request = replace(request, q_len=Identity(layout)) if by_itself else request
            self._keep(TileSchedule.of(request, layout, slots, tensors))
