"""Portable kernels, interpreted, against attention in float64: batches that hypothesis makes, and grids of what they
distinguish. Blocks have 16 to 128 rows, so lengths lie around their multiples."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase
from jaggedtensor.testing.bounds import check_attention
from jaggedtensor.testing.guards import guarded_allocations
from jaggedtensor.testing.launches import recorded_launches

LENGTHS = [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130]
KINDS = list(QueryKind)
HALF = [torch.bfloat16, torch.float16]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)

# The interpreter computes with numpy, which speaks up where a GPU gives inf or NaN in lanes that a mask drops.
numpy.seterr(all="ignore")


def check(case):
    check_attention(case, "portable")


@st.composite
def cases(draw, kind):
    """Few heads and at most 250 keys in all: the interpreter is slow."""
    some = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 130))
    k_lengths = [*draw(st.lists(some, max_size=3)), *draw(st.sampled_from([[], [0], [1], [0, 1]]))]
    k_lengths = draw(st.permutations(k_lengths))
    while sum(k_lengths) > 250:
        k_lengths.remove(max(k_lengths))
    q_lengths = [draw(st.one_of(st.just(n), some)) for n in k_lengths]
    while sum(q_lengths) > 250:
        q_lengths[q_lengths.index(max(q_lengths))] = 1
    q_length = draw(
        st.sampled_from([0, 1, 3, 16, 17, 32, 33, 65, 129] if kind is QueryKind.BROADCAST else [1, 5, 17, 40])
    )
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (6, 2), (3, 3)]))
    side = st.one_of(st.none(), st.integers(0, 20), st.integers(0, 140))
    window = draw(st.one_of(st.none(), side, st.tuples(side, side)))
    return AttentionCase(
        tuple(k_lengths),
        query=kind,
        q_length=q_length if q_length * heads <= 160 else 3,
        q_lengths=tuple(q_lengths),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 8, 16, 24, 40, 64, 72])),
        value_dim=draw(st.sampled_from([1, 8, 16, 24, 40, 64, 72])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, *HALF])),
        causal=draw(st.booleans()),
        window=window,
        scale=draw(st.sampled_from([None, None, 0.3, -0.4, 0.0])),
        q_slack=draw(st.integers(0, 3)),
        k_slack=draw(st.integers(0, 3)),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        magnitude=draw(st.sampled_from([1.0, 1.0, 6.0])),
        seed=draw(st.integers(0, 100)),
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@settings(max_examples=12)
@given(data=st.data())
def test_any_batch_is_as_near_to_float64_as_its_dtype_allows(kind, gpu, data):
    case = data.draw(cases(kind))
    with gpu(data.draw(st.sampled_from([1, 3, 5, 132]), label="processors")):
        check(case)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_lengths_around_multiples_of_blocks(dtype, kind):
    """TAIL-01, TAIL-03, TAIL-04: empty, one token, one less, exact, one more; each its own values and gradients."""
    case = AttentionCase(
        (130, 0, 63, 16, 1, 65),
        query=kind,
        q_length=17,
        q_lengths=(1, 64, 65, 16, 33, 0),
        heads=2,
        kv_heads=2,
        dtype=dtype,
    )
    check(case)


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (64, 24), (72, 104), (256, 160), (17, 256)], ids=str)
def test_head_dimensions(dims):
    """DIM-02, DIM-06: not powers of two, and different ones of keys and values."""
    case = AttentionCase((33, 0, 7), q_length=3, q_lengths=(5, 2, 20), dim=dims[0], value_dim=dims[1])
    check(case)
    check(case.with_options(query=QueryKind.JAGGED, dtype=torch.bfloat16, causal=True, heads=4))


@kinds
def test_every_column_takes_part(kind):
    """DIM-03: keys that differ in their last column alone."""
    for dim in (24, 64, 128):
        case = AttentionCase(
            (20, 3), query=kind, q_length=2, q_lengths=(2, 2), heads=1, kv_heads=1, dim=dim, value_dim=dim
        )
        q, k, v = case.inputs()
        for x in (q, k):
            values = x if isinstance(x, torch.Tensor) else x.values()
            values.data[..., :-1] = 0
        out = k.attend(q, v, scale=1.0, backend="portable")
        wanted = k.attend(q, v, scale=1.0, backend="reference")
        out, wanted = (x if isinstance(x, torch.Tensor) else x.values() for x in (out, wanted))
        torch.testing.assert_close(out, wanted)
        assert (out[..., 0] - out.mean()).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [(12, 3), (12, 4), (9, 3), (6, 1), (8, 2), (5, 5)], ids=str)
def test_query_heads_share_key_heads_in_any_ratio(heads):
    """GQA-01, EMP-14: packed rows of a tile belong to several heads and queries, also where 16 rows are no multiple."""
    for kind in (QueryKind.BROADCAST, QueryKind.JAGGED):
        case = AttentionCase(
            (20, 3, 0),
            query=kind,
            q_length=3,
            q_lengths=(7, 0, 1),
            heads=heads[0],
            kv_heads=heads[1],
            dim=16,
            value_dim=16,
        )
        check(case.with_options(causal=kind is QueryKind.JAGGED, dtype=torch.float16))


@kinds
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True},
        {"window": (0, 0)},
        {"window": (33, 2)},
        {"window": (None, 40)},
        {"window": (70, None)},
        {"window": (16, None), "causal": True},
        {"window": (2**31 - 1, 2**40)},
    ],
    ids=str,
)
def test_masks_are_aligned_from_the_end_in_both_passes(mask, kind):
    """MSK-01, MSK-02, MSK-05: more queries than keys, fewer, and as many; limits of any size."""
    case = AttentionCase(
        (130, 5, 0, 70), query=kind, q_length=40, q_lengths=(40, 30, 3, 70), heads=2, kv_heads=1, dim=16, value_dim=16
    )
    check(case.with_options(**mask))


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("processors", [1, 4, 132])
def test_broadcast_query_whatever_the_number_of_workers(length, processors, gpu):
    """Batches of fewer blocks than workers, and workers that get parts of sequences."""
    for k_lengths in ((1,), (130, 0, 3)):
        case = AttentionCase(k_lengths, q_length=length, heads=2, kv_heads=2, dim=16, value_dim=16)
        with gpu(processors):
            check(case)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"q_length": 300}, {"q_length": 100, "heads": 3, "window": (40, 100)}, {"q_length": 129, "causal": True}],
    ids=str,
)
def test_a_long_broadcast_query_in_parts(options, dtype, gpu):
    """Of 128 packed rows, the last one shorter: each adds its share of dK and dV to what those before have left."""
    settings = dict(heads=1, kv_heads=1, dim=16, value_dim=8, k_slack=3, dtype=dtype)
    case = AttentionCase((70, 0, 1, 130), **settings | options)
    with gpu(3), recorded_launches() as launches, guarded_allocations():
        check(case)
    parts = [launch.args for launch in launches if launch.name == "broadcast_kernel"]
    assert [args[13] for args in parts] == list(range(-(-case.q_length * case.heads // 128)))
    assert len({args[8][0].data_ptr() for args in parts}) == 1  # tiles of one schedule


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("options", [{}, {"q_length": 130, "scale": -0.2}, {"window": (30, 40)}], ids=str)
def test_keys_whose_gradient_waits_for_the_next_block(options, dtype, gpu):
    """dK of a program's last block, and of blocks before an empty sequence, before another one, and cut by a worker."""
    settings = dict(q_length=100, heads=2, kv_heads=2, dim=72, value_dim=96, k_slack=3, dtype=dtype)
    case = AttentionCase((70, 0, 1, 200, 64, 0), **settings | options)
    for processors in (2, 50):
        with gpu(processors), recorded_launches() as launches, guarded_allocations():
            check(case)
        assert launches[-1].tiling.late


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("options", [{}, {"q_length": 250}, {"window": (30, 40), "scale": -0.2}], ids=str)
def test_few_keys_are_columns_of_their_products(options, dtype, gpu):
    """dV and dK of 32 keys, of one part and of more."""
    settings = dict(q_length=100, heads=1, kv_heads=1, dim=64, value_dim=40, k_slack=3, dtype=dtype)
    case = AttentionCase((70, 0, 1, 33, 64, 0), **settings | options)
    with gpu(3), recorded_launches() as launches, guarded_allocations():
        check(case)
    assert launches[-1].tiling.turned
    assert launches[-1].tiling.block_n == 32


def test_a_query_of_too_many_rows_for_parts():
    """It comes to the kernels of other queries, dQ in shares."""
    with recorded_launches() as launches:
        check(AttentionCase((20, 0, 3), q_length=520, heads=1, kv_heads=1, dim=16, value_dim=16))
    assert [launch.name for launch in launches[-2:]] == ["keys_kernel", "queries_kernel"]


@kinds
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales_of_any_sign(scale, kind):
    case = AttentionCase((20, 0, 70), query=kind, q_length=5, q_lengths=(20, 1, 9), causal=True, scale=scale)
    check(case)
