"""The Blackwell forward on the emulator: values, races, fences and deadlocks, in many orders."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedTensor, attend, attend_fp8, dequantize_fp8, quantize_fp8
from jaggedtensor.kernels.blackwell.attention_fwd import config as configuration
from jaggedtensor.kernels.blackwell.attention_fwd import launch
from jaggedtensor.kernels.blackwell.plan import plan_forward
from jaggedtensor.kernels.emulator import ORDERS, emulate
from jaggedtensor.ops import fp8
from jaggedtensor.ops.attention import _window
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import UNLIMITED, AttentionArgs, AttentionProblem, Device
from jaggedtensor.testing import AttentionCase
from jaggedtensor.testing.budgets import assert_within_budget
from jaggedtensor.testing.guards import poison_free_memory
from jaggedtensor.testing.mutants import load_module, schedules, score

FAMILY = Path(__file__).parent / "families" / "blackwell_forward.py"
family = load_module(str(FAMILY))
Case, B, P, J = family.Case, family.B, family.P, family.J
SEEDS = 3
PER = ("head", "tensor", "head")
ASKING = ["streams of two heads, groups of two", "wide, of a jagged query, causal", "tiles", "tiles, causal"]
CASES = {
    "streams": Case((150, 0, 600, 1, 300, 129), processors=2),
    "streams of two heads, groups of two": Case((129, 5, 513), q_len=37, kv_heads=2, group=2),
    "streams with a peak that grows": Case((700, 0, 3), spread=6.0, dtype=torch.bfloat16),
    "streams, scores past 2 ** 27": Case((700, 0, 3), spread=1e4, key_spread=5e3),
    "streams, value dimension of its own": Case((65, 400), dim=72, value_dim=40, dtype=torch.bfloat16, q_len=5),
    "streams of each sequence's own query, causal": Case((300, 0, 70, 1), kind=P, q_len=100, right=0),
    "streams, block mask": Case((900, 0, 300, 1), q_lengths=(300, 3, 130, 2), kind=J, masked=True),
    "wide": Case((200, 0, 64, 1, 130), q_len=70, dim=256, value_dim=256, spread=2.0),
    "wide, of a jagged query, causal": Case((300, 70), q_lengths=(150, 3), kind=J, dim=192, value_dim=128, right=0),
    "wide, window, groups of three": Case(
        (300, 1), q_lengths=(50, 3), kind=J, dim=256, value_dim=136, group=3, left=90
    ),
    "tiles": Case((0, 260, 1, 390), q_lengths=(5, 140, 3, 257), kind=J),
    "tiles of a broadcast query": Case((130, 0, 5, 520), q_len=256, processors=2),
    "tiles, causal": Case((300, 0, 420, 1), q_lengths=(300, 4, 150, 7), kind=J, right=0, group=2, kv_heads=1),
    "tiles, window": Case((700, 0, 1), q_lengths=(400, 0, 3), kind=J, left=100, right=30),
    "tiles, scores past 2 ** 27": Case((300, 3), q_lengths=(140, 1), kind=J, spread=1e4, key_spread=5e3),
    "tiles, block mask, causal": Case((700, 129), q_lengths=(300, 2), kind=J, group=2, masked=True, right=0),
    "tiles, groups of three": Case((200, 1), q_lengths=(100, 2), kind=J, group=3, spread=5.0),
    "streams in 8 bits, groups of three": Case(
        (200, 0, 5), kv_heads=2, group=3, q_len=5, spread=3.0, dtype=torch.bfloat16, quantised=True
    ),
    "streams in 8 bits, scores past 2 ** 23": Case((300, 3), q_len=5, spread=1e4, key_spread=5e3, quantised=True),
    "tiles in 8 bits, causal": Case((260, 0, 1), q_lengths=(150, 3, 1), kind=J, right=0, dim=128, quantised=True),
    "wide in 8 bits": Case((200, 0, 1), q_len=70, dim=256, value_dim=256, spread=2.0, quantised=True),
}

# Rows that keep the peak of their first block: how many tiles stray from it is known.
ANCHORED = {
    "tiles": Case((0, 260, 1, 390), q_lengths=(5, 140, 3, 257), kind=J, redone=0),
    "heads of 128": Case((300, 0, 130, 1), q_lengths=(257, 3, 1, 9), kind=J, dim=128, value_dim=72, redone=0),
    "a broadcast query, two heads": Case((130, 0, 5, 520), q_len=256, kv_heads=2, dtype=torch.bfloat16, redone=0),
    "peaks that grow within the limit": Case(
        (420, 0, 1), q_lengths=(300, 3, 1), kind=J, dtype=torch.bfloat16, spread=5.0, growth=2.0, redone=0
    ),
    "peaks that grow past it": Case(
        (420, 0, 128, 1, 300), q_lengths=(300, 4, 9, 1, 130), kind=J, growth=60.0, dtype=torch.bfloat16, redone=3
    ),
    "weights past fp16": Case((420, 0, 128, 1), q_lengths=(300, 4, 9, 7), kind=J, growth=9.0, processors=1, redone=2),
    "lane 0 strays": Case((420, 7), q_lengths=(256, 3), kind=J, growth=60.0, quiet=(128, 256), redone=1),
    "lane 1 strays": Case((420, 7), q_lengths=(256, 3), kind=J, growth=60.0, quiet=(0, 128), redone=1),
    "first blocks of one key": Case((257, 0, 385, 1), q_lengths=(200, 1, 140, 3), kind=J, dtype=torch.bfloat16),
    "causal": Case((300, 0, 420, 1), q_lengths=(300, 4, 150, 7), kind=J, right=0, group=2),
    "causal, more queries than keys": Case((100, 3, 0, 260), q_lengths=(400, 150, 3, 300), kind=J, right=0),
    "window, rows whose first block hides all": Case((700, 0, 1), q_lengths=(400, 0, 3), kind=J, left=100, right=30),
    "causal, a row whose anchor is 0, and its scores far below": family.MUTATED[2][0],
    "causal, rows with their first keys in the second block": family.MUTATED[3][0],
    "window, groups of three": Case((500, 1), q_lengths=(200, 2), kind=J, left=90, right=300, group=3, spread=3.0),
    "scores past 2 ** 27": Case((300, 3), q_lengths=(140, 1), kind=J, spread=1e4, key_spread=5e3),
}
NOT_FINITE = [("q", math.nan), ("k", math.inf), ("k", -math.inf), ("v", math.nan), ("v", math.inf), ("v", 3e38)]
DEVICE = Device("cuda", (10, 0), 2, 227 << 10)


def launched(k_lengths, query, scale=0.1, **options):
    sizes = dict(q_length=100, q_lengths=(), dim=64, value_dim=64, dtype=torch.float16, k_slack=3, q_slack=2)
    return AttentionCase(k_lengths, query=query, **sizes | options), scale


LAUNCHED = {
    "broadcast, two heads": launched((130, 0, 64, 300), B),
    "a negative scale": launched((130, 0, 64), P, scale=-0.2, q_length=9),
    "a scale of 0": launched((130, 0, 64), J, scale=0.0, q_lengths=(150, 3, 20)),
    "causal, more queries than keys": launched((30, 0, 64, 65), J, q_lengths=(200, 300, 5, 300), causal=True),
    "dimensions that differ": launched((130, 0, 64), J, q_lengths=(150, 3, 20), dim=40, value_dim=72),
    "cut between CTAs": launched((2200,), B),
    "cut, window, three heads for one": launched((2100, 3, 64), P, q_length=50, heads=3, kv_heads=1, window=(1500, 5)),
    "cut, wide": launched((1300,), B, dim=256, value_dim=256),
    "no key at all": launched((0, 0), B),
    "nothing at all": launched((0, 0), J, q_lengths=(0, 0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_are_right_under_every_order(case):
    for order, seed in schedules(1 if case.quantised else SEEDS):  # 8 bits change no order
        family.run(case, order, seed)


@pytest.mark.parametrize("case", ANCHORED.values(), ids=ANCHORED.keys())
def test_anchored_rows_and_what_they_stray_in(case):
    for order, seed in schedules(1):
        family.run(case, order, seed, anchored=1)


def test_anchored_rows_in_larger_pieces():
    for order, seed in schedules(1):
        family.run(ANCHORED["tiles"], order, seed, anchored=1, pieces=4)


def test_lanes_that_have_not_strayed_are_left_alone():
    """Of the tiles that the second launch passes over it stores nothing."""
    for name in ("tiles", "peaks that grow past it"):
        reports = []
        family.run(ANCHORED[name], "round_robin", 0, anchored=1, reports=reports)
        stores = [sum(event.kind == "tma store" for event in report.events) for report in reports]
        assert stores[0] > stores[1]
        assert (stores[1] > 0) == (name != "tiles")


@pytest.mark.parametrize(("operand", "bad"), NOT_FINITE)
def test_what_is_not_finite_is_done_again(operand, bad, monkeypatch):
    """As the kernel that follows the maximum does it, to the bit; other sequences are as ever."""
    case = AttentionCase((300, 0, 140), query=J, q_lengths=(140, 3, 5), dim=64, value_dim=64, dtype=torch.bfloat16)
    q, k, v = (x.values().detach().clone() for x in case.inputs())
    {"q": q, "k": k, "v": v}[operand][100:103] = bad
    query, keys, _ = case.inputs()
    offsets, q_offsets = keys.offsets(), query.offsets()
    problem = replace(AttentionProblem.of(q, k, v, q_offsets, UNLIMITED, UNLIMITED, False), device=DEVICE)
    schedule = plan_forward(problem, keys.layout, query.layout, k.shape[0], q.shape[0])
    args = AttentionArgs(problem, q, k, v, q_offsets, offsets, 0.1, True, False, schedule)
    found = []
    for enough in (-math.inf, math.inf):
        monkeypatch.setattr(configuration, "ENOUGH", enough)
        reports = emulated_launches(monkeypatch)
        found.append(launch.forward(args))
        assert len(reports) == (2 if enough < 0 else 1)
    for anchored, exact in zip(*found, strict=True):
        torch.testing.assert_close(anchored[:140], exact[:140], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(anchored[140:], exact[140:], rtol=1e-2, atol=1e-2)


def emulated_launches(monkeypatch, order="round_robin", seed=0):
    """A list that gets the reports of what `launch` launches."""
    reports = []

    class Emulated:
        def __init__(self, kernel, options):
            self.kernel, self.options = kernel, options

        def launch(self, programs, descriptors, args, aligned):
            made = [make() for _, make in descriptors]
            run = dict(target="sm100", order=order, seed=seed)
            reports.append(emulate(self.kernel, (programs,), *made, *args, **self.options, **run))

    monkeypatch.setattr(launch, "Variant", Emulated)
    monkeypatch.setattr(launch, "_CALLS", {})
    poison_free_memory(1 << 20, "cpu")
    return reports


@pytest.mark.parametrize("name", ASKING)
def test_ctas_that_ask_for_their_tiles(name):
    for order, seed in schedules(SEEDS):
        family.run(CASES[name], order, seed, answers=2)


def test_a_lane_skips_the_blocks_that_only_the_other_sees():
    """Of two blocks of keys, causal, rows 0..127 see one: 3 of 4 scores, and sums in 3 parts each."""
    report = family.run(Case((256,), q_lengths=(256,), kind=J, right=0, processors=1), "round_robin", 0)
    assert sum(event.kind == "mma" for event in report.events) == 3 + 3 * 3


@pytest.mark.parametrize("stages", [3, 4, 8])
def test_rings_of_any_depth(stages):
    for case in (Case((700, 3, 1)), Case((300, 1), q_lengths=(200, 1), kind=J)):
        for order, seed in schedules(1):
            family.run(case, order, seed, kv_stages=stages)


@pytest.mark.parametrize("chosen", [{"early": 0}, {"polynomials": 0}, {"polynomials": 4}, {"pieces": 8}], ids=str)
def test_other_ways_to_publish_and_exponentiate(chosen):
    for case in (Case((300, 1), q_lengths=(200, 1), kind=J), Case((300, 1, 70), q_len=9)):
        for order, seed in schedules(1):
            family.run(case, order, seed, **chosen)


@st.composite
def drawn_cases(draw):
    """Batches of a few blocks, with an empty and a one-token sequence somewhere, and every feature beside any other."""
    others = draw(st.lists(st.integers(0, 400), min_size=1, max_size=2))
    lengths = tuple(draw(st.permutations([0, 1, *others])))
    kind, group = draw(st.sampled_from([B, P, J])), draw(st.sampled_from([1, 1, 2, 3]))
    q_lengths = tuple(draw(st.integers(0, 300)) for _ in lengths) if kind is J else ()
    dim, value_dim = draw(st.sampled_from([(64, 64), (64, 64), (128, 128), (40, 72), (192, 128)]))
    limits = st.sampled_from([UNLIMITED, UNLIMITED, 0, 60, 200])
    return Case(
        lengths,
        q_len=draw(st.sampled_from([1, 33, 128, 129])),
        q_lengths=q_lengths,
        kind=kind,
        kv_heads=draw(st.sampled_from([1, 2])),
        group=group,
        dim=dim,
        value_dim=value_dim,
        left=draw(limits),
        right=draw(limits),
        processors=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        spread=draw(st.sampled_from([1.0, 5.0])),
        quantised=dim % 16 == value_dim % 16 == 0 and draw(st.booleans()),
        masked=draw(st.booleans()),
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=drawn_cases(), order=st.sampled_from(ORDERS), seed=st.integers(0, 100))
def test_any_batch_with_any_features(case, order, seed):
    family.run(case, order, seed)


@pytest.mark.parametrize("name", [name for name, (case, _) in LAUNCHED.items() if case.query is J])
def test_the_launcher_anchors_rows_where_there_is_work_enough(name, monkeypatch):
    monkeypatch.setattr(configuration, "ENOUGH", -math.inf)
    run_launched(name, monkeypatch, launches=2)


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_launcher_fills_copies_and_turns_signs(name, monkeypatch):
    run_launched(name, monkeypatch, launches=1 + name.startswith("cut"))


def run_launched(name, monkeypatch, launches):
    """Within the budget of float64, with what is free poisoned, for operands as users have them."""
    case, scale = LAUNCHED[name]
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    layout = query.layout if isinstance(query, JaggedTensor) else None
    k, v = keys.values().detach(), values.values().detach()
    left, right = _window(case.causal, case.window)
    q_offsets = None if layout is None else layout.offsets()
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, False)
    problem = replace(problem, device=Device("cuda", (10, 0), 6 if name.startswith("cut") else 2, 227 << 10))
    schedule = plan_forward(problem, keys.layout, layout, k.shape[0], q.shape[0])
    v_apart = v.transpose(1, 2).contiguous().transpose(1, 2)  # columns apart: TMA cannot address them
    k_odd = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view_as(k).copy_(k)  # nor this: 2 bytes past 16
    options = dict(scale=scale, left=left, right=right)
    expected = attend_reference(q.double(), k.double(), v.double(), q_offsets, keys.offsets(), **options)
    close = attend_reference(q, k, v, q_offsets, keys.offsets(), **options)
    for order, seed in schedules(1):
        reports = emulated_launches(monkeypatch, order, seed)
        out, lse = launch.forward(
            AttentionArgs(problem, q, k_odd, v_apart, q_offsets, keys.offsets(), scale, True, False, schedule)
        )
        for report in reports:
            report.raise_if_bad()
        assert len(reports) == (launches if any(case.k_lengths) else 0)
        assert_within_budget(out, close[0], expected[0], "out")
        assert_within_budget(lse, close[1].float(), expected[1], "lse")


@pytest.mark.parametrize(
    ("k_lengths", "kind", "options"),
    [
        ((130, 0, 64), P, {"scale": -0.2, "q_length": 9, "heads": 4}),
        ((30, 0, 64, 65), J, {"q_lengths": (200, 300, 5, 300), "causal": True}),
        ((2200,), B, {}),
    ],
    ids=["a negative scale, groups of two", "causal, more queries than keys", "cut between CTAs"],
)
def test_attention_in_8_bits_launches_its_kernel(k_lengths, kind, options, monkeypatch):
    """Through `attend_fp8`, as on a Blackwell GPU: within what rounding of the weights may do, and lse in fp32."""
    case, scale = launched(k_lengths, kind, **{"scale": 0.1} | options)
    inputs = [x.detach() for x in case.inputs()]
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize_fp8(x, per) for x, per in zip(inputs, PER, strict=True))
    wide = [dequantize_fp8(*x, torch.float64) for x in ((q8, q_scale), (k8, k_scale), (v8, v_scale))]
    sizes = [wide[0], wide[1], wide[2].map_values(torch.abs)]
    exact, exact_lse = attend(*wide, scale=scale, causal=case.causal, return_lse=True)
    size = attend(*sizes, scale=scale, causal=case.causal)
    processors = 6 if len(k_lengths) == 1 else 2
    device = Device("cuda", (10, 0), processors, 227 << 10)
    monkeypatch.setattr(fp8, "AttentionProblem", Placed(device))
    reports = emulated_launches(monkeypatch)
    scales = (q_scale, k_scale, v_scale)
    out, lse = attend_fp8(
        q8, k8, v8, scales=scales, scale=scale, causal=case.causal, return_lse=True, backend="blackwell"
    )
    for report in reports:
        report.raise_if_bad()
    assert len(reports) == (2 if len(k_lengths) == 1 else 1)
    out, exact, size = (x.values() if isinstance(x, JaggedTensor) else x for x in (out, exact, size))
    assert out.dtype == torch.bfloat16
    error = (out.double() - exact).abs()
    rows = slice(0, sum(case.q_lengths)) if kind is J else slice(None)
    assert (error <= size / 16 + 2e-2)[rows].all()
    assert error[rows].norm() < 0.04 * exact[rows].norm()
    torch.testing.assert_close(lse.double()[rows], exact_lse[rows], rtol=1e-5, atol=1e-3)


class Placed:
    """Problems as they would be on another device."""

    def __init__(self, device):
        self.device = device

    def of(self, *args):
        return replace(AttentionProblem.of(*args), device=self.device)


def test_a_few_mutants_are_found():
    """A sample; `make mutants` takes them all."""
    result = score(str(FAMILY), schedules(1), jobs=1, limit=60, only=3)
    assert not result.right.kind, str(result)
    assert not result.survivors, str(result)
    assert not result.mistaken, str(result)
