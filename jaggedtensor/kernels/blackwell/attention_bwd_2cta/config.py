"""Blocks, roles and budgets of the backward kernel for pairs of CTAs, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass

from jaggedtensor.kernels.shared.limits import operand_lacks
from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 128  # packed query rows of a block
GROUPED = 64  # heads, at most, that share one of keys: a CTA has half of a block's queries
KEYS = 256  # of a tile
HALF = 64  # columns of dQ, dK or dV that leave at a time
ADDED = 32  # columns of dQ in one reduction
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory
ROLES_STATE = 1024  # bytes that the compiler adds for roles, at most
REGISTERS = 512  # of a thread of each of four groups of four warps, in all


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    group: int  # query heads that share one of keys
    jagged: bool
    left: bool  # the window has a limit on this side
    right: bool
    staggered: bool = True  # pairs that share a sequence begin at different blocks of query rows, to add to dQ apart
    ordered: bool = False
    block_n: int = KEYS
    block_d: int = 128
    block_dv: int = 128
    reduce_registers: int = 96  # of a thread: what the others leave
    compute_registers: int = 168
    single_registers: int = 80  # of the roles of one warp

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "num_ctas": 2, "enable_fp_fusion": True}

    @property
    def shared_memory(self) -> int:
        """Bytes of a CTA, at most: copies of K, V, Q and dO, dS, staging, lse and delta, mbarriers (padded to 16)."""
        keys = KEYS * (2 * self.block_d + self.block_dv) // 2
        queries = ROWS * (self.block_d + self.block_dv)
        elements = keys + queries + KEYS * ROWS // 2 + 2 * KEYS * HALF // 2
        barriers = 7 + 3 + 8 + 5 + 2 * 2
        return 2 * elements + 4 * 2 * ROWS + 16 * barriers + ROLES_STATE

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: S and dP, dV, dK. dQ lies over S."""
        return 2 * ROWS + self.block_d + self.block_dv

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Of a thread, for each group of four warps but the one that reduces."""
        return (self.compute_registers, self.compute_registers, self.single_registers)


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.query is QueryKind.BROADCAST:
        reasons.append("takes queries of each sequence's own")
    if problem.deterministic:
        reasons.append("adds dQ in no order")
    if problem.masked:
        reasons.append("takes no block mask")
    return reasons + operand_lacks(problem, rows=GROUPED, least=72)


def select(problem: AttentionProblem) -> Config:
    """A pure function of a problem that lacks nothing."""
    config = Config(
        problem.group, problem.query is QueryKind.JAGGED, problem.left != UNLIMITED, problem.right != UNLIMITED
    )
    assert config.shared_memory <= SHARED_MEMORY, config
    assert config.tensor_columns <= TENSOR_COLUMNS, config
    assert config.reduce_registers + sum(config.worker_registers) <= REGISTERS, config
    return config
