"""Blocks, roles and budgets of the forward kernel: measured on an H200 where docs/kernels/hopper-forward.md says so."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 64  # packed query rows of a consumer: what one warpgroup's MMA takes
SHARED_MEMORY = 232448  # bytes that a CTA may use
ROLES_STATE = 512  # bytes that the compiler adds for roles, at most


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    consumers: int  # warpgroups, each of 64 rows
    block_n: int  # keys
    q_stages: int
    kv_stages: int
    tma_store: bool = True  # O leaves by TMA: not where rows of a tile are nobody's, beside heads of the next group
    stage_in_q: bool = False  # and through the buffer that Q came in, so no query stays for several tiles
    block_d: int = 64  # D, rounded up to a power of two; the columns past D are zeros
    block_dv: int = 64
    block_m: int = 64  # packed query rows of a CTA
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
    tile_cost: int = 1  # what starting and finishing a tile costs, in KV blocks

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. Registers of a thread, which the roles then share out: see the end of device.py."""
        registers = {1: 128, 2: 168, 3: 128}[self.consumers]
        return {"num_warps": 4, "maxnreg": registers, "enable_fp_fusion": True}

    @property
    def consumer_registers(self) -> int:
        """Of a thread of a consumer that is not the first: as the end of device.py asks for."""
        return {1: 24, 2: 240, 3: 160}[self.consumers]

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: Q, the rings of K and V, staging for O, and mbarriers (each padded to 16 bytes)."""
        q = self.q_stages * self.block_m * self.block_d
        kv = self.kv_stages * self.block_n * (self.block_d + self.block_dv)
        out = self.block_m * self.block_dv if self.tma_store and not self.stage_in_q else 0
        barriers = 2 * self.q_stages + 4 * self.kv_stages
        return 2 * (q + kv + out) + 16 * barriers + ROLES_STATE


def block_of(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


@functools.lru_cache(maxsize=512)
def select(
    problem: AttentionProblem, consumers: int = 0, block_n: int = 0, q_stages: int = 0, kv_stages: int = 0
) -> Config:
    """A pure function of the problem."""
    d, dv = block_of(problem.head_dim), block_of(problem.value_dim)
    wide, group = max(d, dv), 1 << (problem.group - 1).bit_length()
    rows = None if problem.q_len is None else problem.q_len * group
    broadcast = problem.query is QueryKind.BROADCAST
    consumers = consumers or (1 if rows is not None and rows <= ROWS else 2)
    block_n = block_n or (64 if broadcast or wide > 128 else 128)
    q_stages = q_stages or (1 if wide > 128 else 2)
    tma_store = group == problem.group
    stage_in_q = tma_store and d == dv == 256
    block_m = ROWS * consumers
    if not kv_stages:
        fixed = 2 * block_m * (q_stages * d + dv * (tma_store and not stage_in_q)) + 1024
        kv_stages = min(8, (SHARED_MEMORY - fixed) // (2 * block_n * (d + dv)))
    config = Config(
        consumers,
        block_n,
        q_stages,
        kv_stages,
        tma_store,
        stage_in_q,
        d,
        dv,
        block_m,
        problem.group,
        group,
        problem.q_heads,
        problem.value_dim,
        1 if rows is None else -(-rows // block_m),
        broadcast,
        broadcast and not stage_in_q,
        problem.query is QueryKind.JAGGED,
        problem.left != UNLIMITED,
        problem.right != UNLIMITED,
        problem.windowed,
        problem.masked,
    )
    assert config.kv_stages >= 2, config
    assert config.shared_memory <= SHARED_MEMORY, config
    return config
