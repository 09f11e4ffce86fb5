"""A layout is worked out once, shared by all that has the same structure, and cannot change underneath."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.testing import LENGTHS, make_jagged, offsets_of


class Counter:
    """Counts the calls of a torch function, and makes them."""

    def __init__(self, monkeypatch, owner, name):
        self.calls = 0
        self.function = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


# -- identity ----------------------------------------------------------------------------------------------------------


def test_token_wise_operations_share_the_layout_object():
    jt = make_jagged([3, 0, 2], 4, dtype=torch.float32, slack=1)
    weight = torch.randn(4, 4)
    for other in (
        jt.with_values(torch.randn(6, 2)),
        jt + 1,
        2 * jt,
        jt * jt,
        jt.relu(),
        jt @ weight,
        F.linear(jt, weight),
        jt.float(),
        jt.softmax(1),
        jt.cumsum(1),
        jt.sum(-1),
        jt.detach(),
        jt.clone(),
        jt.unsqueeze(2),
        jt.map_values(torch.tanh),
        jt[:, :, 0],
        jt[:],
        jt.to(torch.float64),
        torch.cat([jt, jt], dim=2),
        jt[:, :],
        jt.attend(jt, backend="reference"),
    ):
        assert other.layout is jt.layout


def test_layouts_are_the_same_by_identity_of_offsets():
    offsets = offsets_of([3, 0, 2])
    a, b = JaggedLayout(offsets), JaggedLayout(offsets)
    assert a.same_as(a)
    assert a.same_as(b)
    assert b.same_as(a)


def test_equal_offsets_are_compared_once(monkeypatch):
    equal = Counter(monkeypatch, torch, "equal")
    a, b = JaggedLayout(offsets_of([3, 0, 2])), JaggedLayout(offsets_of([3, 0, 2], torch.int32))
    assert [a.same_as(b) for _ in range(3)] == [True] * 3
    assert equal.calls == 1
    c = JaggedLayout(offsets_of([2, 1, 2]))
    assert [a.same_as(c) for _ in range(3)] == [False] * 3
    assert equal.calls == 2
    assert not a.same_as(JaggedLayout(offsets_of([3, 2])))  # another number of sequences: nothing to compare
    assert equal.calls == 2


def test_same_offsets_are_never_compared_by_value(monkeypatch):
    equal = Counter(monkeypatch, torch, "equal")
    jt = make_jagged([3, 0, 2], 4)
    jt + jt.clone() * jt.detach()
    JaggedTensor(torch.randn(5, 2), jt.offsets()) * jt.sum(-1, keepdim=True)
    assert equal.calls == 0


def test_a_comparison_keeps_no_layout_alive():
    a, b = JaggedLayout(offsets_of([3, 2])), JaggedLayout(offsets_of([3, 2]))
    a.same_as(b)
    gone = weakref.ref(b)
    del b
    gc.collect()
    assert gone() is None


def test_layouts_on_different_devices_are_not_the_same():
    layout = JaggedLayout(offsets_of([3, 2]))
    assert not layout.same_as(layout.to("meta"))


# -- computed once -----------------------------------------------------------------------------------------------------


def test_what_follows_from_offsets_is_computed_once():
    layout = make_jagged([3, 0, 2], slack=1).layout
    for derive in (
        lambda: layout.lengths(),
        lambda: layout.sequence_ids(6),
        lambda: layout.positions(6),
        lambda: layout.row_mask(6),
        lambda: layout.to("meta"),
    ):
        assert derive() is derive()
    assert layout.sequence_ids(5) is not layout.sequence_ids(6)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_derived_tensors_say_where_each_row_belongs(lengths, slack, offsets_dtype):
    layout = make_jagged(lengths, slack=slack, offsets_dtype=offsets_dtype).layout
    rows = sum(lengths) + slack
    ids = [b for b, n in enumerate(lengths) for _ in range(n)] + [len(lengths)] * slack
    places = [j for n in lengths for j in range(n)]
    assert layout.sequence_ids(rows).tolist() == ids
    assert layout.positions(rows)[: sum(lengths)].tolist() == places
    assert layout.row_mask(rows).tolist() == [True] * sum(lengths) + [False] * slack
    assert layout.sequence_ids(rows).dtype == layout.positions(rows).dtype == torch.int64
    assert layout.lengths().tolist() == list(lengths)
    assert layout.lengths().dtype == layout.offsets().dtype == offsets_dtype
    assert (layout.num_tokens, layout.max_length) == (sum(lengths), max(lengths, default=0))
    assert layout.batch_size == len(layout) == len(lengths)
    assert layout.has_slack(rows) == (slack > 0)


def test_tensors_that_share_a_layout_share_one_after_to():
    jt = make_jagged([3, 0, 2], 4)
    other = jt.with_values(torch.randn(5, 2))
    moved, moved_other = jt.to("meta"), other.to("meta")
    assert moved.layout is moved_other.layout
    assert moved.layout.num_tokens == 5  # what the host knew, it still knows
    assert moved.layout.max_length == 3
    assert moved.layout.host_offsets().tolist() == [0, 3, 3, 5]


def test_to_the_same_place_and_dtype_is_the_same_object():
    jt = make_jagged([3, 0, 2], 4)
    assert jt.to("cpu") is jt
    assert jt.cpu() is jt
    assert jt.to(torch.float64) is jt
    assert jt.layout.to("cpu") is jt.layout


def test_offsets_do_not_follow_the_dtype_of_values():
    """BOX-03."""
    for dtype in (torch.int32, torch.int64):
        jt = make_jagged([3, 0, 2], 4, offsets_dtype=dtype)
        for other in (
            jt.to(torch.bfloat16),
            jt.half(),
            jt.to("meta", torch.float16),
            jt.to(torch.empty(1, device="meta")),
        ):
            assert other.offsets().dtype == dtype
            assert other.offsets().device == other.values().device


def test_empty_like_takes_a_device_and_a_dtype():
    """BOX-03."""
    jt = make_jagged([3, 0, 2], 4)
    for like in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like):
        other = like(jt, device="meta", dtype=torch.float16)
        assert isinstance(other, JaggedTensor)
        assert other.values().is_meta
        assert other.offsets().is_meta
        assert other.dtype == torch.float16
        assert other.offsets().dtype == torch.int64
    assert torch.zeros_like(jt).layout is jt.layout


def test_caches_belong_to_the_copy():
    """BOX-07: what the source has cached says nothing of another batch."""
    a = make_jagged([3, 0, 2], 4)
    assert (a.max_length, a.num_tokens) == (3, 5)
    b = a[[0, 0, 2]]
    assert (b.max_length, b.num_tokens, b.lengths().tolist()) == (3, 8, [3, 3, 2])
    c = a[1:]
    assert (c.max_length, c.num_tokens, c.lengths().tolist()) == (2, 2, [0, 2])


# -- declared lengths --------------------------------------------------------------------------------------------------


def test_a_declared_max_length_is_a_bound():
    layout = JaggedLayout(offsets_of([3, 0, 2]), max_length=8)
    jt = JaggedTensor(torch.randn(5), layout)
    assert jt.max_length == layout.known_max_length == 8
    assert jt.to_padded().shape == (3, 8)
    assert jt.to_padded(max_length=4).shape == (3, 4)
    assert jt[1:].max_length == 8
    assert JaggedLayout.from_lengths(torch.tensor([3, 2]), max_length=8).max_length == 8


def test_a_declared_max_length_that_is_too_small_is_refused():
    """SLK-07: no row is dropped."""
    message = r"max_length must be at least 3 \(the longest sequence\), got 2; declare a larger bound"
    with pytest.raises(ValueError, match=message):
        JaggedLayout(offsets_of([3, 0, 2]), max_length=2)
    with pytest.raises(ValueError, match=message):
        JaggedLayout.from_lengths(torch.tensor([3, 2]), max_length=2)
    with pytest.raises(ValueError, match=r"max_length must be at least 0, got -1"):
        JaggedLayout(offsets_of([3, 2]), max_length=-1)


def test_a_longest_length_that_was_worked_out_is_not_declared():
    """It would bind the next batch, after a pickle for example."""
    layout = JaggedLayout(offsets_of([3, 0, 2]))
    assert layout.max_length == 3
    assert layout.declared_max_length is None
    assert pickle.loads(pickle.dumps(layout)).known_max_length is None
    declared = JaggedLayout(offsets_of([3, 0, 2]), max_length=8)
    assert pickle.loads(pickle.dumps(declared)).max_length == 8


# -- immutable ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda jt: jt.offsets(),
        lambda jt: jt.lengths(),
        lambda jt: jt.sum(1),
        lambda jt: jt.to_padded(),
        lambda jt: jt.to_list(),
        lambda jt: jt[0],
        lambda jt: jt[:, 1:],
        lambda jt: jt.attend(torch.randn(1, 4), backend="reference"),
        lambda jt: pickle.dumps(jt),
        lambda jt: jt.to("meta"),
    ],
)
def test_an_in_place_change_of_offsets_is_detected(use):
    jt = make_jagged([3, 0, 2], 4, dtype=torch.float32)
    jt.lengths(), jt.max_length, jt.sum(1)  # nothing cached may hide it
    jt.layout._offsets[1] = 2
    with pytest.raises(
        RuntimeError, match=r"offsets must be unchanged since the layout was made, got an in-place change"
    ):
        use(jt)


def test_offsets_given_are_kept_and_not_copied():
    offsets = offsets_of([3, 2])
    assert JaggedLayout(offsets).offsets() is offsets
    strided = torch.tensor([0, 7, 3, 7, 5, 7])[::2]
    assert JaggedLayout(strided).offsets().is_contiguous()
    assert JaggedLayout(strided).offsets().tolist() == [0, 3, 5]


# -- static storage ----------------------------------------------------------------------------------------------------


def static(offsets=None, **options):
    layout = JaggedLayout.with_capacity(3, max_tokens=8, max_length=5, **options)
    return layout if offsets is None else layout.copy_(offsets)


def test_static_storage_starts_with_empty_sequences():
    layout = static()
    assert layout.is_static
    assert layout.capacity == 8
    assert layout.lengths().tolist() == [0, 0, 0]
    assert JaggedTensor(torch.full((8, 2), float("nan")), layout).sum(1).tolist() == [[0, 0]] * 3


def test_static_storage_is_refilled_in_place():
    layout = static()
    storage = layout.offsets()
    jt = JaggedTensor(torch.arange(8.0), layout)
    for lengths, sums in (([3, 0, 2], [3, 0, 7]), ([0, 5, 3], [0, 10, 18]), ([1, 1, 1], [0, 1, 2])):
        assert layout.copy_(offsets_of(lengths)) is layout
        assert layout.offsets() is storage
        assert layout.lengths().tolist() == lengths
        assert jt.sum(1).tolist() == sums
        assert jt.num_tokens == sum(lengths)
        assert jt.max_length == 5
        assert jt.to_padded().shape == (3, 5)
        assert [x.tolist() for x in jt.to_list()] == [x.tolist() for x in jt.values()[: sum(lengths)].split(lengths)]


def test_static_storage_takes_either_dtype_of_offsets():
    assert static(offsets_of([3, 0, 2], torch.int32)).offsets().dtype == torch.int64
    assert static(offsets_of([3, 0, 2]), dtype=torch.int32).offsets().tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5, 9, 9], r"offsets\[-1\] must be at most 8 \(max_tokens\), got 9; declare a larger capacity"),
        ([0, 6, 6, 6], r"max_length must be at least 6 \(the longest sequence\), got 5"),
        ([0, 1], r"offsets must be of shape \[4\], got int64\[2\] on cpu; fill up with empty sequences"),
        ([0, 2, 1, 3], r"offsets must be non-decreasing, so offsets\[2\] >= 2, got 1"),
        ([1, 2, 3, 3], r"offsets\[0\] must be 0, got 1"),
    ],
)
def test_a_refill_beyond_what_was_declared_is_refused_and_leaves_the_old(offsets, message):
    layout = static(offsets_of([3, 0, 2]))
    with pytest.raises(ValueError, match=message):
        layout.copy_(torch.tensor(offsets))
    assert layout.lengths().tolist() == [3, 0, 2]


def test_only_static_storage_can_be_refilled():
    with pytest.raises(TypeError, match=r"made by JaggedLayout.with_capacity, got an immutable layout; make a new one"):
        JaggedLayout(offsets_of([3, 2])).copy_(offsets_of([2, 3]))


def test_an_in_place_change_of_static_storage_must_go_through_copy():
    layout = static(offsets_of([3, 0, 2]))
    layout.offsets()[1] = 2
    with pytest.raises(RuntimeError, match=r"with_capacity\(...\).copy_\(offsets\)"):
        layout.lengths()


@pytest.mark.parametrize("name", ["batch_size", "max_tokens", "max_length"])
def test_a_negative_capacity_is_refused(name):
    sizes = {"batch_size": 3, "max_tokens": 8, "max_length": 5, name: -1}
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        JaggedLayout.with_capacity(**sizes)


def test_values_on_static_storage_have_the_declared_rows():
    with pytest.raises(ValueError, match=r"rows of values must be 8 \(max_tokens of the layout\), got 7"):
        JaggedTensor(torch.randn(7, 2), static())


def test_static_storage_is_the_same_as_itself_alone():
    a, b = static(offsets_of([3, 0, 2])), static(offsets_of([3, 0, 2]))
    assert a.same_as(a)
    assert not a.same_as(b)  # it may be refilled apart


def test_static_storage_survives_pickle_and_deepcopy():
    layout = static(offsets_of([3, 0, 2]))
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert other.is_static
        assert (other.capacity, other.max_length) == (8, 5)
        other.copy_(offsets_of([0, 5, 3]))
        assert layout.lengths().tolist() == [3, 0, 2]


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "softmax", "cumsum", "logsumexp"])
def test_operations_on_static_storage_follow_its_refill(name):
    """CUG-01 on the host: nothing of the last batch is remembered."""
    layout = static()
    jt = JaggedTensor(torch.randn(8, 2, dtype=torch.float64), layout)
    for lengths in ([3, 0, 2], [0, 5, 3], [1, 1, 1]):
        layout.copy_(offsets_of(lengths))
        fresh = JaggedTensor(jt.values(), offsets_of(lengths))
        mine, theirs = getattr(jt, name)(1), getattr(fresh, name)(1)
        if isinstance(mine, JaggedTensor):
            mine, theirs = mine.values(), theirs.values()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_attention_on_static_storage_follows_its_refill(backend):
    """CUG-01, AUT-02: what a call was planned with is not kept for other lengths."""
    layout, queries = static(), static()
    keys = JaggedTensor(torch.randn(8, 2, 4, dtype=torch.float64), layout)
    jagged = JaggedTensor(torch.randn(8, 2, 4, dtype=torch.float64), queries)
    shared = torch.randn(3, 2, 4, dtype=torch.float64)
    for lengths in ([3, 0, 2], [0, 5, 3], [1, 1, 1], [0, 0, 0]):
        layout.copy_(offsets_of(lengths))
        queries.copy_(offsets_of(lengths[::-1]))
        fresh = JaggedTensor(keys.values(), offsets_of(lengths))
        fresh_query = JaggedTensor(jagged.values(), offsets_of(lengths[::-1]))
        torch.testing.assert_close(keys.attend(shared, backend=backend), fresh.attend(shared, backend=backend))
        mine, theirs = (k.attend(q, causal=True, backend=backend) for k, q in ((keys, jagged), (fresh, fresh_query)))
        torch.testing.assert_close(mine.values(), theirs.values())


# -- shown -------------------------------------------------------------------------------------------------------------


def test_repr_shows_structure_and_never_fails():
    assert repr(JaggedLayout(offsets_of([3, 0, 2]))) == "JaggedLayout(batch_size=3, num_tokens=5, device='cpu')"
    assert "shape=(3, j, 4)" in repr(make_jagged([3, 0, 2], 4))
    assert "tokens=5, longest=3" in repr(make_jagged([3, 0, 2], 4))
    assert "requires_grad=True" in repr(make_jagged([3, 0, 2], 4, requires_grad=True))
    for jt in (
        make_jagged([], 4),
        make_jagged([0, 0]),
        make_jagged([3]).to("meta"),
        JaggedTensor(torch.randn(8), static()),
    ):
        assert repr(jt).startswith("JaggedTensor(")
        assert repr(jt.layout).startswith("JaggedLayout(")
    many = repr(make_jagged([1] * 1000))
    assert len(many) < 200
