"""What the roles of the backward share: buffers, and the tiles that all of them walk."""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon
from jaggedtensor.kernels.shared.pipeline import Channel

ROWS: gl.constexpr = gl.constexpr(64)  # keys of a consumer, packed query rows of a block
KEYS: gl.constexpr = gl.constexpr(128)  # of a tile
STAGES: gl.constexpr = gl.constexpr(2)  # of what comes with a block of rows, and of dS


@aggregate
class Channels:
    k: Channel  # 2 x [64, D]
    v: Channel  # 2 x [64, Dv]
    rows: Channel  # [64, D] of Q, and the barriers of all that comes with a block of query rows
    grad_out: gl.shared_memory_descriptor  # [64, Dv] of each stage
    columns: gl.shared_memory_descriptor  # [64, 16] bf16: lse and delta of the block's rows, see `columns`
    read: gl.shared_memory_descriptor  # an mbarrier: both consumers have read those
    ds: gl.shared_memory_descriptor  # 2 x [64, 64] of each stage: dS^T of each consumer, through which its dV leaves
    dq: Channel  # 2 x [64, D / 2] fp32: columns of each consumer; full when they and `queries_role` have told
    dk: gl.shared_memory_descriptor  # 2 x [64, D / 2] of each consumer; in the last wave, dQ in rows on its way, too
    free: gl.shared_memory_descriptor | gl.constexpr  # the last wave: no dQ of a tile is left there


@aggregate
class Tile:
    sequence: gl.tensor
    head: gl.tensor  # of keys
    begin: gl.tensor  # blocks of query rows
    end: gl.tensor
    block: gl.tensor  # of keys

    @gluon.jit
    def walked(self, n, C: gl.constexpr):
        """The n-th block of query rows: CTAs that share a sequence begin at different ones, to add apart."""
        if not C.ordered:
            count = self.end - self.begin
            block = self.begin + self.block % count + n
            return gl.where(block >= self.end, block - count, block)
        else:
            return self.begin + n


@gluon.jit
def read_tile(schedule, place):
    row = schedule.tiles + place * 8
    return Tile(
        gl.maximum(gl.load(row), 0), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4)
    )  # fmt: skip
