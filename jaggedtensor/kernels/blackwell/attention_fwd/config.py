"""Blocks, roles and budgets of the forward kernel. Chosen by arithmetic and by what compiles without spills: see
docs/kernels/blackwell-forward.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.shared.remember import remembered
from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 128  # packed query rows of a lane: what one tcgen05.mma takes
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory
ROLES_STATE = 512  # bytes that the compiler adds for roles, at most
REGISTERS = {6: 480, 4: 512, 3: 504}  # of a thread of each group of four warps, in all, by their number
MAX_HEAD_DIM = 256
ENOUGH = 16  # blocks of keys for each multiprocessor that make up for a second launch, two for each tile left out


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    streams: bool  # the lanes are two streams of keys for the same 128 rows, not 128 rows each
    wide: bool  # the lanes add to the same O, and have one softmax
    block_n: int  # keys
    kv_stages: int
    block_d: int  # D and Dv, rounded up to 64, 128 or 256; the columns past them are zeros
    block_dv: int  # the same
    block_m: int  # packed query rows of a CTA
    q_parts: int  # of 128 rows
    q_stages: int = 1
    anchored: bool = False  # rows keep the peak of their first block, and two groups of four warps have a lane
    redoes: bool = False  # only tiles that the launch before has flagged
    pieces: int = 4  # that a block of P is made and stored in
    early: int = 0  # columns of P that are published before the rest: none, or three quarters
    polynomials: int = 0  # pieces half of whose exponentials are polynomials
    limit: int = 8  # log2 units that a row's peak may grow by before O fades
    steep: int = 27  # log2 of a peak, in log2 units, past which scores are multiplied by a power of two, see `Units`
    boost: int = 0  # log2 of what P is multiplied by; the sums as well, so that O is not
    itemsize: int = 2  # bytes of an element of q, k and v; 1: e4m3, with scales of their own
    correction_columns: int = 32  # of O at a time, at a tile's end
    fade_columns: int = 64  # where it fades: each piece has a barrier
    correction_registers: int = 96  # of a thread: what the others leave
    softmax_registers: int = 192
    single_registers: int = 32  # of the roles of one warp
    answers: int = 0  # of the launch control, on their way; 0: the schedule says whose a tile is
    splits: bool = False  # tiles may be cut between CTAs
    merge_rows: int = 16  # of a program that merges parts
    staging: int = 1  # buffers for O on its way out
    out_columns: int = 128  # of each
    tma_store: bool = True  # O leaves by TMA: not where rows of a tile are nobody's, beside heads of the next group
    heads: int = 1  # query heads of each head of keys
    group: int = 1  # the same, rounded up to a power of two: row r of a tile is query r // group of head r % group
    q_heads: int = 1
    value_dim: int = 64
    q_blocks: int = 1  # of a sequence, where all have the same query
    broadcast: bool = False
    resident: bool = False  # tiles that follow each other may share a query
    jagged: bool = False
    left: bool = False  # the window has a limit on this side
    right: bool = False
    windowed: bool = False
    masked: bool = False  # by a list of blocks
    skips: bool = False  # lane 0 of two tiles sees fewer blocks than lane 1
    tile_cost: int = 1  # what starting and finishing a tile costs, in KV blocks

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "enable_fp_fusion": True}

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: Q, the ring of K and V, staging for O, peaks, sums, mbarriers (each padded to 16 bytes)."""
        rows = self.q_parts * self.q_stages * ROWS + self.kv_stages * self.block_n
        staging = 2 * self.staging * ROWS * self.out_columns
        barriers = 2 * self.q_stages + 2 * self.kv_stages + 2 * (8 if self.anchored else 7) + 3 * self.answers
        return self.itemsize * rows * self.block_d + staging + 4 * 2 * 2 * ROWS + 16 * barriers + ROLES_STATE

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: S and O of each lane."""
        return 2 * self.block_n + (1 if self.wide else 2) * self.block_dv

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Of a thread, for each group of four warps but correction."""
        count = 1 if self.wide else 4 if self.anchored else 2
        return (self.softmax_registers,) * count + (self.single_registers,)


def may_anchor(problem: AttentionProblem) -> bool:
    """Whether there is a kernel whose rows keep the peak of their first block: for two tiles, in 16 bits. Of a list of
    blocks, the first may be one that a row does not see."""
    rows = None if problem.q_len is None else problem.q_len * (1 << (problem.group - 1).bit_length())
    narrow = max(problem.head_dim, problem.value_dim) <= 128 and problem.dtype.itemsize == 2
    return narrow and not problem.masked and (rows is None or rows > ROWS)


def anchors_pay(problem: AttentionProblem, queries: int, keys: int, batch: int) -> bool:
    """Whether a kernel that keeps the peaks of first blocks takes less time, with the launch that does again what needs
    it, if sequences are as long as each other. Of all sequences: queries of a head, and keys."""
    tiles = problem.q_heads * queries / (2 * ROWS)
    blocks = tiles * keys / (128 * max(1, batch))
    return may_anchor(problem) and blocks - 2 * tiles >= ENOUGH * problem.device.processors


@remembered
def select(problem: AttentionProblem, **chosen: int) -> Config:
    """A pure function of the problem. `chosen` fields are taken as they are, for comparisons."""
    block_d = max(64, 1 << (max(problem.head_dim, problem.value_dim) - 1).bit_length())
    wide = block_d > 128
    group = 1 << (problem.group - 1).bit_length()
    rows = None if problem.q_len is None else problem.q_len * group
    broadcast = problem.query is QueryKind.BROADCAST
    # Rows past the first 128 would be another tile, which reads all keys again; fewer than that leave a lane idle. And
    # the rows of a tile must be of one block of a mask.
    short = rows is not None and rows <= ROWS
    few = short or (problem.masked and group * MASK_BLOCK < 2 * ROWS)
    streams = few and not wide
    q_parts = 1 if few or wide else 2
    long = q_parts == 2
    by_polynomial = long and problem.device.arch == (10, 0)
    quantised = problem.dtype == torch.float8_e4m3fn
    fields: dict[str, Any] = dict(
        streams=streams,
        wide=wide,
        block_n=64 if wide else 128,
        kv_stages=0,
        block_d=block_d,
        block_dv=block_d,
        block_m=q_parts * ROWS,
        q_parts=q_parts,
        # P of fp16 must hold 2 ** limit times 2 ** 8, what steep scores may be rounded by. That of e4m3, whose largest
        # is 448, 2 ** (limit + boost) times 2 ** (1 / 2); less of a boost would lose small weights.
        limit=4 if quantised else 8 if problem.dtype == torch.bfloat16 else 7,
        steep=23 if quantised else 27,
        boost=4 if quantised else 0,
        itemsize=problem.dtype.itemsize,
        # Loading bounds streams of a short query; tensor cores and exponentials a long one, these by half on SM103.
        early=96 if long else 0,
        # Products of e4m3 take half as long, and exponentials bound it.
        polynomials=(2 if quantised else 1) if by_polynomial else 0,
        correction_registers=256 if wide else 104 if long else 96,
        single_registers=24 if long else 32,
        staging=2 if long or wide else 1,
        out_columns=64 if wide else block_d,
        tma_store=group == problem.group,
        heads=problem.group,
        group=group,
        q_heads=problem.q_heads,
        value_dim=problem.value_dim,
        q_blocks=1 if rows is None else -(-rows // (q_parts * ROWS)),
        broadcast=broadcast,
        resident=broadcast,
        jagged=problem.query is QueryKind.JAGGED,
        left=problem.left != UNLIMITED,
        right=problem.right != UNLIMITED,
        windowed=problem.windowed,
        masked=problem.masked,
        skips=long and problem.right != UNLIMITED and not problem.masked,
    )
    if chosen.get("anchored"):
        assert may_anchor(problem), problem
        # Without maxima, exponentials have time enough, and 16 columns of S are enough to begin with.
        fields |= dict(pieces=8, early=64, polynomials=0)
        fields |= dict(softmax_registers=96, correction_registers=72, correction_columns=16)
    if chosen.get("redoes"):
        fields |= dict(resident=False)  # whose tile is next is not known before its flag is read
    fields |= chosen
    if not fields["kv_stages"]:
        empty = Config(**fields)
        each = empty.itemsize * empty.block_n * block_d + 2 * 16
        fields["kv_stages"] = min(8, (SHARED_MEMORY - empty.shared_memory) // each)
    config = Config(**fields)
    asked = config.correction_registers, *config.worker_registers
    assert sum(asked) <= REGISTERS[len(asked)], config
    assert config.kv_stages >= 3, config
    assert config.shared_memory <= SHARED_MEMORY, config
    assert config.tensor_columns <= TENSOR_COLUMNS, config
    return config
