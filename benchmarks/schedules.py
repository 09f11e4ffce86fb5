"""How well each kind of schedule balances, and how long it takes to build: `python benchmarks/schedules.py`.

Simulated, so it runs anywhere. Loads are counted in blocks; a figure is the load of the busiest worker over the mean.
Exits with 1 if a bar does not hold.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from lengths import WORKLOADS, Workload, lengths

from jaggedtensor import JaggedLayout, ScheduleKind, TileSchedule
from jaggedtensor.schedules import TileAxis
from jaggedtensor.schedules.build import build
from jaggedtensor.schedules.simulate import CostModel, simulate

WORKERS = (132, 148)  # an H200's and a B200's
COLUMNS = (*ScheduleKind,)
failed: list[str] = []


def bar(text: str, holds: bool) -> None:
    print(f"  {'holds' if holds else 'FAILS'}: {text}")
    if not holds:
        failed.append(text)


def schedules(workload: Workload, workers: int, axis: TileAxis) -> dict[ScheduleKind, TileSchedule]:
    layout = JaggedLayout.from_lengths(workload.lengths)
    common = dict(
        q_len=layout if workload.q_len is None else workload.q_len, heads=workload.heads, workers=workers, axis=axis,
        block_q=128, block_kv=128 if axis is TileAxis.QUERY else 64,
    )  # fmt: skip
    return {kind: layout.schedule(kind, **common) for kind in ScheduleKind}


def balance() -> None:
    zigzag, stream_k = 0.0, 0.0
    for axis, title in (
        (TileAxis.QUERY, "forward: a q block of 128 rows stays, KV blocks of 128 pass"),
        (TileAxis.KEY, "backward of a broadcast query: a KV block of 64 stays, q blocks pass"),
    ):
        print(f"\n{title}; busiest worker over mean\n")
        print(f"{'workload':18}{'workers':>8}" + "".join(f"{kind.value:>13}" for kind in COLUMNS) + "  queue, delayed")
        for name, workload in WORKLOADS.items():
            if axis is TileAxis.KEY and workload.q_len is None:
                continue
            for workers in WORKERS:
                made = schedules(workload, workers, axis)
                runs = {kind: simulate(schedule) for kind, schedule in made.items()}
                delayed = simulate(made[ScheduleKind.DYNAMIC], delay=1.0)
                shown = "".join(f"{runs[kind].imbalance:13.4f}" for kind in COLUMNS)
                print(f"{name:18}{workers:8}{shown}{delayed.imbalance:16.4f}")
                stream_k = max(stream_k, runs[ScheduleKind.STREAM_K].imbalance)
                if axis is TileAxis.QUERY and workload.distribution in ("uniform", "lognormal"):
                    ratio = runs[ScheduleKind.ZIGZAG].makespan / runs[ScheduleKind.LPT].makespan
                    zigzag = max(zigzag, ratio)
    print()
    bar(f"zigzag at most 3 % over LPT on uniform and lognormal lengths: {100 * (zigzag - 1):.2f} %", zigzag <= 1.03)
    bar(f"stream-k at most 0.5 % over the mean on every workload: {100 * (stream_k - 1):.2f} %", stream_k <= 1.005)


def weighed() -> None:
    """What tiles cost besides their blocks matters where sequences are short."""
    cost = CostModel(block=1.0, tile=1.0)
    kinds = (ScheduleKind.ZIGZAG, ScheduleKind.LPT, ScheduleKind.STREAM_K, ScheduleKind.DYNAMIC)
    print("\nforward, where starting a tile costs as much as a block; left without, right with tile_cost=1\n")
    print(f"{'workload':18}{'workers':>8}" + "".join(f"{kind.value:>20}" for kind in kinds))
    for name in ("pma128-uniform", "pma128-lognormal", "pma128-tail"):
        workload, shown = WORKLOADS[name], ""
        layout = JaggedLayout.from_lengths(workload.lengths)
        for kind in kinds:
            for weight in (0, 1):
                schedule = layout.schedule(
                    kind, q_len=workload.q_len, heads=workload.heads, workers=132, tile_cost=weight
                )
                shown += f"{simulate(schedule, cost).imbalance:{12 if weight == 0 else 8}.4f}"
        print(f"{name:18}{132:8}{shown}")


def milliseconds(layout: JaggedLayout, schedule: TileSchedule, repeat: int) -> tuple[float, float]:
    """Median time by the clock, and median time that the thread had a core, which a busy machine does not lengthen."""
    clock, core = [], []
    for _ in range(repeat):
        begin = time.perf_counter(), time.thread_time()
        build(schedule.request, layout)
        clock.append(1e3 * (time.perf_counter() - begin[0]))
        core.append(1e3 * (time.thread_time() - begin[1]))
    return statistics.median(clock), statistics.median(core)


def building() -> None:
    torch.set_num_threads(1)
    print("\nbuilding on one core, in ms of that core (by the clock)\n")
    huge = torch.randint(0, 201, (100_000,), generator=torch.Generator().manual_seed(0))
    print(f"{'batch':34}{'axis':7}" + "".join(f"{kind.value:>17}" for kind in COLUMNS))
    slowest = 0.0
    for batch, name, repeat in ((lengths("lognormal"), "lognormal", 30), (huge, "uniform up to 200", 3)):
        layout = JaggedLayout.from_lengths(batch)
        title = f"{len(batch):,} x {name}, {int(batch.sum()) / 1e6:.1f} M"
        for axis in TileAxis:
            shown = ""
            for kind in COLUMNS:
                schedule = layout.schedule(kind, q_len=128, heads=4, workers=132, axis=axis)
                lpt = kind is ScheduleKind.LPT
                clock, core = milliseconds(layout, schedule, 3 if lpt else repeat)
                shown += f"{f'{core:.2f} ({clock:.2f})':>17}"
                if name == "lognormal" and not lpt:
                    slowest = max(slowest, core)
                if int(schedule.count) != 4 * covered(schedule, batch):
                    failed.append(f"{kind.value} by {axis.value} lost tiles")
            print(f"{title:34}{axis.value:7}{shown}")
    print()
    bar(f"a schedule of 4096 sequences, 4 heads takes less than 5 ms: {slowest:.2f} ms", slowest < 5)
    bar("100,000 sequences with 10 million tokens are served", not any("lost" in text for text in failed))


def covered(schedule: TileSchedule, batch: torch.Tensor) -> float:
    """Tiles that a head should have."""
    if schedule.kind is ScheduleKind.STREAM_K:
        return int(schedule.count) / 4  # depends on where it is cut
    return int((batch > 0).sum()) if schedule.axis is TileAxis.QUERY else int(((batch + 127) // 128).sum())


def main() -> int:
    balance()
    weighed()
    building()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
