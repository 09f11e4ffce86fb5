"""Two CTAs on Hopper exchange halves by asynchronous stores into each other's shared memory.

    wait sent … · expect got 4 ROWS · COLS bytes · st.async: own rows → columns of both · wait got · columns → registers
    arrive free of the lead · relay: the lead waits and tells both · next

A tile [2 ROWS, COLS] is read by rows, one half in each CTA, and left by columns. A buffer may be stored into again when
both CTAs have read theirs: both arrive on `read` in the lead CTA, whose relay passes it on to `free` in both.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_store, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.testing.families import Bad, Case, Family, Operands

ROWS, COLS = 16, 64


@gluon.jit
def relay_role(tiles, read, free):
    phase = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(read, phase)
        mbarrier.arrive(free, from_cta=0)
        phase = phase ^ 1


@gluon.jit
def exchange_role(x_desc, out_desc, tiles, rows_buffer, loaded, columns, got, staging, read, free):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    by_rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]])
    by_columns: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 1]])
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.expect(loaded, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [tile * ROWS, 0], loaded, rows_buffer)
        mbarrier.wait(loaded, phase)
        value = rows_buffer.load(by_rows) * 3
        mbarrier.wait(free, phase ^ 1)
        mbarrier.expect(got, columns.nbytes_per_cta)
        async_store(columns, value, got)
        mbarrier.wait(got, phase)
        received = columns.load(by_columns)
        mbarrier.arrive(read)
        tma.store_wait(0)
        staging.store(received)
        fence_async_shared()
        tma.async_store(out_desc, [tile * ROWS, 0], staging)
        phase = phase ^ 1
    tma.store_wait(0)


@gluon.jit
def kernel(x_desc, out_desc, tiles):
    """x, out [tiles · 2 ROWS, COLS] fp32: out = 3 x."""
    rows_buffer = gl.allocate_shared_memory(gl.float32, x_desc.block_shape, x_desc.layout)
    columns = gl.allocate_shared_memory(gl.float32, out_desc.block_shape, out_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, out_desc.block_shape, out_desc.layout)
    loaded = mbarrier.allocate_mbarrier()
    got = mbarrier.allocate_mbarrier()
    read = mbarrier.allocate_mbarrier(two_ctas=True)
    free = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(got, count=1)
    mbarrier.init(read, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [
            (exchange_role, (x_desc, out_desc, tiles, rows_buffer, loaded, columns, got, staging, read, free)),
            (relay_role, (tiles, read, free)),
        ],
        [1],
    )


def case(tiles: int, programs: int = 1) -> Case:
    """So many tiles, by clusters of two CTAs."""

    def operands(device: str) -> Operands:
        x = torch.randint(-4, 5, (tiles * 2 * ROWS, COLS), generator=torch.Generator().manual_seed(0)).float()
        out = torch.full((tiles * 2 * ROWS, COLS), float("nan"), device=device)

        def descriptor(tensor: torch.Tensor, split: list[list[int]]) -> TensorDescriptor:
            layout = gl.NVMMASharedLayout.get_default_for([2 * ROWS, COLS], gl.float32, cga_layout=split)
            return TensorDescriptor.from_tensor(tensor.to(device), [2 * ROWS, COLS], layout)

        args = (descriptor(x, [[1, 0]]), descriptor(out, [[0, 1]]), tiles)
        return Operands(args, {"out": (out, 3 * x)})

    return Case(f"{tiles} tiles, {programs} programs", kernel, (programs,), operands, num_ctas=2)


CASES = [case(1), case(2), case(5), case(5, programs=2)]

BAD = [
    Bad("exchange_role: delete mbarrier.wait(free, phase ^ 1)", ("race", "uninitialised")),
    Bad("exchange_role: delete mbarrier.wait(got, phase)", ("race", "uninitialised")),
    Bad(
        "exchange_role: half the bytes in mbarrier.expect(got, columns.nbytes_per_cta)",
        ("race", "uninitialised", "wrong bytes"),
    ),
    Bad("exchange_role: move up mbarrier.arrive(read)", ("race",)),
    Bad("exchange_role: delete fence_async_shared()", ("missing fence",)),
    Bad("relay_role: delete mbarrier.wait(read, phase)", ("deadlock", "lap", "over-arrival", "race")),
    Bad("each CTA's relay tells its own alone", ("deadlock", "lap", "wrong bytes"), ("(free, from_cta=0)", "(free)")),
]

EQUIVALENT = {
    # `free` guards the buffer; of `got` the CTA has waited for the last phase itself.
    "exchange_role: move down mbarrier.wait(free, phase ^ 1)": "`free` need not come before the expect of `got`",
}

FAMILY = Family("cluster_exchange", CASES, bad=BAD, equivalent=EQUIVALENT, triton=(3, 9))
