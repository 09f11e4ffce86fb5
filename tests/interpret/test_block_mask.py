"""Portable kernels, interpreted, under block masks: values and gradients against float64, blocks that are skipped."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, make_jagged, offsets_of
from jaggedtensor.testing.bounds import Call, check_attention
from jaggedtensor.testing.guards import guarded_allocations
from jaggedtensor.testing.launches import recorded_launches

KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
numpy.seterr(all="ignore")  # inf and NaN in lanes that a mask drops


def check(case):
    check_attention(case, "portable")


def case_of(kind, **options):
    settings = dict(
        query=kind, q_length=140, q_lengths=(140, 20, 3, 257), heads=2, kv_heads=2, dim=16, value_dim=24, seed=1,
        mask_share=0.5, k_slack=2, q_slack=2,
    )  # fmt: skip
    return AttentionCase((257, 0, 1, 130), **settings | options)


@st.composite
def cases(draw, kind):
    """At most 400 keys, in few heads: the interpreter is slow."""
    some = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 255, 257]), st.integers(0, 300))
    k_lengths = [*draw(st.lists(some, min_size=1, max_size=2)), *draw(st.sampled_from([[], [0], [1, 0]]))]
    q_lengths = [draw(st.one_of(st.just(n), some)) for n in k_lengths]
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 1)]))
    side = st.one_of(st.none(), st.integers(0, 200))
    return case_of(
        kind,
        q_length=draw(st.sampled_from([1, 20, 64, 129, 150])),
        q_lengths=tuple(q_lengths),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16])),
        value_dim=draw(st.sampled_from([8, 24])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(side, side))),
        mask_share=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
        mask_for_all=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    ).with_options(k_lengths=tuple(k_lengths))


@kinds
@settings(max_examples=6)
@given(data=st.data())
def test_any_batch_under_any_mask(kind, gpu, data):
    case = data.draw(cases(kind))
    with gpu(data.draw(st.sampled_from([1, 3, 132]), label="processors")):
        check(case)


@kinds
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (130, 7)}], ids=str)
def test_every_kind_of_query_and_window(kind, options):
    check(case_of(kind, dtype=torch.bfloat16, **options))


@kinds
@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (5, 1)], ids=str)
def test_rows_of_a_group_of_heads_stay_within_a_block_of_the_mask(heads, kind):
    """128 queries of 3 or 5 heads are 384 or 640 packed rows, which blocks of 128 rows divide."""
    check(case_of(kind, q_length=130, heads=heads[0], kv_heads=heads[1], mask_for_all=True).with_options(
        k_lengths=(129, 0, 20, 257), q_lengths=(130, 0, 3, 129)
    ))  # fmt: skip


@pytest.mark.parametrize("processors", [1, 4, 132])
@pytest.mark.parametrize("length", [20, 300])
def test_a_broadcast_query_of_one_block_and_of_several(length, processors, gpu):
    with gpu(processors):
        check(case_of(QueryKind.BROADCAST, q_length=length))


@kinds
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_masks_of_nothing_and_of_everything(kind, share):
    with guarded_allocations():
        got = check_attention(case_of(kind, q_length=20, mask_share=share), "portable")
    if share == 0:
        assert (got.lse == -math.inf).all()
        assert not any(x.any() for x in (got.out, *got[2:]))


@kinds
def test_a_batch_without_empty_sequences_is_filled_all_the_same(kind):
    """There, without a mask, every row is written by a kernel."""
    case = case_of(kind, q_length=20, k_slack=0, q_slack=0, seed=0).with_options(k_lengths=(3, 130), q_lengths=(3, 130))
    with guarded_allocations():
        check_attention(case.with_options(mask_share=0.0), "portable")
        check_attention(case, "portable")


@kinds
def test_a_mask_of_inference_mode_may_change(kind):
    """Nobody counts its changes, so nothing is kept for it."""
    case = case_of(kind, q_length=20)
    q, k, v = case.inputs()
    with torch.inference_mode():
        mask = case.block_mask()
        for _ in range(2):
            got = k.attend(q, v, block_mask=mask, backend="portable")
            wanted = k.attend(q, v, block_mask=mask, backend="reference")
            got, wanted = (x.values() if isinstance(x, JaggedTensor) else x for x in (got, wanted))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            mask.logical_not_()


@kinds
def test_blocks_that_nobody_sees_are_skipped_and_their_memory_is_not_read(kind):
    """Keys and values there are NaN, which would reach every result that they touch."""
    case = case_of(kind, k_slack=0, q_slack=0, q_length=130).with_options(
        k_lengths=(257, 130), q_lengths=(130, 129), mask_share=1.0
    )
    q, k, v = case.inputs()
    mask = torch.ones(2, 2, 3, dtype=torch.bool)
    mask[0, :, 1] = False
    hidden = slice(128, 256)
    zeroed, poisoned = [], []
    for x in (k, v):
        for boxes, value in ((zeroed, 0.0), (poisoned, math.nan)):
            values = x.values().detach().clone()
            values[hidden] = value
            boxes.append(JaggedTensor(values, k.layout))
    with guarded_allocations(), recorded_launches() as launches:
        got = Call.of(q, *poisoned, block_mask=mask).run("portable")
    assert "broadcast_kernel" not in [launch.name for launch in launches]
    call = Call.of(q, *zeroed, block_mask=mask)
    call.check(got)
    assert not got.dk[hidden].any()
    assert not got.dv[hidden].any()


@kinds
def test_the_same_bits_every_time_and_schedules_built_once(kind):
    case = case_of(kind)
    call = Call.of_case(case)
    first = call.run("portable")
    builds = call.keys.layout._schedules.builds
    for mine, theirs in zip(call.run("portable"), first, strict=True):
        assert torch.equal(mine, theirs)
    assert call.keys.layout._schedules.builds == builds
    call.options["block_mask"].logical_not_()
    call.check(call.run("portable"))
    assert call.keys.layout._schedules.builds == 2 * builds


@kinds
def test_prepared_schedules_are_those_that_attention_takes(kind):
    case = case_of(kind, k_slack=0, q_slack=0)
    q, k, v = case.inputs()
    mask = case.block_mask()
    k.prepare(
        q_len=q if kind is QueryKind.JAGGED else case.q_length, num_heads=2, broadcast=kind is QueryKind.BROADCAST,
        value_dim=24, backend="portable", block_mask=mask,
    )  # fmt: skip
    builds = k.layout._schedules.builds
    assert builds in (2, 3)  # forward and dQ may share one
    out = k.attend(q, v, backend="portable", block_mask=mask)
    (out.values() if isinstance(out, JaggedTensor) else out).sum().backward()
    assert k.layout._schedules.builds == builds


def test_layouts_whose_lengths_the_host_does_not_know():
    """As in a CUDA graph: a mask too small for the lengths of the day fails an assert of the device."""
    layout = JaggedLayout.with_capacity(3, max_tokens=300, max_length=257)
    mask = torch.tensor([[[1, 0, 1]], [[0, 1, 1]], [[1, 1, 0]]]) > 0
    for lengths in ((257, 0, 20), (0, 0, 0), (1, 130, 140)):
        layout.copy_(offsets_of(lengths))
        k = make_jagged(lengths, 2, 16, dtype=torch.float32, slack=300 - sum(lengths)).values()
        keys = JaggedTensor(k, layout)
        call = Call.of(torch.randn(5, 2, 16), keys, keys.with_values(k * 0.5), block_mask=mask)
        with guarded_allocations():
            got = call.run("portable")
        call.check(got)
    layout.copy_(offsets_of((257, 0, 20)))
    with pytest.raises(ValueError, match="keys in a sequence must be at most 256, as the mask has"):
        keys.attend(torch.randn(5, 2, 16), block_mask=mask[:, :, :2], backend="portable")


def test_one_graph_serves_every_mask():
    """The schedule is built inside of the graph, where mask and lengths are data."""
    torch._dynamo.reset()

    def function(values, offsets, query, mask):
        return JaggedTensor(values, offsets).attend(query, block_mask=mask, backend="portable", causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    query = torch.randn(20, 2, 8, requires_grad=True)
    for number, lengths in enumerate([(257, 0, 20), (5, 140, 0, 1)]):
        batch = make_jagged(lengths, 2, 8, dtype=torch.float32, requires_grad=True)
        mask = torch.rand(len(lengths), 1, 3, generator=torch.Generator().manual_seed(number)) < 0.6
        results = []
        for call in (compiled, function):
            out = call(batch.values(), batch.offsets(), query, mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), (batch.values(), query))))
        for mine, eager in zip(*results, strict=True):
            assert torch.equal(mine, eager)
    torch._dynamo.reset()
