"""From a layout and a request to a schedule."""

from __future__ import annotations

import weakref

import torch

from jaggedtensor.layout import JaggedLayout
from jaggedtensor.schedules.deal import Dealt, deal
from jaggedtensor.schedules.last_round import LastRound
from jaggedtensor.schedules.stream_k import no_merges, stream_k, stream_k_rows, stream_k_slots
from jaggedtensor.schedules.types import Mask, Merge, ScheduleKind, ScheduleRequest, Tile, TileSchedule
from jaggedtensor.schedules.valid_tiles import check_rows, valid_units


def build(
    request: ScheduleRequest,
    layout: JaggedLayout,
    query: JaggedLayout | None = None,
    mask: Mask | None = None,
    rows: int | None = None,
    q_rows: int | None = None,
) -> TileSchedule:
    """Build a schedule on the layout's device, without the host waiting (but for LPT). The layout caches it.

    Args:
        query: layout of a jagged query, None for `request.q_len` queries each.
        rows, q_rows: rows of the values, bounds for layouts whose number of tokens the host does not know.
    """
    device, is_stream_k = layout.device, request.kind is ScheduleKind.STREAM_K
    units = valid_units(request, layout, query, mask, rows, q_rows)
    merges, slots = torch.empty(0, len(Merge), dtype=torch.int32, device=device), 0
    if units is None or units.capacity == 0:
        nothing = torch.zeros(request.workers + 1, dtype=torch.int64, device=device)
        offsets = None if request.kind is ScheduleKind.DYNAMIC else nothing
        dealt = Dealt(merges.new_empty(0, len(Tile)), nothing[:0], offsets, nothing[0])
        if is_stream_k:
            merges = no_merges(request, device)
    elif is_stream_k:
        check_rows(stream_k_rows(units.capacity, request))
        dealt, merges = stream_k(units, request)
    else:
        last = LastRound.of(units, request)
        dealt = deal(units, request, last)
        if last is not None:
            merges, slots = last.merges(units, request), last.slots

    return TileSchedule(
        request=request,
        tiles=dealt.tiles,
        owner=dealt.owner.to(torch.int32),
        worker_offsets=None if dealt.offsets is None else dealt.offsets.to(torch.int32),
        count=dealt.count.to(torch.int32).reshape(1),
        merges=merges,
        blocks=None if units is None else units.blocks,
        slots=stream_k_slots(request) if is_stream_k else slots,
        _layout=weakref.ref(layout),
    )
