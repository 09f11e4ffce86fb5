"""Blocks, roles and budgets of the backward kernel that keeps a block of keys, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 128  # packed query rows of a block
KEYS = 128  # of a block: lanes of tensor memory
SLICE = 32  # columns of dQ that are staged at a time
HALF = 64  # columns of dV or dK that leave at a time, in as many bytes
MOST_ROWS = 1024  # packed rows of a broadcast query, of whose gradient every CTA has a share in fp32
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory
ROLES_STATE = 528  # bytes that the compiler adds for roles, at most
REGISTERS = 512  # of a thread of each of four groups of four warps, in all


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    block_d: int  # D rounded up to 64 or 128; the columns past D are zeros
    block_dv: int
    group: int  # query heads that share one of keys
    jagged: bool  # queries have offsets
    left: bool  # the window has a limit on this side
    right: bool
    ordered: bool  # dQ is added in the order of the keys, from the last
    workers: int  # CTAs for each head, if the query is a broadcast one and each has a share of dQ; else 0
    q_blocks: int  # of a broadcast query
    q_stages: int  # of the ring of Q: S of the next block is computed before dK of this one
    grad_stages: int  # of dO
    k_stages: int
    v_stages: int
    block_n: int = KEYS
    statistics_stages: int = 2
    drain_registers: int = 96  # of a thread: what the others leave
    compute_registers: int = 160
    single_registers: int = 96  # of the roles of one warp

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "enable_fp_fusion": True}

    @property
    def staggered(self) -> bool:
        """Whether CTAs that share a sequence begin at different query rows: not if they take turns, or add apart."""
        return not (self.ordered or self.workers)

    @property
    def overlapped(self) -> bool:
        """Whether the scores of the next block of keys come before dK and dQ of this one."""
        return self.k_stages > 1

    @property
    def dq_stages(self) -> int:
        """Buffers of dQ in tensor memory; 0: there is no room but that of dP, which has to wait for it."""
        left = TENSOR_COLUMNS - 2 * ROWS - self.block_d - self.block_dv
        return min(2, left // self.block_d)

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: the rings of Q, dO, K, V and the statistics, dS, staging, mbarriers (each padded to 16)."""
        rows = ROWS * (self.q_stages * self.block_d + self.grad_stages * self.block_dv)
        keys = self.block_n * (self.k_stages * self.block_d + self.v_stages * self.block_dv)
        singles = 2 * ROWS * SLICE + 2 * ROWS * self.statistics_stages
        rings = self.q_stages + self.grad_stages + self.k_stages + self.v_stages + self.statistics_stages
        barriers = 2 * rings + 6 + 2 * (max(1, self.dq_stages) + 2)
        return 2 * (rows + keys + self.block_n * ROWS) + 4 * singles + 16 * barriers + ROLES_STATE

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: S and dP, dV, dK, and dQ if it has its own."""
        return 2 * ROWS + self.block_dv + (1 + self.dq_stages) * self.block_d

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Of a thread, for each group of four warps but the one that drains."""
        return (self.compute_registers, self.compute_registers, self.single_registers)


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.query is QueryKind.BROADCAST:
        if not 1 <= (problem.rows or 0) <= MOST_ROWS:
            reasons.append(f"takes 1 to {MOST_ROWS} rows of a broadcast query for a head of keys, not {problem.rows}")
        if problem.masked:
            reasons.append("takes no block mask of a broadcast query")
    elif problem.deterministic and problem.masked:
        reasons.append("adds dQ in no order under a block mask")
    if problem.dtype.itemsize != 2:
        reasons.append(f"does not compute in {problem.dtype}")
    if ROWS % problem.group:
        reasons.append(f"takes groups of 1, 2, 4, ... heads, not {problem.group}")
    for dim in dict.fromkeys((problem.head_dim, problem.value_dim)):
        if dim > 128 or dim % 8:
            reasons.append(f"takes head dimensions up to 128 that are multiples of 8, not {dim}")
    return reasons


def select(problem: AttentionProblem) -> Config:
    """A pure function of a problem that lacks nothing: as many stages as there is room for."""
    shared = problem.query is QueryKind.BROADCAST
    block_d, block_dv = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.value_dim))
    for q_stages, grad_stages, k_stages, v_stages in ((2, 2, 2, 2), (2, 2, 2, 1), (2, 1, 2, 1), (2, 1, 1, 1)):
        config = Config(
            block_d,
            block_dv,
            problem.group,
            problem.query is QueryKind.JAGGED,
            problem.left != UNLIMITED,
            problem.right != UNLIMITED,
            problem.deterministic and not shared,
            max(1, problem.device.processors // problem.kv_heads) if shared else 0,
            -(-(problem.rows or 0) // ROWS) if shared else 0,
            q_stages,
            grad_stages,
            k_stages,
            v_stages,
        )
        if config.ordered:  # who waits for turns needs more, or it stores spilled numbers in its loop
            config = replace(config, drain_registers=120, compute_registers=152, single_registers=88)
        if config.shared_memory <= SHARED_MEMORY:
            break
    assert config.shared_memory <= SHARED_MEMORY, config
    assert config.tensor_columns <= TENSOR_COLUMNS, config
    assert config.drain_registers + sum(config.worker_registers) <= REGISTERS, config
    return config
