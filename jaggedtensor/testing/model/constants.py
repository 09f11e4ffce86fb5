"""What engines of a multiprocessor take, in cycles, each with its source. Those marked [F] are fitted on the H200.

[M] measured on an H200 (docs/benchmarks.md, docs/kernels/hopper-*.md)       [P] published       [A] assumed
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Cycles of a scheduler's pipe for an instruction of a warp: 128 fp32 operations, 64 of integers, comparisons and
# conversions, 16 of special functions for each clock and multiprocessor, which has four schedulers (CUDA C++
# programming guide, "Throughput of native arithmetic instructions", 9.0 and 10.0). A packed one does two fp32
# operations for a lane.
PIPE = {"float": 1.0, "packed": 2.0, "integer": 2.0, "special": 8.0}

# Instructions of each warp beside arithmetic, for an event of a kind: as in the machine code of the Hopper and
# Blackwell kernels (docs/kernels/*.md count them by role), rounded.
INSTRUCTIONS = {
    "wait": 6.0,
    "arrive": 4.0,
    "expect": 4.0,
    "commit": 2.0,
    "tma load": 12.0,
    "tma store": 12.0,
    "tma reduce": 12.0,
    "store wait": 2.0,
    "mma wait": 1.0,
    "fence": 1.0,
    "tmem load": 2.0,  # of many columns each
    "tmem store": 2.0,
}
WGMMA_INSTRUCTIONS = 3.0  # for each of K = 16: descriptors and the product
TCGEN05_INSTRUCTIONS = 6.0
MOVED = 2048.0  # bytes of an instruction that loads or stores: 16 of each of 128 threads


@dataclass(frozen=True)
class Chip:
    """A GPU. Rates are for each multiprocessor and cycle, latencies in cycles."""

    name: str
    processors: int
    ghz: float
    hbm: float  # bytes, reads and writes together, if all multiprocessors share them alike
    l2: float  # bytes
    tensor: dict[str, dict[int, float]] = field(
        default_factory=dict, hash=False
    )  # cycles of K = 16 by columns; empty: SM90
    wgmma: float = 1.0  # share of the published rate that products reach
    product_start: float = 0.0  # that each wgmma product keeps tensor cores beside its columns
    shared: float = 128.0  # bytes
    tma: float = 125.0  # bytes
    tma_latency: float = 397.0  # beside the bytes
    hbm_latency: float = 300.0  # more, past the L2
    load_latency: float = 600.0  # of ordinary loads
    store_latency: float = 300.0  # until TMA has read what it stores, beside the bytes
    wait: float = 30.0  # of an mbarrier
    arrive: float = 20.0
    product_latency: float = 30.0  # from the end of a product to whoever waits for it
    tmem: float = 256.0  # bytes
    tmem_load: float = 20.0  # latency beside the bytes, which go through it twice: 532 for 128 columns
    tmem_store: float = 20.0  # the same, for bytes that go through it once
    shared_latency: float = 30.0
    fence: float = 20.0
    reduction: float = 60.0  # what a row's maximum takes beside its instructions: shuffles
    remote_latency: float = 200.0  # of stores to the neighbour's shared memory
    cancel_latency: float = 600.0  # of cluster launch control
    extreme: float = 1.0  # instructions for each element of a maximum
    per_instruction: float = 1.5  # cycles of a warp from an instruction to its next
    launch_us: float = 4.0


H200 = Chip(
    name="H200",
    processors=132,
    ghz=1.98,  # [M] in bursts
    hbm=4.3e12 / 132 / 1.98e9,  # [M] a large copy: 16.5
    l2=64.0,
    wgmma=796 / 1070,  # [M] products alone reach 796 of 1070 TFLOP/s
    product_start=0.0,  # [F]
)
B200 = Chip(
    name="B200",
    processors=148,
    ghz=1.85,
    hbm=29.2,
    l2=64.0,
    tensor={
        "shared": {64: 48.6, 128: 64.6, 256: 128.6},
        "tensor": {64: 32.5, 128: 64.5, 256: 128.5},
        "pair": {64: 43.7, 128: 64.8, 256: 128.7},
    },
    extreme=0.5,  # [P] of three numbers at once (PTX ISA, "max", sm_100)
    reduction=0.0,  # a thread holds its row
)
