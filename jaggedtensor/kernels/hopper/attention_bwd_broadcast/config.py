"""Blocks and budgets of the backward kernel for a broadcast query, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass

from jaggedtensor.kernels.shared.limits import operand_lacks
from jaggedtensor.problem import AttentionProblem, QueryKind

ROWS = 128  # packed query rows of a CTA, of which each of the two scorers has half
MOST_PARTS = 4  # CTAs that share the rows of a query
SHARED_MEMORY = 232448  # bytes that a CTA may use
_TURNS = 2  # buffers of P, and of dS
_ARGUMENTS = 640  # bytes, at most, through which roles are given their arguments


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    block_n: int  # keys
    k_stages: int  # of the ring of K
    v_stages: int
    grad_stages: int  # of that of dO
    block_d: int  # D rounded up to 64 or 128; the columns past D are zeros
    block_dv: int
    value_dim: int
    group: int  # query heads that share one of keys
    q_heads: int
    workers: int  # shares of all keys
    parts: int  # CTAs for each share, with 128 rows each
    late: bool  # dQ of a tile is made behind S of the next one
    early: bool  # P of a sequence's first tile is made before delta
    lead: int = 8  # tiles that a part may be ahead of the next one
    tile_cost: int = 2  # what a sequence costs a CTA beside its tiles, in tiles
    patience: int = 4096  # questions, of about a microsecond each, in which the next one has to do something

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. 128 registers of 16 warps are shared out again by role: 192 for scorers, 96 for the maker."""
        return {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": True}

    @property
    def buffers(self) -> int:
        """Bytes: Q and dO, the rings of K and V, P and dS."""
        columns = self.block_d + self.grad_stages * self.block_dv
        ring = self.block_n * (self.k_stages * self.block_d + self.v_stages * self.block_dv)
        return 2 * (ROWS * columns + ring + 2 * _TURNS * ROWS * self.block_n)

    @property
    def shared_memory(self) -> int:
        """Bytes: the buffers, mbarriers (each padded to 16 bytes), what roles are given as arguments."""
        return self.buffers + 16 * 2 * (1 + self.grad_stages + self.k_stages + self.v_stages + 3 * _TURNS) + _ARGUMENTS


def lacks(problem: AttentionProblem) -> list[str]:
    """What of a problem the kernel does not do."""
    reasons = []
    if problem.query is not QueryKind.BROADCAST:
        reasons.append("takes a broadcast query")
    elif not 1 <= (problem.rows or 0) <= MOST_PARTS * ROWS:
        reasons.append(f"takes 1 to {MOST_PARTS * ROWS} query rows of a head of keys, not {problem.rows}")
    if problem.windowed:
        reasons.append("takes no window")
    return reasons + operand_lacks(problem, rows=ROWS)


def select(problem: AttentionProblem) -> Config:
    """A pure function of a problem that lacks nothing: as many stages, powers of two, as there is room for."""
    block_d, block_dv = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.value_dim))
    assert problem.rows is not None
    parts = -(-problem.rows // ROWS)
    workers = max(1, problem.device.processors // parts)  # not one CTA more than processors
    late = parts == 1 and block_d == 128  # 4 to 6 % faster, elsewhere 3 to 4 % slower
    early = parts == 1 and block_d == 64  # 2.5 % faster, elsewhere 0 to 5 % slower
    # Where there is no room for both, K goes ahead, which is held until dQ of its tile is there, and not dO.
    for stages in ((8, 4, 2), (4, 4, 2), (4, 2, 1)):
        config = Config(
            64, *stages, block_d, block_dv, problem.value_dim, problem.group, problem.q_heads, workers, parts,
            late, early,
        )  # fmt: skip
        if config.shared_memory <= SHARED_MEMORY:
            return config
    raise AssertionError(f"{config} takes {config.shared_memory} bytes of shared memory")
