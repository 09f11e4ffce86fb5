"""Blocks, roles and budgets of the backward kernel for a broadcast query, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass

from jaggedtensor.kernels.shared.limits import operand_lacks
from jaggedtensor.problem import AttentionProblem, QueryKind

ROWS = 128  # packed query rows of a CTA
KEYS = 128  # of a tile: lanes of tensor memory
HALF = 64  # columns of dV or dK that leave at a time, and query rows of each of the two roles that compute
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory
ROLES_STATE = 512  # bytes that the compiler adds for roles, at most
REGISTERS = 512  # of a thread of each of four groups of four warps, in all


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    block_n: int  # keys
    k_stages: int  # of the ring of K, whose tiles stay until dQ has them
    v_stages: int
    block_d: int  # D rounded up to 64 or 128; the columns past D are zeros
    block_dv: int
    group: int  # query heads that share one of keys
    q_heads: int
    workers: int  # shares of the keys of a head: a CTA each
    drain_registers: int = 88  # of a thread: what the others leave
    compute_registers: int = 152
    single_registers: int = 120  # of the roles of one warp: with 88, that of products spills ten numbers

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "enable_fp_fusion": True}

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: Q and dO, the rings of K and V, dS, staging, lse and delta, mbarriers (each padded to 16)."""
        ring = self.block_n * (self.k_stages * self.block_d + self.v_stages * self.block_dv)
        elements = ROWS * (self.block_d + self.block_dv + self.block_n) + ring + 2 * self.block_n * HALF
        barriers = 1 + 2 + 2 * (self.k_stages + self.v_stages) + 4 + 4
        return 2 * elements + 4 * 2 * ROWS + 16 * barriers + ROLES_STATE

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: S and dP, two halves of dV or dK, dQ."""
        return 2 * ROWS + 2 * HALF + self.block_d

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Of a thread, for each group of four warps but the one that drains."""
        return (self.compute_registers, self.compute_registers, self.single_registers)


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.query is not QueryKind.BROADCAST:
        reasons.append("takes a broadcast query")
    elif not 1 <= (problem.rows or 0) <= ROWS:
        reasons.append(f"takes 1 to {ROWS} query rows of a head of keys, not {problem.rows}")
    if problem.windowed:
        reasons.append("takes no window")
    if problem.masked:
        reasons.append("takes no block mask")
    return reasons + operand_lacks(problem, rows=ROWS)


def select(problem: AttentionProblem) -> Config:
    """A pure function of a problem that lacks nothing: as many stages as there is room for."""
    block_d, block_dv = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.value_dim))
    workers = max(1, problem.device.processors // problem.kv_heads)  # not one CTA more than processors
    for k_stages, v_stages in ((4, 4), (4, 2), (3, 2), (2, 2), (2, 1)):
        config = Config(KEYS, k_stages, v_stages, block_d, block_dv, problem.group, problem.q_heads, workers)
        if config.shared_memory <= SHARED_MEMORY:
            break
    assert config.shared_memory <= SHARED_MEMORY, config
    assert config.tensor_columns <= TENSOR_COLUMNS, config
    assert config.drain_registers + sum(config.worker_registers) <= REGISTERS, config
    return config
