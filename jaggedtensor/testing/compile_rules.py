"""What compiled kernels are held to, role by role, and beside whom; what is allowed beyond that, with the reason.

1. Shared memory, tensor memory and registers are within what a CTA has and what the configuration states; every request
   for registers is met.
2. No loop over blocks loads or stores a spilled number.
3. A trip of the bulk loop has at most 1.1 times the instructions of the counterpart in FlashAttention-4, compiled for
   the same GPU; that of softmax not one more. Counterparts are told by what they do (`Role.kind`), for the same pass
   and head dimensions; what they do in a trip is made equal: products, exponentials or keys.
4. The assembler makes no product wait for another (C75xx, Hopper).

Reasons are limits too: what passes one is a fault again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import triton

from jaggedtensor.testing.compiled import Kernel, Pass, Role, role_of
from jaggedtensor.testing.machine_code import PRODUCTS, complaints, hot_loops, read_code

MORE = 1.1  # times the counterpart's instructions


@dataclass(frozen=True)
class Reason:
    """Why a role has more than the rules allow, and the most that it may have."""

    text: str
    most: float = MORE  # times the counterpart's instructions
    loads: int = 0  # of spilled numbers in a loop
    stores: int = 0


_BROADCAST, _FORWARD = "blackwell/attention_bwd_broadcast", "blackwell/attention_fwd"
_PAIR, _GENERAL = "blackwell/attention_bwd_2cta", "blackwell/attention_bwd_1cta"
_WIDE = "blackwell/attention_bwd_wide"
_RESCALE = Reason(
    "a barrier around each half of O, passed over where no peak grows; with Triton 3.8 a vote by shuffles; who "
    "it is among threads and rows is read again",
    1.25,
    2,
)
_PRODUCTS = "P comes in parts, whose addresses are worked out each; there are 1024 cycles and more to issue in"
_LOADS = Reason("one warp that waits for slots and has 1000 cycles and more for a trip, with block masks too", 1.8)
_CONSTANTS = "numbers that stay the same for all tiles are read again"

# By family and role; or, before that, by family, role and "redoes", "window", "e4m3", or a version of Triton.
REASONS: dict[tuple[str, ...], Reason] = {
    (_FORWARD, "correct_streams_role"): _RESCALE,
    (_FORWARD, "correct_streams_role", "3.8"): replace(_RESCALE, most=1.4),
    (_FORWARD, "correct_tiles_role"): _RESCALE,
    (_FORWARD, "correct_tiles_role", "3.8"): replace(_RESCALE, most=1.4),
    (_FORWARD, "correct_tiles_role", "redoes"): replace(_RESCALE, most=1.5, loads=5),
    (_FORWARD, "finish_tiles_role"): Reason(
        "a trip is a tile, of the counterpart a block of keys; spilled numbers are read once for 128 columns of O",
        5.0,
        15,
        3,
    ),
    (_FORWARD, "anchored_role", "window"): Reason(
        "masks in loops of their own, which a tile takes for a block or two", 1.1, 4, 1
    ),
    (_FORWARD, "correct_wide_role"): Reason(_CONSTANTS, loads=1),
    (_FORWARD, "mma_streams_role"): Reason(_PRODUCTS, 1.3),
    (_FORWARD, "mma_streams_role", "e4m3"): Reason(f"{_PRODUCTS}; half the products share the rest", 1.45),
    (_FORWARD, "mma_tiles_role"): Reason(_PRODUCTS, 1.25),
    (_FORWARD, "load_role"): _LOADS,
    (_FORWARD, "softmax_role"): Reason(
        "on SM103 FlashAttention-4's loads from tensor memory find the peak (LDTM.STAT), ours are plain", 1.1
    ),
    (_FORWARD, "softmax_role", "e4m3"): Reason(
        "twice as many exponentials are polynomials: 16 instructions less for the special units, of 8 cycles each",
        1.25,
    ),
    (_BROADCAST, "drain_role"): Reason(
        "256 columns of dV and dK leave here, of the counterpart 128 of dQ: it stores dV and dK after its loop", 2.9, 3
    ),
    (_BROADCAST, "compute_role"): Reason(f"{_CONSTANTS}; in fp16, dS is clamped", 1.25, 2),
    (_BROADCAST, "mma_role"): Reason(f"commits for each half of dV and dK; {_CONSTANTS}", 1.2, 3),
    (_BROADCAST, "load_queries_role"): Reason(_CONSTANTS, loads=1),
    (_BROADCAST, "load_keys_role"): _LOADS,
    (_PAIR, "mma_role"): Reason(
        f"each operand has one buffer, whose release is a commit of its own; 2688 cycles to issue in; {_CONSTANTS}",
        1.45,
        3,
    ),
    (_PAIR, "reduce_role"): Reason(_CONSTANTS, loads=1),
    (_PAIR, "compute_role", "window"): Reason("a mask, which blocks that every row sees pass over", 1.4, 6),
    (_GENERAL, "drain_role"): Reason(
        f"dV leaves within the loop, in a branch that a tile takes once; turns are waited for; {_CONSTANTS}", 2.8, 9
    ),
    (_GENERAL, "compute_role"): Reason(f"{_CONSTANTS}; in fp16, dS is clamped", 1.25, 2),
    (_GENERAL, "compute_role", "window"): Reason("masks, in a branch that only blocks take which they cut", 1.55, 8),
    (_GENERAL, "mma_role"): Reason(
        f"waits and commits of a tile's first and last block; 4000 cycles to issue in; {_CONSTANTS}", 1.6, 8
    ),
    (_GENERAL, "statistics_role"): Reason(_CONSTANTS, loads=2),
    (_WIDE, "drain_role"): Reason(f"a trip is a tile, whose whole gradient leaves in it; {_CONSTANTS}", 1.8, 1),
    (_WIDE, "compute_role"): Reason(f"{_CONSTANTS}; in fp16, dS is clamped", 1.25, 2),
    (_WIDE, "compute_role", "window"): Reason("masks, in a branch that only blocks take which they cut", 1.25, 2),
    (_WIDE, "mma_role"): Reason(
        f"blocks of 64, so fewer products for as many waits; 1200 cycles to issue in; {_CONSTANTS}", 1.6, 2
    ),
    (_WIDE, "load_role"): Reason(f"one warp for all four operands, 1200 cycles for a trip; {_CONSTANTS}", 2.2, 1),
    ("hopper/attention_bwd", "consume_role"): Reason(_CONSTANTS, loads=2),
    ("hopper/attention_bwd", "consume_role", "window"): Reason(
        "masks take registers that scores need", loads=40, stores=10
    ),
    ("hopper/attention_bwd", "keys_role"): Reason(_CONSTANTS, loads=1),
    ("hopper/attention_bwd", "reduce_role"): Reason(_CONSTANTS, loads=1),
    ("hopper/attention_bwd_broadcast", "store_role"): Reason(_CONSTANTS, loads=1),
    ("hopper/attention_bwd_broadcast", "score_role", "3.8"): Reason(_CONSTANTS, loads=3),
}


class Counterpart(NamedTuple):
    """A role of another's kernel: a trip of its bulk loop."""

    slots: int
    registers: int | None
    products: int
    exponentials: int
    spilled: Mapping[str, int]


Peers = Mapping[str, Mapping[str, Counterpart]]  # by "sm_100 forward 128", then by the kind of role


class Row(NamedTuple):
    """A role, as looked at."""

    role: Role
    counterpart: float | None  # instructions of the counterpart for as much work
    faults: list[str]
    reason: str  # of what is beyond the rules, but allowed


def peers_of(kernels: list[Mapping[str, Any]]) -> dict[str, dict[str, Counterpart]]:
    """Reads the kernels that `benchmarks/compile_peers.py` lists."""
    found: dict[str, dict[str, Counterpart]] = {}
    for kernel in kernels:
        roles = found.setdefault(f"{kernel['arch']} {kernel['pass']} {kernel['dim']}", {})
        for loop in hot_loops(read_code(Path(kernel["file"]).read_bytes())):
            role = role_of("", [loop])
            products = sum(loop.counts[kind] for kind in PRODUCTS)
            exponentials = loop.counts["MUFU"]
            roles[role.kind] = Counterpart(len(loop), loop.registers, products, exponentials, role.spilled)
    return found


def recorded_peers(file: Path) -> dict[str, dict[str, Counterpart]]:
    """As `peers_of` read them once, when its packages were at hand."""
    recorded = json.loads(file.read_text())["roles"]
    return {key: {kind: Counterpart(**role) for kind, role in roles.items()} for key, roles in recorded.items()}


def counterpart_of(kernel: Kernel, role: Role, arch: str, which: Pass, peers: Peers) -> float | None:
    """Instructions of the counterpart for the work of a trip of ours; None if there is none."""
    config = kernel.config
    dims = {getattr(config, "block_d", 0), getattr(config, "block_dv", 0)}
    dtype = " e4m3" if getattr(config, "itemsize", 2) == 1 else ""
    found = peers.get(f"{arch} {which.value} {dims.pop()}{dtype}", {}).get(role.kind) if len(dims) == 1 else None
    if found is None:
        return None
    share = 1.0
    if role.kind == "mma":
        share = sum(role.counts[kind] for kind in PRODUCTS) / found.products
    elif role.kind == "softmax":
        forward = which is Pass.FORWARD  # where part of the exponentials are polynomials
        half = 2 if getattr(config, "anchored", False) and config.q_parts == 2 else 1  # a group of two has half a block
        share = config.block_n / 128 / half if forward else role.counts["MUFU"] / found.exponentials
    return found.slots * share


def look_at(kernel: Kernel, arch: str, which: Pass, peers: Peers) -> list[Row]:
    """Holds each role of a kernel to rules 2 and 3."""
    rows = []
    for role in kernel.roles.values():
        reason = reason_of(kernel, role.name)
        counterpart = counterpart_of(kernel, role, arch, which, peers)
        allowed = Reason("") if reason is None else reason
        faults, excused = [], False
        for kind, most in (("LDL", allowed.loads), ("STL", allowed.stores)):
            count = role.spilled.get(kind, 0)
            excused |= 0 < count <= most
            if count > most:
                faults.append(f"{count} {kind} in a loop")
        if counterpart is not None:
            limit, ratio = 1.0 if role.kind == "softmax" else MORE, len(role.loops[0]) / counterpart
            excused |= limit < ratio <= allowed.most
            if ratio > max(limit, allowed.most if reason else 0):
                faults.append(f"{ratio:.2f} times the counterpart's instructions")
        rows.append(Row(role, counterpart, faults, allowed.text if excused else ""))
    return rows


def reason_of(kernel: Kernel, role: str) -> Reason | None:
    """The most special one."""
    config, version = kernel.config, ".".join(triton.__version__.split(".")[:2])
    windowed = getattr(config, "left", False) or getattr(config, "right", False)
    narrow = getattr(config, "itemsize", 2) == 1
    redoes = getattr(config, "redoes", False)
    for special in ["redoes"] * bool(redoes) + ["window"] * windowed + ["e4m3"] * narrow + [version]:
        if found := REASONS.get((kernel.family, role, special)):
            return found
    return REASONS.get((kernel.family, role))


def serialised(kernel: Kernel, arch: str) -> list[str]:
    """Rule 4, of a kernel with wgmma."""
    return complaints(kernel.made.asm["ptx"], f"{arch}a") if re.search("wgmma", kernel.made.asm["ptx"]) else []


def assert_within_rules(kernel: Kernel, arch: str, which: Pass, peers: Peers) -> None:
    """Rules 1 to 3.

    Raises:
        AssertionError: with every fault.
    """
    rows = look_at(kernel, arch, which, peers)
    faults = kernel.budget_faults() + [f"{row.role.name}: {fault}" for row in rows for fault in row.faults]
    assert not faults, f"{kernel.family} for {arch}: " + "; ".join(faults)
