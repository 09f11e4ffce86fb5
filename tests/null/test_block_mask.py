"""Block masks: which blocks of 128 queries see which of 128 keys, counted from the beginning of each sequence, through
the public API, against float64 attention of torch, sequence after sequence."""

import gc
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, JaggedTensor, attend
from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.dispatch import Implementation
from jaggedtensor.ops.contract import attend_bwd, attend_fwd
from jaggedtensor.ops.plan import pairs_through
from jaggedtensor.ops.reference import visible_keys
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.schedules.types import ScheduleKind, TileAxis
from jaggedtensor.testing import AttentionCase, assert_attention_within_budget, make_jagged, offsets_of

KINDS = list(QueryKind)
backends = pytest.mark.parametrize("backend", [None, "reference"])
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
LENGTHS = [0, 1, 2, 127, 128, 129, 255, 257, 300]


def packed(x):
    return x.values() if isinstance(x, JaggedTensor) else x


def random_mask(*shape, seed=0, share=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


# -- values and gradients ----------------------------------------------------------------------------------------------


@st.composite
def cases(draw, kind):
    some = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 400))
    few = draw(st.lists(some, max_size=4))
    # Enough short sequences of similar lengths that the CPU gathers them.
    many = draw(st.lists(st.integers(0, 6), min_size=11, max_size=30)) if draw(st.booleans()) else []
    k_lengths = draw(st.permutations([*few, 0, 1, *many]))
    q_lengths = [draw(st.one_of(st.just(n), some if n > 6 else st.integers(0, 6))) for n in k_lengths]
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2), (3, 1)]))
    side = st.one_of(st.none(), st.integers(0, 300))
    return AttentionCase(
        tuple(k_lengths),
        query=kind,
        q_length=draw(st.sampled_from([1, 5, 128, 129, 270])),
        q_lengths=tuple(q_lengths),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 4, 8])),
        value_dim=draw(st.sampled_from([4, 8])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(side, side))),
        q_slack=draw(st.integers(0, 2)),
        k_slack=draw(st.integers(0, 2)),
        mask_share=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        mask_for_all=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )


@backends
@kinds
@settings(max_examples=40)
@given(data=st.data())
def test_any_batch_under_any_mask(kind, backend, data):
    case = data.draw(cases(kind))
    assert_attention_within_budget(case, case.run(backend))


@backends
@kinds
@pytest.mark.parametrize("seed", range(12))
def test_masks_and_windows_of_long_sequences(seed, kind, backend):
    """Queries and keys of independent lengths, so that windows begin and end anywhere within blocks."""
    draw = random.Random(seed)
    k_lengths = [draw.randrange(420) for _ in range(4)] + [0, 1]
    heads, kv_heads = draw.choice([(2, 2), (6, 2), (3, 1)])
    case = AttentionCase(
        tuple(k_lengths),
        query=kind,
        q_length=draw.randrange(1, 300),
        q_lengths=tuple(draw.randrange(420) for _ in k_lengths),
        heads=heads,
        kv_heads=kv_heads,
        dim=4,
        value_dim=5,
        dtype=draw.choice([torch.float64, torch.float32]),
        mask_share=draw.choice([0.2, 0.5, 0.8]),
        mask_for_all=seed % 3 == 0,
        seed=seed,
    )
    for options in ({"causal": True}, {"window": (draw.randrange(200), 7)}, {"window": (3, None)}):
        case = case.with_options(causal=False, window=None).with_options(**options)
        assert_attention_within_budget(case, case.run(backend))


@backends
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (140, 3)}], ids=str)
def test_a_query_sees_the_keys_of_the_blocks_that_are_true(options, backend):
    """Values are one-hot and logits 0, so that the result tells the keys that each query has seen."""
    lengths, q_lengths = (300, 0, 200), (150, 3, 280)
    keys = JaggedTensor(torch.zeros(500, 4), offsets_of(lengths))
    values = keys.with_values(torch.cat([torch.eye(300)[:, :256], torch.eye(200, 256)]))
    query = JaggedTensor(torch.zeros(sum(q_lengths), 4), offsets_of(q_lengths))
    mask = torch.tensor([[[0, 1, 0], [1, 0, 1], [1, 1, 1]], [[1, 1, 1]] * 3, [[1, 0, 1], [0, 0, 1], [0, 1, 0]]]) > 0
    out, lse = attend(query, keys, values, block_mask=mask, return_lse=True, backend=backend, **options)
    left, right = options.get("window", (10**6, 0 if options else 10**6))
    for b, (q_length, k_length) in enumerate(zip(q_lengths, lengths, strict=True)):
        for i in range(q_length):
            place = i + k_length - q_length
            seen = [j for j in range(k_length) if mask[b, i // 128, j // 128] and place - left <= j <= place + right]
            at = int(query.offsets()[b]) + i
            found = (out.values()[at] > 0).nonzero().flatten().tolist()
            assert found == [j for j in seen if j < 256]
            expected = math.log(len(seen)) if seen else -math.inf
            assert lse[at].item() == pytest.approx(expected, rel=1e-5)


@backends
@kinds
def test_what_nobody_sees_adds_exactly_nothing(kind, backend):
    """Contract 1: rows without a key give 0 and -inf and no gradient, keys that no query sees get none, and what flows
    back to the lse of a blind row does not matter."""
    case = AttentionCase((300, 130, 0, 140), query=kind, q_length=260, q_lengths=(260, 140, 3, 0), heads=4)
    q, k, v = case.inputs()
    mask = torch.ones(4, 3, 3, dtype=torch.bool)
    mask[:, 1] = False
    mask[:, :, 0] = False
    mask[1] = False
    out, lse = attend(q, k, v, block_mask=mask, return_lse=True, backend=backend)
    blind = lse == -math.inf
    assert blind.any()
    assert not blind.all()
    weight = torch.where(blind, math.nan, 1.0)
    dq, dk, dv = torch.autograd.grad(
        [packed(out), lse], [packed(x) for x in (q, k, v)], [torch.ones_like(packed(out)), weight]
    )
    rows = blind if kind is QueryKind.JAGGED else blind.transpose(1, 2)
    assert not packed(out)[rows].any()
    if kind is not QueryKind.BROADCAST:
        assert not dq[rows].any()
    for gradient in (dk, dv):
        assert not gradient[:128].any()
        assert not gradient[300:430].any()
        assert gradient[128:300].all()
    assert dq.isfinite().all()


@backends
@kinds
def test_rows_that_mask_and_causality_hide_together(kind, backend):
    """Their neighbours in the block see keys: what flows back to their lse does not matter all the same."""
    case = AttentionCase((200, 3), query=kind, q_length=130, q_lengths=(130, 3), causal=True)
    q, k, v = case.inputs()
    mask = torch.tensor([[[0, 1], [0, 1]], [[1, 1], [1, 1]]]) > 0
    out, lse = attend(q, k, v, causal=True, block_mask=mask, return_lse=True, backend=backend)
    blind = (lse == -math.inf) if kind is QueryKind.JAGGED else (lse == -math.inf).transpose(1, 2)
    assert blind[0:58].all() if kind is QueryKind.JAGGED else blind[0, :58].all()
    assert not (blind[58:130].any() if kind is QueryKind.JAGGED else blind[0, 58:].any())
    assert not packed(out)[blind].any()
    grads = []
    for flowing in (math.nan, 0.0):
        weights = [torch.ones_like(packed(out)), torch.where(lse == -math.inf, flowing, 1.0)]
        leaves = [packed(x) for x in (q, k, v)]
        grads.append(torch.autograd.grad([packed(out), lse], leaves, weights, retain_graph=True))
    for mine, wanted in zip(*grads, strict=True):
        assert torch.equal(mine, wanted)


@kinds
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_are_those_of_the_function(kind, backend):
    case = AttentionCase(
        (130, 0, 260), query=kind, q_length=140, q_lengths=(140, 2, 130), heads=2, kv_heads=1, dim=2, value_dim=2,
        dtype=torch.float64, causal=True,
    )  # fmt: skip
    q, k, v = case.inputs()
    mask = torch.tensor([[[1, 0, 1], [1, 1, 0]], [[1, 1, 1]] * 2, [[0, 1, 0], [1, 0, 0]]]) > 0

    def function(q_values, k_values, v_values):
        query = q.with_values(q_values) if isinstance(q, JaggedTensor) else q_values
        out, lse = attend(
            query, k.with_values(k_values), v.with_values(v_values), causal=True, block_mask=mask, return_lse=True,
            backend=backend,
        )  # fmt: skip
        return packed(out), lse.masked_fill(lse == -math.inf, 0)

    leaves = tuple(packed(x).detach().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@backends
def test_one_mask_for_all_and_blocks_past_the_end(backend):
    """[1, ...] is the same mask for every sequence, and what lies past the longest is never looked at."""
    q, k, v = AttentionCase((300, 0, 150), query=QueryKind.JAGGED, q_lengths=(200, 3, 150)).inputs()
    one = random_mask(1, 2, 3, seed=3)
    for_each = one.expand(3, -1, -1)
    larger = torch.zeros(1, 5, 7, dtype=torch.bool)
    larger[:, :2, :3] = one
    strided = torch.zeros(4, 1, 5, dtype=torch.bool).transpose(0, 1)[:, :2, :3].copy_(one)
    wanted = attend(q, k, v, block_mask=for_each.contiguous(), backend=backend).values()
    for mask in (one, for_each, larger, strided):
        assert torch.equal(attend(q, k, v, block_mask=mask, backend=backend).values(), wanted)


@backends
def test_a_mask_that_is_all_true_hides_nothing(backend):
    q, k, v = AttentionCase((300, 0, 150), q_length=200).inputs()
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    torch.testing.assert_close(attend(q, k, v, block_mask=mask, backend=backend), attend(q, k, v, backend=backend))


def test_blocks_that_the_mask_leaves_out_are_not_computed(monkeypatch):
    """The CPU multiplies with the keys from the first to the last block that is seen."""
    widths = []
    original = torch.softmax

    def spy(x, *args):
        widths.append(x.shape[2] if args[0] == 2 else x.shape[1])
        return original(x, *args)

    keys = make_jagged([1280], 1, 8, dtype=torch.float32)
    band = torch.eye(10, dtype=torch.bool)[None]
    monkeypatch.setattr(torch, "softmax", spy)
    keys.attend(keys, block_mask=band)
    assert widths == [MASK_BLOCK] * 10


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True]], TypeError, "block_mask must be a Tensor, got list; blocks of queries by blocks of keys"),
        (torch.ones(2, 2, 3), TypeError, r"block_mask must be bool, got float32\[2, 2, 3\] on cpu; compare it with 0"),
        (
            torch.ones(2, 3).bool(),
            ValueError,
            r"block_mask must be of shape \[B, blocks of 128 queries, blocks of 128 keys\], got bool\[2, 3\] .*None",
        ),
        (
            torch.ones(3, 2, 3).bool(),
            ValueError,
            r"dimension 0 of block_mask must be 2 \(the batch size of key\) or 1, got bool\[3, 2, 3\]",
        ),
        (
            torch.ones(2, 1, 3).bool(),
            ValueError,
            r"dimension 1 of block_mask must be at least 2 \(blocks of 128 queries, up to 129 in a sequence\), got "
            r"bool\[2, 1, 3\] on cpu; make one of shape",
        ),
        (torch.ones(2, 2, 2).bool(), ValueError, r"dimension 2 of block_mask must be at least 3 \(blocks of 128 keys"),
        (torch.ones(2, 0, 3).bool(), ValueError, r"dimension 1 of block_mask must be at least 2"),
        (torch.ones(2, 2, 3).bool().to("meta"), ValueError, "block_mask must be on cpu, got .* on meta; move it"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, error, message, backend):
    keys = make_jagged([300, 5], 2, 8, dtype=torch.float32)
    queries = (torch.zeros(129, 2, 8), torch.zeros(2, 129, 2, 8), make_jagged([129, 3], 2, 8, dtype=torch.float32))
    for query in queries:
        with pytest.raises(error, match=message):
            attend(query, keys, block_mask=mask, backend=backend)
    with pytest.raises(error, match=message.split("; blocks of queries")[0]):
        keys.explain(queries[0], block_mask=mask)


def test_a_group_of_ranks_takes_no_mask():
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        keys = make_jagged([30, 5], 2, 8, dtype=torch.float32)
        mask = torch.ones(2, 1, 1, dtype=torch.bool)
        with pytest.raises(NotImplementedError, match="block_mask must be left out with group"):
            keys.attend(torch.zeros(3, 2, 8), group=dist.group.WORLD, block_mask=mask)
    finally:
        dist.destroy_process_group()


def test_a_family_refuses_masks_unless_it_says_that_it_reads_them():
    q, k = torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)
    masked, plain = (AttentionProblem.of(q, k, k, None, -1, -1, False, masked) for masked in (True, False))
    other = Implementation("other", "nowhere", ("cpu",), (torch.float32,))
    assert other.lacks(masked) == ["takes no block_mask"]
    assert other.lacks(plain) == []
    assert Implementation("reader", "nowhere", ("cpu",), (torch.float32,), masks=True).lacks(masked) == []


# -- identity ----------------------------------------------------------------------------------------------------------


def test_a_mask_changed_in_place_is_another_mask():
    q, k, v = AttentionCase((300, 0, 150), q_length=200).inputs()
    mask = random_mask(3, 2, 3)
    first = attend(q, k, v, block_mask=mask)
    assert torch.equal(attend(q, k, v, block_mask=mask), first)
    mask.logical_not_()
    assert torch.equal(attend(q, k, v, block_mask=mask), attend(q, k, v, block_mask=mask.clone()))


def test_a_mask_changed_between_forward_and_backward_is_noticed():
    q, k, v = AttentionCase((300, 0, 150), q_length=200).inputs()
    mask = random_mask(3, 2, 3)
    out = attend(q, k, v, block_mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_layouts_remember_calls_with_a_mask_as_long_as_it_lives():
    q, k, v = AttentionCase((300, 0, 150), q_length=200).inputs()
    sizes = []
    for seed in range(5):
        mask = random_mask(3, 2, 3, seed=seed)
        attend(q, k, v, block_mask=mask)
        known = len(k.layout._derived)
        attend(q, k, v, block_mask=mask)
        assert len(k.layout._derived) == known
        sizes.append(known)
        mask.logical_not_()
        attend(q, k, v, block_mask=mask)
        assert len(k.layout._derived) == known  # in the place of the one before the change
        del mask
        gc.collect()
    assert len(set(sizes)) == 1


# -- static layouts, compilation, the operator -------------------------------------------------------------------------


def test_with_capacity_layouts_take_masks_of_their_bounds():
    layout = JaggedLayout.with_capacity(3, max_tokens=500, max_length=300)
    mask = random_mask(3, 1, 3)
    values = torch.randn(500, 2, 8)
    query = torch.randn(20, 2, 8)
    for lengths in ((300, 0, 150), (0, 0, 0), (1, 290, 200)):
        layout.copy_(offsets_of(lengths))
        fresh = JaggedTensor(values, offsets_of(lengths))
        got = attend(query, JaggedTensor(values, layout), block_mask=mask)
        assert torch.equal(got, attend(query, fresh, block_mask=mask))
    with pytest.raises(ValueError, match="dimension 2 of block_mask must be at least 3"):
        attend(query, JaggedTensor(values, layout), block_mask=mask[:, :, :2])


@pytest.mark.parametrize("jagged", [False, True])
def test_compiled_whole_it_gives_the_bits_of_eager_mode(jagged):
    torch._dynamo.reset()

    def function(values, offsets, query, mask):
        keys = JaggedTensor(values, offsets)
        out = keys.attend(keys if jagged else query, block_mask=mask, causal=jagged)
        return packed(out).square()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    query = torch.randn(140, 2, 8, requires_grad=True)
    for lengths in ((300, 0, 150), (20, 7, 400, 0, 1)):
        batch = make_jagged(lengths, 2, 8, dtype=torch.float32, requires_grad=True)
        leaves = (batch.values(),) if jagged else (batch.values(), query)
        for mask in (random_mask(len(lengths), 4, 4), random_mask(1, 4, 4, seed=1)):
            results = []
            for call in (compiled, function):
                out = call(batch.values(), batch.offsets(), query, mask)
                results.append((out, *torch.autograd.grad(out.sum(), leaves)))
            for mine, eager in zip(*results, strict=True):
                assert torch.equal(mine, eager)
    torch._dynamo.reset()


@kinds
def test_the_operators_keep_their_promises(kind):
    k, v = torch.randn(145, 2, 4), torch.randn(145, 2, 3)
    shape = {QueryKind.BROADCAST: (130, 4, 4), QueryKind.PER_SEQUENCE: (3, 130, 4, 4), QueryKind.JAGGED: (140, 4, 4)}
    q_offsets = offsets_of([130, 2, 8]) if kind is QueryKind.JAGGED else None
    mask = torch.tensor([[[1, 0], [0, 0]], [[1, 1], [1, 1]], [[0, 1], [1, 0]]]) > 0
    options = ([], [], 0.5, -1, 0, "cpu", False, True, False)
    leaves = [x.requires_grad_() for x in (torch.randn(shape[kind]), k, v)]
    arguments = (*leaves, q_offsets, offsets_of([140, 0, 3]), mask, *options)
    torch.library.opcheck(attend_fwd, arguments)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    out, lse = attend_fwd(*arguments)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    grads = (torch.ones_like(out), torch.ones_like(lse))
    torch.library.opcheck(attend_bwd, (*grads, out, lse, *arguments, [True, True, True]), test_utils=utils)


# -- schedules, explain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", TileAxis, ids=lambda a: a.name)
@pytest.mark.parametrize("kind", [ScheduleKind.DYNAMIC, ScheduleKind.STREAM_K], ids=lambda k: k.name)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6])
def test_schedules_list_the_blocks_of_the_mask_whatever_the_group(group, kind, axis):
    """Blocks of rows never straddle two blocks of the mask, also of 3 query heads for one of keys."""
    lengths, q_lengths = [300, 0, 129, 5], [130, 7, 300, 0]
    layout, query = JaggedLayout(offsets_of(lengths)), JaggedLayout(offsets_of(q_lengths))
    for block_q, block_kv in ((16, 64), (128, 32)):
        for mask in (random_mask(4, 3, 3), random_mask(1, 4, 3, seed=1)):
            schedule = layout.schedule(
                kind, axis=axis, q_len=query, heads=1, group=group, workers=3, block_q=block_q, block_kv=block_kv,
                right=20, mask=mask, mask_block=MASK_BLOCK,
            )  # fmt: skip
            found = set()
            for b, _, q_begin, q_end, kv_begin, kv_end, _, _ in schedule.tiles[: int(schedule.count)].tolist():
                if axis is TileAxis.QUERY:
                    found |= {(b, q_begin, int(n)) for n in schedule.blocks[kv_begin:kv_end]}
                    assert q_end == q_begin + 1
                else:
                    assert kv_end == kv_begin + 1
                    found |= {(b, int(n), kv_begin) for n in schedule.blocks[q_begin:q_end]}
            wanted = set()
            for b, (k_length, q_length) in enumerate(zip(lengths, q_lengths, strict=True)):
                visible = visible_keys(q_length, k_length, -1, 20)
                for i in range(q_length):
                    for j in visible[i].nonzero().flatten().tolist():
                        if mask[b % len(mask), i // 128, j // 128]:
                            rows = range(i * group // block_q, ((i + 1) * group - 1) // block_q + 1)
                            wanted |= {(b, row, j // block_kv) for row in rows}
            assert found == wanted


def test_blocks_of_a_schedule_divide_those_of_the_mask():
    layout = JaggedLayout(offsets_of([300]))
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    options = dict(q_len=300, heads=1, workers=1, mask=mask, mask_block=128)
    with pytest.raises(ValueError, match="block_q of a schedule with mask_block=128 must be a divisor of 128, got 96"):
        layout.schedule(ScheduleKind.DYNAMIC, block_q=96, **options)
    with pytest.raises(ValueError, match=r"block_kv of a schedule .* must be a divisor of 128, got 256"):
        layout.schedule(ScheduleKind.DYNAMIC, block_kv=256, **options)


@pytest.mark.parametrize("window", [(-1, -1), (30, 5), (-1, 0), (200, -1)], ids=str)
def test_pairs_that_see_each_other_are_counted(window):
    q_lengths, k_lengths = torch.tensor([130, 7, 300, 0, 260]), torch.tensor([300, 0, 129, 5, 260])
    mask = random_mask(5, 3, 3)
    for b, count in enumerate(pairs_through(mask, q_lengths, k_lengths, *window).tolist()):
        q_length, k_length = int(q_lengths[b]), int(k_lengths[b])
        visible = visible_keys(q_length, k_length, *window)
        blocks = mask[b].repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert count == int((visible & blocks[:q_length, :k_length]).sum())


def test_explain_counts_what_the_mask_leaves():
    keys = make_jagged([300, 0, 150], 2, 8, dtype=torch.float32)
    mask = torch.zeros(3, 3, 3, dtype=torch.bool)
    mask[0, 2, 0] = mask[2, 0, 1] = True
    plan = keys.explain(keys, block_mask=mask)
    assert plan.pairs == 44 * 128 + 128 * 22
    assert plan.tiles == 2 * 2
    assert "block mask" in str(plan)
    assert "block mask" not in str(keys.explain(keys))
