"""The Hopper forward on an SM90: values against float64, bits from run to run, what it refuses, and who is chosen.

The case list in other files of this folder runs with it too: JAGGEDTENSOR_TEST_BACKEND=hopper.
"""

from functools import partial

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor, ScheduleKind, attend
from jaggedtensor.kernels.dispatch import by_name, choose
from jaggedtensor.kernels.hopper.attention_fwd import launch
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.testing import AttentionCase
from jaggedtensor.testing.attention import attend_by_sequence
from jaggedtensor.testing.budgets import assert_within_budget

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


def problem_of(q, k, v):
    return AttentionProblem.of(q, k, v, None, -1, -1, False)


def lacks_here():
    x = torch.empty(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    return by_name("hopper").lacks(problem_of(x, x, x))


if lacks_here():
    pytest.skip(f"the Hopper kernels here: {', '.join(lacks_here())}", allow_module_level=True)

B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED
K_LENGTHS = (330, 0, 1, 16, 150, 128, 64, 1000, 129, 65)
Q_LENGTHS = (200, 3, 0, 17, 50, 128, 1, 77, 300, 64)


def packed(x):
    return x.values() if isinstance(x, JaggedTensor) else x


@torch.no_grad()
def check(case, change=None):
    """Forward alone: backward has kernels and tests of its own. A `change` is one of the keys."""
    q, k, v = case.inputs("cuda")
    if change is not None:
        k = change(k)
    out, lse = attend(q, k, v, **case.options, return_lse=True, backend="hopper")
    q_offsets = q.offsets().cpu() if isinstance(q, JaggedTensor) else None
    exact, low = (
        attend_by_sequence(
            *(packed(x).cpu().to(dtype) for x in (q, k, v)), q_offsets, k.offsets().cpu(), **case.options,
            stepwise=dtype == case.dtype,
        )
        for dtype in (torch.float64, case.dtype)
    )  # fmt: skip
    assert_within_budget(packed(out), low[0], exact[0], "out")
    assert_within_budget(lse, low[1].float(), exact[1], "lse")
    return packed(out)


def case_of(query, dim=64, value_dim=None, dtype=torch.bfloat16, **options):
    settings = dict(q_lengths=Q_LENGTHS, q_slack=3, k_slack=5, dim=dim, value_dim=value_dim or dim, dtype=dtype)
    return AttentionCase(K_LENGTHS, query=query, **settings | options)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (72, 40), (8, 256), (256, 64)], ids=str)
def test_head_dimensions_up_to_256(dims):
    check(case_of(J, *dims))
    check(case_of(B, *dims, q_length=128))


def test_fp16():
    for query in (B, P, J):
        check(case_of(query, 128, dtype=torch.float16, q_length=100))


@pytest.mark.parametrize("rows", [1, 64, 128, 130])
def test_queries_of_any_length(rows):
    check(case_of(B, 128, q_length=rows))
    check(case_of(B, 64, q_length=rows))
    check(case_of(P, 64, q_length=rows))


@pytest.mark.parametrize("heads", [(8, 2), (3, 1), (64, 1)], ids=str)
@pytest.mark.parametrize("query", [B, P, J], ids=lambda kind: kind.name)
def test_query_heads_that_share_keys_are_packed(query, heads):
    check(case_of(query, 64, q_length=21, heads=heads[0], kv_heads=heads[1], causal=True))


@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window": (30, 5)}, {"window": (200, None)}, {"window": (None, 100)}, {"window": (0, 0)}],
    ids=str,
)
def test_windows(mask):
    check(case_of(J, 128, **mask))


def test_a_window_of_one_query_for_all():
    check(case_of(B, 64, q_length=140, causal=True))
    check(case_of(B, 64, q_length=140, window=(100, 20)))


@torch.no_grad()
def test_a_long_sequence_is_cut_between_ctas():
    """As a whole it would keep a multiprocessor busy long after all others have nothing to do."""
    layout = JaggedLayout.from_lengths(torch.tensor([9000, 0, 37, 500])).to("cuda")
    for rows, heads, kv_heads in ((128, 4, 4), (10, 8, 2), (300, 6, 2)):
        keys = JaggedTensor(torch.randn(9537, kv_heads, 64, device="cuda", dtype=torch.bfloat16), layout)
        query = torch.randn(rows, heads, 64, device="cuda", dtype=torch.bfloat16)
        out, lse = keys.attend(query, return_lse=True, backend="hopper")
        expected, expected_lse = keys.attend(query, return_lse=True, backend="portable")
        assert (out.float() - expected.float()).abs().max() < 0.01
        assert (lse - expected_lse).nan_to_num(0).abs().max() < 1e-4
        assert torch.equal(out, keys.attend(query, backend="hopper"))
    assert ScheduleKind.STREAM_K in {schedule.kind for schedule in layout._schedules}


@pytest.mark.parametrize("k_lengths", [(0, 0), (1,), (0, 1), (64, 64, 64), (4096, 1), (129, 0, 1)], ids=str)
def test_few_or_empty_sequences(k_lengths):
    check(AttentionCase(k_lengths, q_length=128, dim=128, value_dim=128, dtype=torch.bfloat16))


def test_a_scale_of_any_sign():
    for scale in (-0.3, 0.0, 2.0):
        check(case_of(J, scale=scale))


def test_nan_beyond_a_sequence_is_never_read():
    """Contract 2, and neighbours: a sequence's last block holds rows of the next one."""
    case = case_of(B, 128, q_length=128)
    q, k, v = case.inputs("cuda")
    clean = k.attend(q, v, backend="hopper")
    for i in (0, 4, 7):
        dirty_k, dirty_v = k.values().detach().clone(), v.values().detach().clone()
        begin, end = (int(x) for x in k.offsets()[i : i + 2])
        for x in (dirty_k, dirty_v):
            x[begin:end] = torch.nan
        dirty = k.with_values(dirty_k).attend(q, k.with_values(dirty_v), backend="hopper")
        others = [j for j in range(len(K_LENGTHS)) if j != i]
        assert torch.equal(dirty[others], clean[others])
        assert dirty[i].isnan().all()


@pytest.fixture
def anchored(monkeypatch):
    """However few keys there are. Gives a list of the tensors of flags, which the first launches write."""
    monkeypatch.setattr(launch, "MUCH", 0)
    monkeypatch.setattr(launch, "_CALLS", {})
    flags, as_it_is = [], launch.Variant.launch

    def recorded(self, programs, descriptors, args, aligned=True):
        if getattr(args[-1], "anchored", False):  # flags of tiles that there are; the others stay 0
            args[7].zero_()
            flags.append(args[7])
        as_it_is(self, programs, descriptors, args, aligned)

    monkeypatch.setattr(launch.Variant, "launch", recorded)
    return flags


@pytest.mark.limit(240)  # 70 s among 24 others
@pytest.mark.parametrize("query", [B, P, J], ids=lambda kind: kind.name)
def test_anchored_rows(query, anchored):
    for dims, dtype in (((64, 64), torch.float16), ((128, 128), torch.bfloat16), ((72, 40), torch.bfloat16)):
        check(case_of(query, *dims, dtype=dtype, q_length=200))
    check(case_of(query, 128, dtype=torch.float16, q_length=70, heads=6, kv_heads=2))
    assert len(anchored) == 4
    assert not any(flags.any() for flags in anchored)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("query", [B, J], ids=lambda kind: kind.name)
def test_ctas_that_go_from_head_to_head(query, options, anchored):
    """Some six tiles each. What a role keeps from tile to tile is no constant of the compiled loop."""
    lengths = dict(k_lengths=K_LENGTHS * 12, q_lengths=Q_LENGTHS * 12, q_length=300, heads=5, kv_heads=5)
    check(AttentionCase(query=query, dim=64, value_dim=64, dtype=torch.bfloat16, **lengths, **options))
    assert len(anchored) == 1


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 12), (torch.bfloat16, 60)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("query", [B, J], ids=lambda kind: kind.name)
def test_rows_that_grow_past_their_anchor_are_done_again(query, heads, dtype, factor, anchored, monkeypatch):
    case = case_of(query, 128, dtype=dtype, q_length=200, heads=heads[0], kv_heads=heads[1])
    out = check(case, partial(grown, factor=factor))
    assert 0 < anchored[-1].count_nonzero() < anchored[-1].numel()
    monkeypatch.setattr(launch, "MUCH", 1 << 60)
    exact = check(case, partial(grown, factor=factor))
    assert len(anchored) == 1
    assert (out == exact).flatten(-2).all(-1).any()  # where all heads were done again


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (None, 40)}], ids=str)
def test_anchored_rows_that_see_up_to_themselves(options, anchored):
    """Some see nothing in the block that others begin with; scores of such rows may be far below 0."""
    for dtype in (torch.float16, torch.bfloat16):
        check(case_of(J, 128, dtype=dtype, heads=4, kv_heads=2, **options))
    lengths = dict(q_lengths=(150, 33), dtype=torch.bfloat16, dim=64, value_dim=64)
    case = AttentionCase((200, 64), query=J, **lengths, **options)
    q, k, v = case.inputs("cuda")
    with torch.no_grad():
        low, keys = (x.with_values(torch.full_like(x.values(), y)) for x, y in ((q, 2.5), (k, -2.5)))
        out = attend(low, keys, v, backend="hopper", **case.options)
        expected = attend(low, keys, v, backend="reference", **case.options)
    assert anchored[-1].any()
    assert (out.values().float() - expected.values().float()).abs().max() < 0.01


def grown(k, factor):
    """Some of the first keys of two sequences, which are looked at last, weigh more than all others."""
    values = k.values().detach().clone()
    for i in (0, 7):
        begin = int(k.offsets()[i])
        values[begin : begin + 3] *= factor
    return k.with_values(values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@torch.no_grad()
def test_numbers_that_are_none_give_what_they_give_without_anchors(bad, anchored, monkeypatch):
    """Whole tiles are done again, so these have the same bits; in V they reach the sums alone."""
    case = case_of(J, 128)
    q, k, v = case.inputs("cuda")
    for x in (q, k, v):
        values = {id(y): packed(y).detach().clone() for y in (q, k, v)}
        values[id(x)][400:403, 0, 5] = bad
        args = [y.with_values(values[id(y)]) for y in (q, k, v)]
        monkeypatch.setattr(launch, "MUCH", 0)
        got = packed(attend(*args, backend="hopper"))
        assert anchored[-1].any()
        monkeypatch.setattr(launch, "MUCH", 1 << 60)
        expected = packed(attend(*args, backend="hopper"))
        assert torch.equal(got.isfinite(), expected.isfinite())
        assert torch.equal(got.isnan(), expected.isnan())


@torch.no_grad()
def test_a_graph_does_again_what_its_replay_needs(anchored):
    """The second launch is always there, and no host looks at the flags."""
    case = case_of(J, 128, dtype=torch.float16)
    q, k, v = case.inputs("cuda")
    keys = k, grown(k, 20)
    expected = [attend(q, x, v, backend="reference").values().float() for x in keys]
    held = k.with_values(k.values().detach().clone())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(q, held, v, backend="hopper")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, held, v, backend="hopper")
    for i in (0, 1, 0, 1):
        held.values().copy_(keys[i].values())
        graph.replay()
        assert (out.values().float() - expected[i]).abs().max() < 0.02
        assert bool(anchored[-1].any()) == bool(i)


def test_a_block_mask_leaves_out_blocks():
    case = case_of(J, 64, heads=4, kv_heads=2)
    q, k, v = case.inputs("cuda")
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(len(K_LENGTHS), 3, 8, generator=generator) < 0.5).cuda()
    with torch.no_grad():
        for options in ({}, {"causal": True}):
            out = attend(q, k, v, block_mask=mask, backend="hopper", **options)
            expected = attend(q, k, v, block_mask=mask, backend="reference", **options)
            tokens = q.num_tokens
            assert (out.values()[:tokens].float() - expected.values()[:tokens].float()).abs().max() < 0.02


def test_strides_of_slices_and_transposes():
    lengths = torch.tensor(K_LENGTHS)
    wide = torch.randn(int(lengths.sum()), 2, 3, 128, device="cuda", dtype=torch.bfloat16)
    base = JaggedTensor.from_lengths(wide[:, :, 0].contiguous(), lengths.cuda())
    q = torch.randn(4, 2, 100, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[1]
    expected = base.attend(q.contiguous(), base.with_values(wide[:, :, 1].contiguous()), backend="hopper")
    views = base.with_values(wide[:, :, 0])
    assert torch.equal(views.attend(q, base.with_values(wide[:, :, 1]), backend="hopper"), expected)
    apart = wide[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)  # columns not together: copied
    assert torch.equal(views.attend(q, base.with_values(apart), backend="hopper"), expected)


@pytest.mark.limit(300)
def test_the_same_bits_in_shuffled_repeats():
    """EMP-07: empty tiles and full ones in any order, many times over."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([0, 1, 127, 128, 129, 1024])[torch.randint(0, 6, (256,), generator=generator)]
    calls = []
    for dim in (128, 192):
        k = torch.randn(int(drawn.sum()), 2, dim, device="cuda", dtype=torch.bfloat16)
        keys = JaggedTensor.from_lengths(k, drawn.cuda())
        queries = torch.randn(128, 2, dim, device="cuda", dtype=torch.bfloat16)
        calls += [lambda keys=keys, queries=queries: keys.attend(queries, backend="hopper")]
        calls += [lambda keys=keys: keys.attend(keys, backend="hopper").values()]
    first = [call() for call in calls]
    for _ in range(200):
        for i in torch.randperm(len(calls), generator=generator).tolist():
            assert torch.equal(calls[i](), first[i])


def test_what_it_lacks_goes_to_the_portable_kernels():
    for heads, dim in (((65, 1), 64), ((1, 1), 20)):
        q = torch.empty(4, heads[0], dim, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(4, heads[1], dim, device="cuda", dtype=torch.bfloat16)
        choice = choose(problem_of(q, k, k))
        assert choice.implementation.name == "portable"
        assert choice.passed_over["hopper"]


def test_it_is_chosen_where_it_can():
    x = torch.empty(4, 2, 128, device="cuda", dtype=torch.float16)
    assert choose(problem_of(x, x, x)).implementation.name == "hopper"
