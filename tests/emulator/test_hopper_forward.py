"""The Hopper forward on the emulator: values, races, fences and deadlocks, in many orders of its roles."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.hopper.attention_fwd import launch
from jaggedtensor.kernels.hopper.attention_fwd.config import budget, select
from jaggedtensor.kernels.hopper.plan import lacks, plan_forward
from jaggedtensor.ops.attention import _window
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import AttentionArgs, AttentionProblem, Device, QueryKind
from jaggedtensor.testing import AttentionCase
from jaggedtensor.testing.budgets import assert_within_budget
from jaggedtensor.testing.guards import poison_free_memory
from jaggedtensor.testing.mutants import schedules

SEEDS = 2
B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED


def case_of(
    k_lengths, query=B, q_length=128, q_lengths=(), dim=64, value_dim=None, heads=1, kv_heads=1, processors=2, **options
):
    settings = dict(dtype=torch.float16, k_slack=3, q_slack=2) | options
    sizes = dict(dim=dim, value_dim=value_dim or dim, heads=heads, kv_heads=kv_heads)
    case = AttentionCase(k_lengths, query=query, q_length=q_length, q_lengths=q_lengths, **sizes, **settings)
    return case, processors


# Few CTAs, so that each has several tiles; KV blocks are 64 keys for a short broadcast query, else 128.
CASES = {
    "broadcast, two heads": case_of((130, 0, 64, 65, 300), heads=2, kv_heads=2),
    "longer than the rings are deep": case_of((900, 1)),
    "one consumer": case_of((130, 0, 64), q_length=21),
    "an empty part, heads in groups of two": case_of((130, 0, 64), q_length=70, heads=4, kv_heads=2),
    "three heads for one": case_of((130, 0, 64), J, q_lengths=(50, 3, 30), heads=3),
    "jagged": case_of((130, 0, 64, 265), J, q_lengths=(200, 3, 0, 64), dim=128),
    "last blocks over half full": case_of(
        (128, 70, 0, 250), J, q_lengths=(140, 130, 3, 64), dim=128, heads=2, kv_heads=2, processors=1
    ),
    "causal, more queries than keys": case_of((30, 0, 64, 65), J, q_lengths=(200, 300, 5, 300), causal=True),
    "causal, one query for all": case_of((30, 0, 64), q_length=200, heads=4, kv_heads=2, causal=True),
    "window": case_of((500, 0, 64), P, q_length=70, heads=4, kv_heads=2, window=(150, 5)),
    "256": case_of((130, 0, 64), q_length=70, dim=256),
    "256 and 64": case_of((130, 0, 64), J, q_lengths=(150, 3, 200), dim=256, value_dim=64),
    "three blocks of one query, narrow values": case_of((130, 0, 64, 265, 9), q_length=300, dim=128, value_dim=64),
    "dimensions that differ": case_of((130, 0, 64), J, q_lengths=(150, 3, 20), dim=40, value_dim=72),
    "nothing at all": case_of((0, 0)),
    "cut between CTAs": case_of((1500,), q_length=100),
    "cut, of many": case_of((3000, 3, 0, 40), q_length=10, heads=4, kv_heads=2, processors=6),
    "cut, and a window": case_of((2500, 0, 64), q_length=140, heads=3, causal=True, processors=11),
}


class Ran(NamedTuple):
    """What a forward came to."""

    launches: int
    flags: torch.Tensor | None  # of tiles and consumers
    out: torch.Tensor
    lse: torch.Tensor


def run(case_and_processors, monkeypatch, order, seed, mask=None, change=None, redo=True, **chosen):
    """out and lse from the emulator, within budget of float64; what is not written is NaN.

    A `change` of q, k and v may make results NaN or inf: those are not compared, but returned. Without `redo` the
    second launch is left out.
    """
    case, processors = case_and_processors
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    layout = query.layout if isinstance(query, JaggedTensor) else None
    q_offsets = None if layout is None else layout.offsets()
    k, v = keys.values().detach(), values.values().detach()
    left, right = _window(case.causal, case.window)
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, False, mask is not None)
    problem = replace(problem, device=Device("cuda", (9, 0), processors, 227 << 10))
    assert not lacks(problem)
    if change is not None:
        change(q, k, v)
    config = select(problem, **chosen)
    schedule = plan_forward(problem, keys.layout, layout, k.shape[0], q.shape[0], mask, config)
    reports, flags = [], []

    class Emulated:
        def __init__(self, kernel, options):
            self.kernel = kernel

        def launch(self, programs, descriptors, args, aligned):
            if args[-1].redoes and not redo:
                return
            if args[7] is not None and not flags:  # those of tiles that there are
                flags.append(args[7][: int(args[9][-1]) * config.flags])
            blocks = [make() for _, make in descriptors]
            settings = dict(num_warps=4, order=order, seed=seed)
            reports.append(emulate(self.kernel, (programs,), *blocks, *args, **settings))

    monkeypatch.setattr(launch, "Variant", Emulated)
    monkeypatch.setattr(launch, "_CALLS", {})
    monkeypatch.setattr(launch, "MUCH", 0)
    poison_free_memory(1 << 20, "cpu")
    scale = q.shape[-1] ** -0.5
    args = AttentionArgs(problem, q, k, v, q_offsets, keys.offsets(), scale, True, False, schedule, mask)
    out, lse = launch.forward(args, config)
    for report in reports:
        report.raise_if_bad()
        assert report.shared_peak <= budget(config.ctas)
    if mask is None and change is None:
        exact, low = case.exact(), case.low()
        expected, close = (exact.out, exact.lse), (low.out, low.lse)
    else:
        options = dict(scale=scale, left=left, right=right, block_mask=mask)
        expected = attend_reference(q.double(), k.double(), v.double(), q_offsets, keys.offsets(), **options)
        close = attend_reference(q, k, v, q_offsets, keys.offsets(), **options)
    if expected[0].isfinite().all():
        assert_within_budget(out, close[0], expected[0], "out")
        assert_within_budget(lse, close[1].float(), expected[1], "lse")
    return Ran(len(reports), flags[0] if flags else None, out, lse)


@pytest.mark.parametrize("name", CASES)
def test_values_are_right_under_every_order(name, monkeypatch):
    for order, seed in schedules(SEEDS):
        ran = run(CASES[name], monkeypatch, order, seed, anchored=False)
        assert ran.launches == (0 if name == "nothing at all" else 2 if name.startswith("cut") else 1)


ANCHORED = [
    "broadcast, two heads",
    "three heads for one",
    "jagged",
    "last blocks over half full",
    "three blocks of one query, narrow values",
    "causal, more queries than keys",  # whose rows without any key have their tiles done again
    "nothing at all",
    "cut, of many",
]


@pytest.mark.parametrize("name", ANCHORED)
def test_rows_that_keep_the_maximum_of_their_first_block(name, monkeypatch):
    for order, seed in schedules(1):
        ran = run(CASES[name], monkeypatch, order, seed, anchored=True)
        assert ran.launches == (0 if name == "nothing at all" else 3 if name.startswith("cut") else 2)
        assert ran.flags is None or "causal" in name or not ran.flags.any()


def test_tiles_of_a_head_are_dealt_together_where_queries_are_jagged():
    keys = JaggedLayout.from_lengths(torch.tensor([300, 0, 200]))
    device = Device("cuda", (9, 0), 1, 227 << 10)
    for query, heads in ((J, [0] * 5 + [1] * 5), (P, [0, 1] * 6)):
        layout, q_len = (keys, None) if query is J else (None, 300)
        problem = AttentionProblem(query, q_len, 2, 2, 128, 128, torch.bfloat16, device)
        tiles, offsets, *_ = plan_forward(problem, keys, layout, 500, 500 if query is J else 900)
        assert tiles[: int(offsets[-1]), 1].tolist() == heads


def grown(begin, end, head, factor):
    """Keys of one head that weigh more than those of their sequence's last block, which is looked at first."""

    def change(q, k, v):
        k[begin:end, head] *= factor

    return change


def grown_with_large_values(q, k, v):
    """Row sums stay in range, sums of weights times values do not."""
    k[3:6, 0] *= 9
    v[:] *= 2.0**103


def shrunk(q, k, v):
    """Scores of -50, far below the anchor of a row that sees nothing in the first block."""
    q[:], k[:] = 2.5, -2.5


STRAYING = {
    "fp16": (case_of((130, 0, 64, 400), q_length=200, heads=2, kv_heads=2), grown(194, 197, 0, 12)),
    "bf16": (
        case_of((130, 0, 64, 400), q_length=200, heads=2, kv_heads=2, dtype=torch.bfloat16),
        grown(194, 197, 0, 60),
    ),
    "jagged": (case_of((400, 0, 64, 265), J, q_lengths=(200, 3, 70, 64), dim=128), grown(3, 5, 0, 9)),
    "values": (case_of((400, 0, 64), J, q_lengths=(130, 3, 70), dtype=torch.bfloat16), grown_with_large_values),
    "groups": (case_of((400, 64), J, q_lengths=(100, 70), heads=6, kv_heads=2), grown(30, 31, 0, 14)),
    "cut": (case_of((3000, 3, 0, 40), q_length=70, heads=4, kv_heads=2, processors=6), grown(1000, 1003, 0, 12)),
    "causal": (case_of((200, 64), J, q_lengths=(150, 33), causal=True), shrunk),
}


@pytest.mark.parametrize("name", STRAYING)
def test_rows_that_stray_from_their_anchor_are_done_again(name, monkeypatch):
    case, change = STRAYING[name]
    for order, seed in schedules(1):
        ran = run(case, monkeypatch, order, seed, change=change, anchored=True)
        assert 0 < ran.flags.count_nonzero() < ran.flags.numel()
    with pytest.raises(AssertionError, match="budget"):  # so it is the second launch that makes it right
        run(case, monkeypatch, *schedules(1)[0], change=change, redo=False, anchored=True)


@pytest.mark.parametrize("case", ["broadcast, two heads", "jagged", "causal, more queries than keys"])
def test_tiles_that_begin_by_themselves(case, monkeypatch):
    for order, seed in schedules(1):
        run(CASES[case], monkeypatch, order, seed, crosses=False)


def test_consumers_of_128_rows(monkeypatch):
    for order, seed in schedules(1):
        run(CASES["broadcast, two heads"], monkeypatch, order, seed, rows=128, consumers=1, ctas=2)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_block_masks(options, monkeypatch):
    case = case_of((700, 0, 300), J, q_lengths=(300, 4, 129), **options)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(3, -(-300 // MASK_BLOCK), -(-700 // MASK_BLOCK), generator=generator) < 0.6
    for order, seed in schedules(1):
        run(case, monkeypatch, order, seed, mask)
