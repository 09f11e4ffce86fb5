"""Blocks and budgets of the backward kernel, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass

from jaggedtensor.kernels.shared.limits import operand_lacks
from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 64  # packed query rows of a block, and keys of each of the two consumers
KEYS = 128  # of a tile
STAGES = 2  # of what comes with a block of rows, and of dS
COLUMNS = 16  # of lse and delta: what a product of 16-bit numbers takes in a step
SHARED_MEMORY = 232448  # bytes that a CTA may use
_ARGUMENTS = 640  # bytes, at most, through which roles are given their arguments


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    group: int  # query heads that share one of keys
    jagged: bool
    left: bool  # the window has a limit on this side
    right: bool
    ordered: bool = False  # dQ is added in the order of the keys
    packed: bool = False  # dQ is added to a workspace as threads hold it
    cut: bool = False  # tiles of the last round are cut between CTAs
    last: bool = False  # the last wave: what the workspace holds is added to dQ, which leaves in rows
    block_d: int = 128
    block_dv: int = 128

    @property
    def half(self) -> int:
        """Columns of dQ of each of the two consumers."""
        return self.block_d // 2

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. 168 registers of 12 warps are shared out again by role: 240 for consumers, 24 for the others.
        ptxas 12.9 crashes on some variants, and spills in a loop of others."""
        return {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True, "newest_assembler": True}

    @property
    def shared_memory(self) -> int:
        """Bytes: K and V, the rings, dS, dK, lse and delta, dQ in fp32, mbarriers (of 16 bytes each), arguments."""
        columns = self.block_d + self.block_dv
        halves = (KEYS + STAGES * ROWS) * columns + STAGES * KEYS * ROWS + KEYS * self.block_d + ROWS * COLUMNS
        singles = ROWS * self.block_d
        barriers = 2 * (3 + STAGES) + 1 + self.last
        return 2 * halves + 4 * singles + 16 * barriers + _ARGUMENTS


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.query is QueryKind.BROADCAST:
        reasons.append("takes queries of each sequence's own")
    return reasons + operand_lacks(problem, rows=ROWS, least=40)


def pays(rows: int, batch: int) -> bool:
    """Whether a workspace of whole blocks is at most twice as large as `rows` packed rows."""
    return batch > 0 and (ROWS - 1) * (batch + 1) <= rows


def _block(dim: int) -> int:
    return 64 if dim <= 64 else 128


def select(problem: AttentionProblem) -> Config:
    """A pure function of a problem that lacks nothing."""
    config = Config(
        problem.group,
        problem.query is QueryKind.JAGGED,
        problem.left != UNLIMITED,
        problem.right != UNLIMITED,
        problem.deterministic,
        block_d=_block(problem.head_dim),
        block_dv=_block(problem.value_dim),
    )
    assert config.shared_memory <= SHARED_MEMORY
    return config
