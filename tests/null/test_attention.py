"""Attention through the public API: every kind of query, mask and shape, against float64 attention of torch, sequence
after sequence. The kernel of the CPU and the reference must both pass."""

import math

import pytest
import torch

from jaggedtensor import JaggedTensor, attend
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import LENGTHS, AttentionCase, assert_attention_within_budget, make_jagged

KINDS = list(QueryKind)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MASKS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (0, None)},
    {"window": (None, 2)},
    {"window": 1},
    {"causal": True, "window": (3, None)},
]
backends = pytest.mark.parametrize("backend", [None, "reference"])


def mask_name(mask):
    return "-".join(f"{name}={value}" for name, value in mask.items()) or "unmasked"


def check(case, backend, **options):
    assert_attention_within_budget(case, case.run(backend, **options))


def query_lengths(k_lengths):
    """Shorter than, equal to and longer than the keys; empty where they are not, and the other way."""
    return tuple((n + 3 * i) % 5 for i, n in enumerate(k_lengths))


@backends
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_structure_of_a_batch(lengths, kind, backend):
    """EMP-01..05, ISO-02."""
    for causal in (False, True):
        check(AttentionCase(lengths, query=kind, q_lengths=query_lengths(lengths), causal=causal), backend)


@backends
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("mask", MASKS, ids=mask_name)
def test_every_mask(mask, kind, backend):
    """MSK-01..10: one alignment, from the end, in both passes."""
    check(AttentionCase((6, 5, 0, 3, 9), query=kind, q_length=4, q_lengths=(5, 2, 3, 7, 0), **mask), backend)


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_every_dtype_is_as_near_to_float64_as_the_dtype_allows(kind, dtype, backend):
    case = AttentionCase(
        (65, 0, 3, 130), query=kind, q_length=5, q_lengths=(9, 4, 0, 7), heads=4, kv_heads=2, dtype=dtype
    )
    check(case, backend)
    check(case.with_options(causal=True, dim=16, value_dim=8), backend)


@backends
@pytest.mark.parametrize("heads", [(12, 3), (12, 4), (8, 2), (6, 1), (9, 3), (16, 16), (5, 5), (64, 8)], ids=str)
def test_query_heads_share_key_heads_in_any_ratio(heads, backend):
    """GQA-01, GQA-04, EMP-14."""
    for kind, q_length, causal in ((QueryKind.BROADCAST, 2, False), (QueryKind.JAGGED, 1, True)):
        case = AttentionCase(
            (33, 3, 0),
            query=kind,
            q_length=q_length,
            q_lengths=(1, 0, 1),
            heads=heads[0],
            kv_heads=heads[1],
            causal=causal,
        )
        check(case, backend)


@backends
@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (64, 128), (128, 64), (192, 128), (72, 104), (256, 256)], ids=str)
def test_head_dimensions_of_keys_and_values_are_independent(dims, backend):
    """DIM-02, DIM-06."""
    check(AttentionCase((13, 0, 7), dim=dims[0], value_dim=dims[1]), backend)
    check(
        AttentionCase((13, 0, 7), query=QueryKind.JAGGED, q_lengths=(3, 2, 7), dim=dims[0], value_dim=dims[1]), backend
    )


@backends
def test_every_column_takes_part(backend):
    """DIM-03: probes of one column each."""
    dim = 64
    keys = make_jagged([5, 2], 1, dim)
    values = make_jagged([5, 2], 1, 5, seed=1)
    for column in (0, 31, 32, 63):
        only = torch.zeros(dim, dtype=torch.float64)
        only[column] = 3
        out = keys.attend(only.view(1, 1, dim), values, scale=1.0, backend=backend)
        for i in range(2):
            p = (3 * keys[i][:, 0, column]).softmax(0)
            torch.testing.assert_close(out[i, 0, 0], p @ values[i][:, 0])


@backends
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_offsets_of_either_width_and_both(offsets_dtype, backend):
    """OFS-06."""
    case = AttentionCase(
        (6, 0, 3), query=QueryKind.JAGGED, q_lengths=(2, 1, 4), offsets_dtype=offsets_dtype, causal=True
    )
    check(case, backend)
    q, k, v = case.inputs()
    mixed = JaggedTensor(q.values(), q.offsets().to(torch.int64 if offsets_dtype == torch.int32 else torch.int32))
    assert torch.equal(
        attend(mixed, k, v, causal=True, backend=backend).values(),
        attend(q, k, v, causal=True, backend=backend).values(),
    )


@backends
@pytest.mark.parametrize("length", [*range(60, 70), 127, 128, 129, 250])
def test_no_length_is_special(length, backend):
    """TAIL-01, TAIL-03, TAIL-04, TAIL-09."""
    check(
        AttentionCase((length, 1, 2 * length + 1), heads=4, kv_heads=2, q_length=length % 7 + 1, dtype=torch.bfloat16),
        backend,
    )


@backends
def test_many_sequences_of_all_sizes(backend):
    """EMP-07, EMP-16: groups of similar lengths, empty ones between."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([0, 0, 1, 2, 15, 16, 17, 64])
    lengths = tuple(choices[torch.randint(8, (60,), generator=generator)].tolist())
    check(AttentionCase(lengths, q_length=3), backend)
    check(AttentionCase(lengths, query=QueryKind.JAGGED, q_lengths=lengths[::-1], causal=True), backend)


# -- defaults, and shapes given without a head -------------------------------------------------------------------------


@backends
def test_values_default_to_the_keys(backend):
    case = AttentionCase((4, 0, 2))
    q, k, _ = case.inputs()
    assert torch.equal(k.attend(q, backend=backend), attend(q, k, k, backend=backend))
    assert torch.equal(attend(q, k, backend=backend), attend(q, k, k, backend=backend))


@backends
def test_scale_defaults_to_one_over_the_root_of_the_head_dimension(backend):
    q, k, v = AttentionCase((4, 0, 2), dim=16).inputs()
    assert torch.equal(attend(q, k, v, backend=backend), attend(q, k, v, scale=0.25, backend=backend))
    for scale in (0.0, -1.0, 3):
        check(AttentionCase((4, 0, 2), scale=scale), backend)


@backends
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_one_head_may_be_left_out(kind, backend):
    case = AttentionCase((4, 0, 2), query=kind, q_lengths=(1, 2, 3), heads=1, kv_heads=1)
    q, k, v = case.inputs()
    plain = [x.squeeze(-2) if isinstance(x, torch.Tensor) else x.squeeze(2) for x in (q, k, v)]
    out, lse = attend(*plain, return_lse=True, backend=backend)
    full, full_lse = attend(q, k, v, return_lse=True, backend=backend)
    if kind is QueryKind.JAGGED:
        assert torch.equal(out.values(), full.values().squeeze(-2))
        assert torch.equal(lse, full_lse.squeeze(-1))
    else:
        assert torch.equal(out, full.squeeze(-2))
        assert torch.equal(lse, full_lse.squeeze(1))


@backends
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_shapes_dtypes_and_layouts_of_results(kind, backend):
    case = AttentionCase((4, 0, 2), query=kind, q_length=5, q_lengths=(1, 2, 3), heads=6, kv_heads=2, value_dim=12)
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v = case.with_options(dtype=dtype).inputs()
        out, lse = attend(q, k, v, return_lse=True, backend=backend)
        assert out.dtype == dtype
        assert lse.dtype == wide
        if kind is QueryKind.JAGGED:
            assert out.layout is q.layout
            assert out.shape == (3, None, 6, 12)
            assert lse.shape == (6, 6)
        else:
            assert out.shape == (3, 5, 6, 12)
            assert lse.shape == (3, 6, 5)


def test_a_jagged_result_goes_on_as_a_batch():
    jt = make_jagged([3, 0, 2], 8, dtype=torch.float32)
    heads = jt.unflatten(-1, (2, 4))
    out = heads.attend(heads, causal=True).flatten(-2) + jt
    assert out.layout is jt.layout
    assert torch.nn.Linear(8, 3)(out).sum(1).shape == (3, 3)


# -- what masks mean ---------------------------------------------------------------------------------------------------


def seen(q_length, k_length, backend, **mask):
    """For each query the keys that it sees: values are one-hot, logits all 0."""
    keys = JaggedTensor(torch.zeros(k_length, 4), torch.tensor([0, k_length]))
    values = keys.with_values(torch.eye(k_length))
    query = JaggedTensor(torch.zeros(q_length, 4), torch.tensor([0, q_length]))
    out, lse = attend(query, keys, values, **mask, return_lse=True, backend=backend)
    rows = [[j for j in range(k_length) if row[j] > 0] for row in out.values()]
    for row, keys_seen, each_lse in zip(out.values(), rows, lse, strict=True):
        torch.testing.assert_close(row.sum(), torch.tensor(float(bool(keys_seen))))
        expected = math.log(len(keys_seen)) if keys_seen else -math.inf
        torch.testing.assert_close(each_lse, torch.tensor(expected))
    return rows


@backends
@pytest.mark.parametrize(
    ("q_length", "k_length", "mask", "expected"),
    [
        (2, 4, {"causal": True}, [[0, 1, 2], [0, 1, 2, 3]]),
        (3, 2, {"causal": True}, [[], [0], [0, 1]]),
        (7, 3, {"causal": True}, [[], [], [], [], [0], [0, 1], [0, 1, 2]]),
        (1, 9, {"causal": True}, [[*range(9)]]),
        (4, 4, {"window": (1, 0)}, [[0], [0, 1], [1, 2], [2, 3]]),
        (4, 4, {"window": 1}, [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]),
        (4, 4, {"window": 0}, [[0], [1], [2], [3]]),
        (2, 4, {"window": (0, 0)}, [[2], [3]]),
        (4, 2, {"window": (0, 1)}, [[], [0], [0, 1], [1]]),
        (4, 4, {"window": (1, 2), "causal": True}, [[0], [0, 1], [1, 2], [2, 3]]),
        (2, 3, {"window": (None, 0)}, [[0, 1], [0, 1, 2]]),
        (2, 3, {"window": (-1, -1)}, [[0, 1, 2], [0, 1, 2]]),
        (3, 3, {"window": (0, None)}, [[0, 1, 2], [1, 2], [2]]),
        (3, 3, {"window": [100, 100]}, [[0, 1, 2]] * 3),
    ],
)
def test_a_window_counts_keys_from_the_end(q_length, k_length, mask, expected, backend):
    """MSK-01, MSK-04."""
    assert seen(q_length, k_length, backend, **mask) == expected


@backends
def test_a_window_of_three_before_shows_four_keys(backend):
    """MSK-04."""
    assert [len(x) for x in seen(10, 10, backend, window=(3, 0))] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


@backends
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "mask"),
    [((129,), (64,), {"causal": True}), ((129,), (32,), {"window": (32, 64)}), ((5, 2), (0, 1), {"causal": True})],
)
def test_rows_that_see_no_key_give_zero_and_minus_infinity_and_no_gradient(q_lengths, k_lengths, mask, backend):
    """MSK-02, MSK-05, contract 1."""
    case = AttentionCase(k_lengths, query=QueryKind.JAGGED, q_lengths=q_lengths, **mask)
    got, exact = case.run(backend), case.exact()
    blind = exact.lse.isinf()
    assert blind.any()
    assert torch.equal(got.lse.isinf(), blind)
    assert not got.out[blind].any()
    assert not got.dq[blind].any()
    check(case, backend)


@backends
def test_a_window_far_into_a_long_sequence(backend):
    """MSK-07, MSK-08: whole blocks of keys masked before the first one that is seen."""
    check(AttentionCase((700,), query=QueryKind.JAGGED, q_lengths=(185,), window=(0, 60)), backend)
    check(
        AttentionCase(
            (3000, 5), query=QueryKind.JAGGED, q_lengths=(16, 16), window=(0, 256), dtype=torch.float16, dim=59
        ),
        backend,
    )
    check(AttentionCase((3000, 5), query=QueryKind.BROADCAST, q_length=16, window=(0, 256)), backend)
