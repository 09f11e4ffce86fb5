"""The Hopper backward for a broadcast query on the emulator: values, races, fences and deadlocks, in many orders."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.emulator import ORDERS, emulate
from jaggedtensor.kernels.hopper.attention_bwd_broadcast import config as configuration
from jaggedtensor.kernels.hopper.attention_bwd_broadcast.device import broadcast_kernel, held_back
from jaggedtensor.kernels.hopper.plan import plan_broadcast_backward
from jaggedtensor.kernels.shared.dsl import gl, gluon
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import schedules

SEEDS = 3


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    q_len: int = 128
    kv_heads: int = 1
    group: int = 1
    dim: int = 64
    value_dim: int = 64
    processors: int = 2
    dtype: torch.dtype = torch.float16
    slack: int = 3
    with_grad_lse: bool = True

    @property
    def problem(self) -> AttentionProblem:
        device = Device("cuda", (9, 0), self.processors, 227 << 10)
        heads = self.kv_heads * self.group
        return AttentionProblem(
            QueryKind.BROADCAST, self.q_len, heads, self.kv_heads, self.dim, self.value_dim, self.dtype, device
        )


def reference(q, k, v, grad_out, grad_lse, offsets, scale):
    """out, lse, dq, dk and dv in float64; out and grad_out `[B, Lq, Hq, Dv]`."""
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    group, batch = q.shape[1] // k.shape[1], grad_out.shape[0]
    lse = torch.full((batch, q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (grad_out, q, k, v))
    for b in range(batch):
        rows = slice(offsets[b], offsets[b + 1])
        if rows.start == rows.stop:
            continue
        for h in range(q.shape[1]):
            key, value = k[rows, h // group], v[rows, h // group]
            score = scale * q[:, h] @ key.T
            lse[b, h] = score.logsumexp(1)
            p = (score - lse[b, h, :, None]).exp()
            out[b, :, h] = p @ value
            delta = (out[b, :, h] * grad_out[b, :, h]).sum(1) - grad_lse[b, h]
            ds = p * (grad_out[b, :, h] @ value.T - delta[:, None])
            dv[rows, h // group] += p.T @ grad_out[b, :, h]
            dk[rows, h // group] += scale * ds.T @ q[:, h]
            dq[:, h] += scale * ds @ key
    return out, lse, dq, dk, dv


def run(case: Case, order: str, seed: int, together: int = 1, **changes):
    """The kernel's results against float64; NaN wherever nobody should look, and in all that is to be written."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype)

    problem = case.problem
    assert not configuration.lacks(problem)
    config = replace(configuration.select(problem), **changes)
    layout = JaggedLayout.from_lengths(torch.tensor(case.lengths))
    batch, tokens, heads = len(case.lengths), sum(case.lengths), problem.q_heads
    offsets, rows = layout.offsets(), tokens + case.slack
    q = normal(case.q_len, heads, case.dim)
    k, v = normal(rows, case.kv_heads, case.dim), normal(rows, case.kv_heads, case.value_dim)
    grad_out = normal(batch, case.q_len, heads, case.value_dim)
    scale = 1 / math.sqrt(case.dim)
    grad_lse = torch.randn(batch, heads, case.q_len, generator=generator)
    if not case.with_grad_lse:
        grad_lse.zero_()
    out, lse, dq, dk, dv = reference(q, k, v, grad_out, grad_lse, offsets.tolist(), scale)
    k[tokens:], v[tokens:] = math.nan, math.nan
    got_dk, got_dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    tiles, worker_offsets, merges = plan_broadcast_backward(problem, layout, rows)
    programs = (worker_offsets.shape[0] - 1) * config.parts
    slots = config.workers + case.kv_heads - 1
    shares = torch.full((slots, config.parts * configuration.ROWS, config.block_d), math.nan)
    q_rows, n = configuration.ROWS // config.group, config.block_n
    blocks = (
        (q, q_rows, config.group, config.block_d),
        (k, n, 1, config.block_d),
        (v, n, 1, config.block_dv),
        (grad_out.flatten(0, 1), q_rows, config.group, config.block_dv),
        (got_dk, n, 1, config.block_d),
        (got_dv, n, 1, config.block_dv),
    )
    report = emulate(
        broadcast_kernel,
        (programs,),
        *(ragged(*block)[1]() for block in blocks),
        lse.float(),
        grad_lse if case.with_grad_lse else None,
        out.to(case.dtype),
        shares,
        torch.zeros(2 * programs, dtype=torch.int32),
        tiles,
        worker_offsets,
        offsets,
        case.q_len,
        scale * math.log2(math.e),
        scale,
        config,
        num_warps=4,
        order=order,
        seed=seed,
        together=together,
    )
    report.raise_if_bad()
    assert report.shared_peak <= configuration.SHARED_MEMORY
    parts = [slice(slot, slot + count) for slot, count in merges[:, 4:].tolist()]
    total = torch.stack([shares[part].sum(0) for part in parts])[:, : case.q_len * case.group]
    got_dq = total[:, :, : case.dim].unflatten(1, (case.q_len, case.group)).transpose(0, 1).flatten(1, 2)
    for name, got, wanted in (("dq", got_dq, dq), ("dk", got_dk[:tokens], dk), ("dv", got_dv[:tokens], dv)):
        wanted = wanted[: len(got)]
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 2e-2, f"{name}: {error}"
    slack = torch.cat((got_dk[tokens:].flatten(), got_dv[tokens:].flatten()))
    assert slack.isnan().all(), "rows past the last sequence were written"
    return report


CASES = {
    "tiles cut between two CTAs": Case((150, 0, 300, 1, 64)),
    "more CTAs than tiles": Case((70,), processors=4),
    "two heads, groups of two": Case((129, 5), q_len=37, kv_heads=2, group=2),
    "value dimension of its own": Case((65, 130), dim=72, value_dim=40, dtype=torch.bfloat16),
    "heads whose last sequence has one tile": Case((70, 3), q_len=37, kv_heads=3, group=2),
    "heads cut between two CTAs": Case((129, 0, 5, 70), q_len=20, kv_heads=3, group=2),
    "one row": Case((200,), q_len=1, group=4, with_grad_lse=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_are_right_under_every_order(case):
    for order, seed in schedules(SEEDS):
        run(case, order, seed)
    for late in (False, True):
        for early in (False, True):
            run(case, "round_robin", 0, late=late, early=early)


@st.composite
def drawn_cases(draw):
    """Lengths about that of a tile, and heads that end anywhere in a CTA."""
    length = st.one_of(st.sampled_from((0, 1, 64, 65)), st.integers(2, 130))
    group = draw(st.sampled_from((1, 2, 8)))
    dim, value_dim = draw(st.sampled_from(((64, 64), (40, 72), (72, 40))))
    return Case(
        tuple(draw(st.lists(length, min_size=1, max_size=3).filter(any))),
        q_len=draw(st.sampled_from((1, 37, 128 // group, 128 // group + 1))),
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        dim=dim,
        value_dim=value_dim,
        processors=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from((torch.float16, torch.bfloat16))),
    )


# What fails is small as it is.
@settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
@given(drawn_cases(), st.sampled_from(ORDERS), st.integers(0, 100), st.booleans(), st.booleans())
def test_any_batch(case, order, seed, late, early):
    parts = -(-case.q_len * case.group // configuration.ROWS)  # which wait for each other
    run(case, order, seed, together=case.processors * parts if parts > 1 else 1, late=late, early=early)


LONG = Case((150, 0, 70, 300), q_len=300, kv_heads=3, processors=6)


def test_parts_of_a_long_query_add_up_in_their_order():
    """CTAs run one after the other here: what is told is that each adds to what the ones before have written."""
    run(LONG, "round_robin", 0)


def test_a_part_does_not_wait_forever_for_the_next_one():
    """Which comes only when the first has left, here: each part loses its patience once."""
    run(LONG, "round_robin", 0, lead=1, patience=3)


@gluon.jit
def hold_back_kernel(progress, seen, turn, patience, C: gl.constexpr):
    known, left = held_back(progress, turn, 0, patience, C)
    gl.store(seen, known)
    gl.store(seen + 1, left)


@pytest.mark.parametrize(
    ("turn", "patience", "known", "left"),
    [
        (7, 3, 0, 3),  # the lead may be one tile more: nothing is asked
        (8, 3, 5, 3),  # asked once, and three ahead
        (12, 3, 5, 3),
        (13, 3, 5, 0),  # too far ahead of one that does nothing
        (13, 0, 0, 0),  # as before: nothing is asked any more
    ],
)
def test_a_part_is_held_back_by_its_lead(turn, patience, known, left):
    config = replace(configuration.select(LONG.problem), lead=8, patience=3)
    progress, seen = torch.tensor([5], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    emulate(hold_back_kernel, (1,), progress, seen, turn, patience, config, num_warps=1).raise_if_bad()
    assert seen.tolist() == [known, left]


def test_rings_of_other_depths():
    for k_stages, v_stages, grad_stages in ((2, 1, 1), (2, 2, 2), (4, 4, 4)):
        for order, seed in schedules(1):
            case = Case((600, 3, 70), dim=64)
            for late in (False, True):
                stages = dict(k_stages=k_stages, v_stages=v_stages, grad_stages=grad_stages)
                run(case, order, seed, late=late, early=not late, **stages)


def run_some(order, seed):
    for name in ("tiles cut between two CTAs", "heads cut between two CTAs"):
        run(CASES[name], order, seed, late=True, early=False)
    if order == "round_robin":
        run(CASES[name], order, seed, grad_stages=1)
        run(LONG, order, seed, lead=1, patience=3)
        run(CASES["heads whose last sequence has one tile"], order, seed, late=False, early=True)


ONE_AT_A_TIME = "CTAs run one after the other on the emulator, so that the one before has written everything"
FAMILY = Family(
    "hopper backward of a broadcast query",
    runner=run_some,
    modules=("jaggedtensor.kernels.hopper.attention_bwd_broadcast.device",),
    equivalent={
        **{
            f"store_role: {change} tma.store_wait(0, read_only=False)": ONE_AT_A_TIME
            for change in ("delete", "one more in")
        },
        "make: delete gl.barrier()": "warps of a role run together on the emulator",
        "score_role: delete gl.barrier()": "it is never reached, see there",
        "make_role: delete gl.barrier()": "it is never reached, see there",
    },
)
