"""Blocks, roles and budgets of the forward kernel: measured on an H200 where docs/kernels/hopper-forward.md says so."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind

ROWS = 64  # of a warpgroup's MMA
SHARED_MEMORY = 233472  # bytes of a multiprocessor
RESERVED = 1024  # of them for each CTA
ROLES_STATE = 512  # bytes that the compiler adds for roles, at most
MOST_STAGES = 8

# Registers of a thread by (consumers, CTAs of a multiprocessor): of all at first, 65536 in all, and of consumers but
# the first once the roles have shared them out. Loading takes 24, the first consumer what is left. A sum that is too
# large would drop every request, without a word.
LOADING = 24
REGISTERS = {(1, 1): (168, LOADING), (1, 2): (128, LOADING), (2, 1): (168, 240), (2, 2): (80, 104), (3, 1): (128, 160)}


@dataclass(frozen=True)
class Config:
    """Passed to the kernel whole, as one constexpr."""

    consumers: int  # warpgroups
    rows: int  # packed query rows of each
    ctas: int  # of a multiprocessor
    block_n: int  # keys
    q_stages: int
    kv_stages: int
    tma_store: bool = True  # O leaves by TMA: not where rows of a tile are nobody's, beside heads of the next group
    stage_in_q: bool = False  # and through the buffer that Q came in, so no query stays for several tiles
    crosses: bool = True  # the last product of a tile is issued beside the first scores of the next
    settles: bool = False  # no product is waited for before the exponentials that run beside it, see softmax.settled
    anchored: bool = False  # no block but the first has a maximum, see shared.anchor; a second launch mends that
    redoes: bool = False  # only flagged tiles are walked
    alternates: bool = False  # two consumers issue their products in turns
    leads: bool = False  # K is loaded a block ahead of V, Q a tile ahead
    lends: bool = False  # O leaves through the buffer of its own Q while the next tile has another; V has a slot more
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
    turns: bool = False  # every second CTA of a team walks its tiles backwards
    team: int = 1  # CTAs that share a head
    registers: int = LOADING  # of a thread of a consumer but the first
    splits: bool = False  # tiles may be cut between CTAs
    merge_rows: int = 16  # of a program that merges parts
    tile_cost: int = 2  # what starting and finishing a tile costs, in KV blocks

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch."""
        return {"num_warps": 4, "maxnreg": REGISTERS[self.consumers, self.ctas][0], "enable_fp_fusion": True}

    @property
    def flags(self) -> int:
        """Of a tile: one for each warp of consumers, see shared.anchor."""
        return 4 * self.consumers

    @property
    def v_stages(self) -> int:
        return self.kv_stages + self.lends

    @property
    def halves(self) -> bool:
        """Whether a first block of no more than half as many keys has half as many scores. Rows are anchored, so that
        no more than P is needed of it."""
        return self.anchored and not self.windowed and not self.masked

    @property
    def hands(self) -> bool:
        """Whether each tile has a Q of its own, whose buffer is free for another one at once."""
        return self.leads and not self.resident and not self.windowed

    @property
    def exact(self) -> Config:
        """The same with a maximum for each block."""
        settles = _settles(False, self.broadcast, self.q_blocks)
        return replace(self, anchored=False, alternates=False, leads=False, lends=False, settles=settles)

    @property
    def redo(self) -> Config:
        """What does flagged tiles again."""
        return replace(self.exact, redoes=True, crosses=False)

    @property
    def shared_memory(self) -> int:
        """Bytes, at most: Q, the rings of K and V, staging for O, and mbarriers (each padded to 16 bytes)."""
        kv = self.block_n * (self.kv_stages * self.block_d + self.v_stages * self.block_dv)
        barriers = 2 * self.q_stages + 2 * self.kv_stages + 2 * self.v_stages + 2 * self.alternates
        return 2 * (_of_queries(self) + kv) + 16 * barriers + ROLES_STATE


def _of_queries(config: Config) -> int:
    """Elements of Q and of staging for O."""
    out = config.block_dv if config.tma_store and not config.stage_in_q and not config.lends else 0
    return config.block_m * (config.q_stages * config.block_d + out)


def budget(ctas: int) -> int:
    """Bytes of shared memory for each of so many CTAs."""
    return SHARED_MEMORY // ctas - RESERVED


def block_of(dim: int) -> int:
    """The width of a block in shared memory."""
    return max(64, 1 << (dim - 1).bit_length())


def select(problem: AttentionProblem, **chosen: int) -> Config:
    """A pure function of the problem. `chosen` fields are taken as they are, for measurements."""
    return _select(problem, **chosen) if torch.compiler.is_compiling() else _remembered(problem, **chosen)


def _select(problem: AttentionProblem, **chosen: int) -> Config:
    d, dv, group = block_of(problem.head_dim), block_of(problem.value_dim), 1 << (problem.group - 1).bit_length()
    wide, length = max(d, dv), None if problem.q_len is None else problem.q_len * group
    broadcast, tma_store = problem.query is QueryKind.BROADCAST, group == problem.group
    stage_in_q = tma_store and d == dv == 256
    # Short queries wait for memory, and for their own softmax: two CTAs fill each other's gaps.
    if length is not None and length <= ROWS:
        shape = dict(consumers=1, rows=ROWS, ctas=2 if wide <= 128 else 1)
    elif broadcast and length is not None and length <= 2 * ROWS and wide == 64:
        shape = dict(consumers=1, rows=2 * ROWS, ctas=2)
    else:
        shape = dict(consumers=2, rows=ROWS, ctas=1)
    shape |= {name: value for name, value in chosen.items() if name in shape}
    ctas, block_m = shape["ctas"], shape["consumers"] * shape["rows"]
    workers = problem.device.processors * ctas
    q_blocks = 1 if length is None else -(-length // block_m)
    block_n = chosen.get("block_n", 64 if (broadcast and q_blocks == 1) or ctas == 2 or wide > 128 else 128)
    # A query that stays for good needs no second buffer: each CTA has one head, see schedules.deal.
    stays = broadcast and q_blocks == 1 and workers % problem.kv_heads == 0
    # Where products are what bounds, and nearly all rows see a key in their tile's first block.
    anchored = block_n == 128 and problem.left == UNLIMITED and not problem.masked
    anchored = bool(chosen.get("anchored", anchored))
    q_stages = 1 if stays or ctas == 2 or wide > 128 else 2
    # Where keys come from memory more than from the cache: a third V is asked for earlier, the next tile's Q later.
    lends = anchored and broadcast and q_blocks > 1 and q_stages == 2 and tma_store and d == dv
    lends = bool(chosen.get("lends", lends))
    fields: dict[str, Any] = dict(
        **shape,
        block_n=block_n,
        q_stages=q_stages,
        kv_stages=0,
        tma_store=tma_store,
        stage_in_q=stage_in_q,
        # Where memory is what bounds, going on without a pause gains nothing, and code that does is 0.7 % slower.
        crosses=not stage_in_q and not (stays and shape["consumers"] == 2),
        settles=_settles(anchored, broadcast, q_blocks),
        anchored=anchored,
        alternates=anchored and shape["consumers"] == 2,
        lends=lends,
        # A Q buffer is free when the next tile begins.
        leads=anchored and not lends and q_stages == 2 and shape["consumers"] == 2,
        block_d=d,
        block_dv=dv,
        block_m=block_m,
        heads=problem.group,
        group=group,
        q_heads=problem.q_heads,
        value_dim=problem.value_dim,
        q_blocks=q_blocks,
        broadcast=broadcast,
        resident=broadcast and not stage_in_q,
        jagged=problem.query is QueryKind.JAGGED,
        left=problem.left != UNLIMITED,
        right=problem.right != UNLIMITED,
        windowed=problem.windowed,
        masked=problem.masked,
        # Not where tiles that are dealt one after another share their keys in the cache.
        turns=broadcast and q_blocks == 1,
        team=workers // math.gcd(problem.kv_heads, workers),
        registers=REGISTERS[shape["consumers"], ctas][1],
    )
    fields |= chosen
    if "kv_stages" not in chosen:
        room = budget(ctas) - Config(**fields).shared_memory - 64 * MOST_STAGES
        fields["kv_stages"] = min(MOST_STAGES, room // (2 * block_n * (d + dv)))
    config = Config(**fields)
    assert config.kv_stages >= 2, config
    assert config.shared_memory <= budget(ctas), config
    return config


def _settles(anchored: bool, broadcast: bool, q_blocks: int) -> bool:
    """Measured: 4 % faster for a shared query of 512 rows, as fast for 256, 1 to 2 % slower for all others. Where rows
    are anchored and consumers take turns it is faster for all."""
    return anchored or (broadcast and q_blocks > 1)


_remembered = functools.lru_cache(maxsize=512)(_select)  # which torch.compile would warn of
