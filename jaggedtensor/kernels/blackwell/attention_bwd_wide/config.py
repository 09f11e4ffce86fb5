"""Blocks, roles and budgets of the backward kernel that makes one gradient at a time, and which problems it takes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

STAYING = 128  # packed query rows, or keys, that stay on a CTA: lanes of tensor memory
STREAMED = 64  # of those that pass, at a time: its columns
MAX_HEAD_DIM = 256
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory
ROLES_STATE = 512  # bytes that the compiler adds for roles, at most
REGISTERS = 504  # of a thread of each of three groups of four warps, in all


class Gradient(enum.Enum):
    """What a pass makes."""

    QUERY = "dQ"  # query rows stay, keys pass
    KEY = "dK"  # keys stay, query rows pass
    VALUE = "dV"  # the same


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    gradient: Gradient
    block_d: int  # D rounded up to 64, 128 or 256; the columns past D are zeros
    block_dv: int
    group: int  # query heads that share the rows of a block
    parts: int  # as many times that many share one of keys
    jagged: bool  # queries have offsets
    broadcast: bool  # all sequences have the same
    left: bool  # the window has a limit on this side
    right: bool
    workers: int  # CTAs for each block of rows of a broadcast query, each with a share of its dQ; else 0
    q_blocks: int  # of a broadcast query
    stages: int  # of the ring of what S is made of and passes
    grad_stages: int  # of what dP is made of and passes
    statistics_stages: int
    block_n: int = STAYING  # keys, where they stay
    drain_registers: int = 192  # of a thread: what the others leave
    compute_registers: int = 192
    single_registers: int = 120  # of the roles of one warp

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "enable_fp_fusion": True}

    @property
    def query_stays(self) -> bool:
        return self.gradient is Gradient.QUERY

    @property
    def differs(self) -> bool:
        """Whether dS is needed, and with it dP: else P is what is multiplied."""
        return self.gradient is not Gradient.VALUE

    @property
    def shares(self) -> bool:
        """Whether a CTA gathers dQ over all its tiles."""
        return self.workers > 0

    @property
    def columns(self) -> int:
        """Of the gradient."""
        return self.block_d if self.differs else self.block_dv

    @property
    def statistics(self) -> int:
        """Query rows whose lse and delta are a slot."""
        return STAYING if self.query_stays else STREAMED

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: what stays, the rings of what passes, the statistics, mbarriers (each padded to 16)."""
        stays = STAYING * (self.block_d + self.block_dv * self.differs)
        passes = STREAMED * (self.stages * self.block_d + self.grad_stages * self.block_dv)
        statistics = 2 * self.statistics * self.statistics_stages
        slots = 1 + self.differs + self.stages + self.grad_stages + self.statistics_stages
        barriers = 2 * slots + 2 + 2 + 1 + 1
        return 2 * (stays + passes) + 4 * statistics + 16 * barriers + ROLES_STATE

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: S of two blocks, dP of one, and the gradient."""
        return STREAMED * (2 + self.differs) + self.columns

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Of a thread, for each group of four warps but the one that drains."""
        return (self.compute_registers, self.single_registers)


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.dtype.itemsize != 2:
        reasons.append(f"does not compute in {problem.dtype}")
    for dim in dict.fromkeys((problem.head_dim, problem.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8:
            reasons.append(f"takes head dimensions up to {MAX_HEAD_DIM} that are multiples of 8, not {dim}")
    return reasons


def packed(problem: AttentionProblem) -> int:
    """Query heads whose rows share a block: the greatest power of two that divides a group, and a block."""
    return min(problem.group & -problem.group, STREAMED)


def select(problem: AttentionProblem, gradient: Gradient) -> Config:
    """A pure function of a problem that lacks nothing: as many stages as there is room for."""
    block_d, block_dv = (
        64 if dim <= 64 else 1 << (dim - 1).bit_length() for dim in (problem.head_dim, problem.value_dim)
    )
    if gradient is Gradient.VALUE:  # dV leaves through the memory of K
        block_d = block_dv = max(block_d, block_dv)
    group = packed(problem)
    shared = problem.query is QueryKind.BROADCAST and gradient is Gradient.QUERY
    blocks = -(-(problem.q_len or 0) * group // STAYING) if shared else 1
    config = Config(
        gradient,
        block_d,
        block_dv,
        group,
        problem.group // group,
        problem.query is QueryKind.JAGGED,
        problem.query is QueryKind.BROADCAST,
        problem.left != UNLIMITED,
        problem.right != UNLIMITED,
        max(1, problem.device.processors // (problem.q_heads // group * blocks)) if shared else 0,
        blocks,
        2,
        1,
        1 if gradient is Gradient.QUERY else 2,
    )
    for stages, grad_stages in ((4, 4), (3, 3), (2, 2)):
        more = replace(config, stages=stages, grad_stages=grad_stages)
        if more.shared_memory <= SHARED_MEMORY:
            config = more
            break
    assert config.shared_memory <= SHARED_MEMORY, config
    assert config.tensor_columns <= TENSOR_COLUMNS, config
    assert config.drain_registers + sum(config.worker_registers) <= REGISTERS, config
    return config
