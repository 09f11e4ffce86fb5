"""A batch survives what a training program puts data through: pickles, copies, files, workers, pytrees."""

import copy
import io
import pickle

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

import jaggedtensor
from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.testing import LENGTHS, make_jagged, offsets_of


def assert_same(a, b):
    assert isinstance(a, JaggedTensor)
    assert a.values().dtype == b.values().dtype
    assert a.offsets().dtype == b.offsets().dtype
    assert torch.equal(a.values().nan_to_num(7), b.values().nan_to_num(7))
    assert torch.equal(a.offsets(), b.offsets())


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_batch_comes_back_equal(lengths, through):
    """BOX-01."""
    for dtype, offsets_dtype in (
        (torch.float32, torch.int64),
        (torch.bfloat16, torch.int32),
        (torch.int64, torch.int64),
    ):
        jt = make_jagged(lengths, 2, dtype=dtype, offsets_dtype=offsets_dtype, slack=1)
        other = through(jt)
        assert_same(other, jt)
        assert other.values().data_ptr() != jt.values().data_ptr()
        assert other.max_length == jt.max_length


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES.keys())
def test_batches_that_share_a_layout_still_share_one(through):
    jt = make_jagged([3, 0, 2], 4)
    box = through({"keys": jt, "values": jt.with_values(torch.zeros(5, 2)), "more": [jt]})
    assert box["keys"].layout is box["values"].layout
    assert box["keys"].values() is box["more"][0].values()


@pytest.mark.parametrize("through", [*COPIES.values(), copy.copy], ids=[*COPIES.keys(), "copy"])
def test_leaves_stay_leaves(through):
    other = through(make_jagged([3, 0, 2], 4, requires_grad=True))
    assert other.requires_grad
    assert other.values().is_leaf


def test_a_shallow_copy_shares_everything():
    jt = make_jagged([3, 0, 2], 4)
    other = copy.copy(jt)
    assert other is not jt
    assert other.values() is jt.values()
    assert other.layout is jt.layout


def test_what_a_copy_caches_is_its_own():
    """BOX-07, BOX-09."""
    jt = make_jagged([3, 0, 2], 4)
    jt.lengths(), jt.sum(1), jt.max_length
    other = copy.deepcopy(jt)
    assert other.lengths() is not jt.lengths()
    assert torch.equal(other.lengths(), jt.lengths())


def test_a_layout_alone_comes_back():
    layout = JaggedLayout(offsets_of([3, 0, 2]), max_length=7)
    for through in COPIES.values():
        other = through(layout)
        assert isinstance(other, JaggedLayout)
        assert other.same_as(layout)
        assert other.max_length == 7


def test_a_file_that_was_tampered_with_is_refused():
    state = make_jagged([3, 0, 2]).layout.__getstate__()
    layout = JaggedLayout.__new__(JaggedLayout)
    with pytest.raises(ValueError, match="offsets must be non-decreasing"):
        layout.__setstate__({**state, "offsets": torch.tensor([0, 3, 1, 5])})
    bad = JaggedLayout(torch.tensor([0, 3, 9]), validate=False)
    pickled = pickle.dumps(bad)
    assert pickle.loads(pickled).num_tokens == 9
    tampered = JaggedTensor._of(torch.zeros(5), bad)
    with pytest.raises(ValueError, match=r"offsets\[-1\] must be at most 5 \(rows of values\), got 9"):
        pickle.loads(pickle.dumps(tampered))


# -- DataLoader --------------------------------------------------------------------------------------------------------


class Histories(Dataset):
    """Users with a history each; user 2 has none."""

    def __init__(self, kind="tensor"):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.arange(0 if i == 2 else i + 1)
        if self.kind == "tensor":
            return ids
        if self.kind == "batch":
            return make_jagged([i, 1], 2, dtype=torch.float32)
        return {"ids": ids, "times": (ids.float() / 2, float(i)), "label": i % 2}


def expected(start):
    return [0 if i == 2 else i + 1 for i in range(start, start + 4)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("context", "collate"),
    [
        (None, jaggedtensor.collate),
        (None, default_collate),
        ("fork", jaggedtensor.collate),
        ("fork", default_collate),
        ("spawn", jaggedtensor.collate),
    ],
)
def test_loader_workers_make_batches(context, collate):
    """BOX-01."""
    options = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    loader = DataLoader(Histories("dict"), batch_size=4, collate_fn=collate, **options)
    for number, batch in enumerate(loader):
        assert isinstance(batch["ids"], JaggedTensor)
        assert batch["ids"].lengths().tolist() == expected(4 * number)
        times, starts = batch["times"]
        assert torch.equal(times.values(), batch["ids"].values() / 2)
        assert starts.tolist() == [4.0 * number + i for i in range(4)]
        assert batch["label"].tolist() == [0, 1, 0, 1]
    assert number == 1


@pytest.mark.parametrize("collate", [jaggedtensor.collate, default_collate], ids=["collate", "default_collate"])
def test_batches_of_batches_are_joined(collate):
    for batch in DataLoader(Histories("batch"), batch_size=4, collate_fn=collate):
        assert isinstance(batch, JaggedTensor)
        assert batch.batch_size == 8
        assert batch.lengths()[1::2].tolist() == [1] * 4


def test_collate_makes_tensors_of_any_length_jagged():
    equal = [torch.zeros(2, 3), torch.ones(2, 3)]
    assert jaggedtensor.collate(equal).lengths().tolist() == [2, 2]
    assert jaggedtensor.collate([torch.zeros(0, 3), torch.ones(2, 3)]).lengths().tolist() == [0, 2]
    assert jaggedtensor.collate([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    assert jaggedtensor.collate([1, 2]).tolist() == [1, 2]
    assert jaggedtensor.collate(["a", "b"]) == ["a", "b"]
    np = pytest.importorskip("numpy")
    assert jaggedtensor.collate([np.zeros(1), np.zeros(3)]).lengths().tolist() == [1, 3]


def test_default_collate_still_stacks_what_it_stacked():
    equal = [torch.zeros(2, 3), torch.ones(2, 3)]
    assert torch.equal(default_collate(equal), torch.stack(equal))
    assert torch.equal(default_collate([torch.tensor(1), torch.tensor(2)]), torch.tensor([1, 2]))
    assert default_collate([{"a": 1, "b": (2.0, "x")}, {"a": 2, "b": (3.0, "y")}])["b"][1] == ("x", "y")
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate([torch.zeros(2, 3), torch.zeros(2, 4)])
    assert default_collate([torch.zeros(2, 3), torch.zeros(1, 3)]).lengths().tolist() == [2, 1]


def test_pin_memory_of_a_loader_finds_the_tensors():
    """It calls the method of whatever has one; without a GPU there is nothing to pin."""
    assert callable(JaggedTensor.pin_memory)
    assert make_jagged([3, 0]).is_pinned() is False


# -- pytree ------------------------------------------------------------------------------------------------------------


def test_leaves_of_the_pytree_are_values_and_offsets():
    jt = make_jagged([3, 0, 2], 4)
    leaves, spec = pytree.tree_flatten({"x": jt})
    assert leaves[0] is jt.values()
    assert leaves[1] is jt.offsets()
    back = pytree.tree_unflatten(leaves, spec)["x"]
    assert_same(back, jt)
    assert back.values() is jt.values()
    assert back.layout.same_as(jt.layout)


def test_key_paths_name_values_and_offsets():
    leaves, _ = pytree.tree_flatten_with_path({"x": make_jagged([3, 0, 2], 4)})
    assert [pytree.keystr(path) for path, _ in leaves] == ["['x'].values", "['x'].offsets"]


def test_tree_map_reaches_both():
    jt = make_jagged([3, 0, 2], 4)
    moved = pytree.tree_map(lambda x: x.to("meta"), {"x": jt})["x"]
    assert moved.values().is_meta
    assert moved.offsets().is_meta
    doubled = pytree.tree_map_only(torch.Tensor, lambda x: x * 2 if x.is_floating_point() else x, jt)
    assert torch.equal(doubled.values(), jt.values() * 2)
    assert torch.equal((doubled + jt).values(), jt.values() * 3)  # same offsets object: same layout


def test_a_tree_may_hold_anything_in_place_of_tensors():
    jt = make_jagged([3, 0, 2], 4)
    shapes = pytree.tree_map(lambda x: tuple(x.shape), jt)
    assert pytree.tree_leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)) == [(5, 4), (4,)]


def test_a_spec_can_be_serialised():
    _, spec = pytree.tree_flatten({"x": make_jagged([3, 0, 2], 4)})
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_specs_do_not_depend_on_what_is_cached():
    a, b = make_jagged([3, 0, 2], 4), make_jagged([1], 4)
    a.max_length, a.lengths()
    assert pytree.tree_structure(a) == pytree.tree_structure(b)


# -- streams and devices -----------------------------------------------------------------------------------------------


def test_record_stream_does_nothing_on_a_cpu():
    jt = make_jagged([3, 0, 2], 4)
    jt.lengths(), jt.sum(1)
    assert jt.record_stream(None) is None
