"""What attention refuses before anything runs, and how: name, expected, got, remedy."""

import math

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor, attend
from jaggedtensor.testing import make_jagged, offsets_of

BACKENDS = [None, "cpu", "reference"]


def keys(*feature, lengths=(3, 0, 2), dtype=torch.float32):
    return make_jagged(lengths, *(feature or (2, 8)), dtype=dtype)


def query(*shape, dtype=torch.float32):
    return torch.zeros(shape or (4, 2, 8), dtype=dtype)


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (7, 2), (4, 8), (0, 2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_must_be_a_multiple_of_key_heads(heads, backend):
    """GQA-03: both numbers are in the message."""
    of_q, of_k = heads
    message = rf"heads of query must be a positive multiple of the {of_k} heads of key, got {of_q}"
    for q in (query(4, of_q, 8), query(3, 4, of_q, 8), make_jagged([1, 2, 3], of_q, 8, dtype=torch.float32)):
        with pytest.raises(ValueError, match=message):
            attend(q, keys(of_k, 8), backend=backend)


def test_keys_without_heads_are_refused():
    """GQA-03."""
    with pytest.raises(ValueError, match=r"heads of query must be a positive multiple of the 0 heads of key, got 2"):
        attend(query(4, 2, 8), keys(0, 8))
    with pytest.raises(ValueError, match=r"heads of value must be 2, as of key, got 1"):
        attend(query(), keys(2, 8), keys(1, 8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dimensions_have_limits(backend):
    """DIM-05."""
    for k, v, name, size in ((257, 8, "key", 257), (8, 512, "value", 512), (384, 384, "key", 384)):
        message = rf"the head dimension of {name} must be in 1..256, got {size}"
        with pytest.raises(NotImplementedError, match=message):
            attend(query(4, 2, k), keys(2, k), keys(2, v), backend=backend)
    with pytest.raises(ValueError, match=r"the head dimension of key must be in 1..256, got 0"):
        attend(query(4, 2, 0), keys(2, 0), backend=backend)
    with pytest.raises(ValueError, match=r"the head dimension of query must be 8, as of key, got 16"):
        attend(query(4, 2, 16), keys(2, 8), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_must_be_one_and_floating(backend):
    half = torch.bfloat16
    message = "got query torch.bfloat16, key torch.float32, value torch.float32"
    with pytest.raises(TypeError, match=message):
        attend(query(dtype=half), keys(), backend=backend)
    with pytest.raises(TypeError, match=r"got query torch.float32, key torch.bfloat16, value torch.float64"):
        attend(query(), keys(dtype=half), keys(dtype=torch.float64), backend=backend)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        k = keys().to(dtype) if dtype != torch.complex64 else keys().map_values(lambda x: x.to(torch.complex64))
        with pytest.raises(TypeError, match=r"query, key and value must be bf16, fp16, fp32 or fp64, got"):
            attend(query(dtype=dtype), k, backend=backend)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (
            query(8),
            keys(),
            r"query must be of shape \[Lq, Hq, D\] or \[B, Lq, Hq, D\], as key has 3 dimensions, got float32\[8\]",
        ),
        (query(4, 8), keys(), r"query must be of shape \[Lq, Hq, D\] or \[B, Lq, Hq, D\]"),
        (query(1, 3, 4, 2, 8), keys(), r"query must be of shape \[Lq, Hq, D\] or \[B, Lq, Hq, D\]"),
        (query(3, 4, 2, 8), keys(8), r"query must be of shape \[Lq, D\] or \[B, Lq, D\], as key has 2 dimensions"),
        (keys(8), keys(), r"query must be of shape \[tokens_q, Hq, D\], as key has 3 dimensions"),
        (
            query(),
            make_jagged([2], dtype=torch.float32),
            r"key must be of shape \[tokens, Hkv, D\] or \[tokens, D\], got .*unflatten",
        ),
        (query(), keys(2, 2, 8), r"key must be of shape \[tokens, Hkv, D\] or \[tokens, D\]"),
        (
            query(2, 4, 2, 8),
            keys(),
            r"dimension 0 of query must be 3 \(the batch size of key\), got .*; leave it out to broadcast one query",
        ),
    ],
)
def test_shapes_that_mean_nothing_are_refused(q, k, message):
    with pytest.raises(ValueError, match=message):
        attend(q, k)


def test_values_have_the_rank_of_keys():
    with pytest.raises(ValueError, match=r"value must be of rank 3, as key, got float32\[5, 8\]"):
        attend(query(), keys(), keys(8))


def test_values_are_on_the_layout_of_keys():
    """SLK-06."""
    message = (
        r"value must be on the layout of key, JaggedLayout\(batch_size=3, num_tokens=5, device='cpu'\), got "
        r"JaggedLayout\(.*\); use key.with_values\(v\)"
    )
    for lengths in ((3, 1, 1), (3, 0, 1), (5,), (3, 0, 2, 0)):
        with pytest.raises(ValueError, match=message):
            attend(query(), keys(), keys(lengths=lengths))
    attend(query(), keys(), keys())  # equal values of offsets are enough


def test_batch_sizes_must_agree():
    """OFS-05: both sizes are in the message."""
    with pytest.raises(ValueError, match=r"the batch size of query must be 3, as of key, got 4"):
        attend(keys(lengths=(1, 1, 1, 1)), keys())


def test_many_sequences_in_one_buffer_simply_work():
    """OFS-05: the packed form is the only form."""
    offsets = torch.tensor([0, 3, 11, 20])
    jt = JaggedTensor(torch.randn(20, 2, 8), offsets)
    assert attend(jt, jt).batch_size == 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("key", "key must be a JaggedTensor, got .*; for dense keys use torch's scaled_dot_product_attention"),
        ("value", r"value must be a JaggedTensor on the layout of the keys, got .*; use key.with_values\(v\)"),
        ("query", "query must be a Tensor or a JaggedTensor, got list"),
    ],
)
def test_arguments_of_another_type_are_refused(argument, message):
    arguments = {"query": query(), "key": keys(), "value": keys()}
    arguments[argument] = [1, 2] if argument == "query" else torch.zeros(5, 2, 8)
    with pytest.raises(TypeError, match=message):
        attend(**arguments)


def test_two_devices_are_refused():
    """DEV-01."""
    with pytest.raises(
        ValueError, match=r"query must be on cpu, got float32\[4, 2, 8\] on meta; move it with .to\('cpu'\)"
    ):
        attend(query().to("meta"), keys())
    with pytest.raises(ValueError, match=r"value must be on cpu, got .* on meta"):
        attend(query(), keys(), keys().to("meta"))


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        ((1, 2, 3), TypeError, r"window must be an int or a pair \(left, right\), got \(1, 2, 3\)"),
        (True, TypeError, r"window must be an int or a pair"),
        ("3", TypeError, r"window must be an int or a pair \(left, right\), got '3'"),
        (1.5, TypeError, r"window must be an int or a pair"),
        ((1.5, None), TypeError, r"window must be of ints or None, got \(1.5, None\)"),
        ((True, 1), TypeError, "window must be of ints or None"),
        (-2, ValueError, r"window must be at least 0 on each side \(None or -1: no limit\), got -2"),
        ((0, -5), ValueError, r"window must be at least 0 on each side"),
    ],
)
def test_windows_that_are_none_are_refused(window, error, message):
    with pytest.raises(error, match=message):
        attend(query(), keys(), window=window)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_is_no_number_is_refused(scale, backend):
    with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
        attend(query(), keys(), scale=scale, backend=backend)


def test_unknown_backends_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"backend must be one of 'cpu', .*'reference' or None, got 'gpu'"):
        attend(query(), keys(), backend="gpu")


def test_a_named_backend_runs_or_says_what_it_lacks(monkeypatch):
    """Contract 12: no fallback."""
    message = r"a problem for backend='portable' must be one that a backend serves, got portable: .*cuda.*not on cpu"
    with pytest.raises(NotImplementedError, match=message):
        attend(query(), keys(), backend="portable")
    monkeypatch.setenv("JAGGEDTENSOR_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'nonsense'"):
        attend(query(), keys())
    monkeypatch.setenv("JAGGEDTENSOR_BACKEND", "reference")
    assert torch.equal(attend(query(), keys()), attend(query(), keys(), backend="reference"))


def test_offsets_changed_in_place_are_noticed():
    k = keys()
    q = JaggedTensor(k.values(), JaggedLayout(offsets_of([3, 0, 2])))
    q.layout._offsets[1] = 2
    with pytest.raises(RuntimeError, match=r"offsets must be unchanged since the layout was made"):
        attend(q, k)
    k.layout._offsets[1] = 2
    with pytest.raises(RuntimeError, match=r"offsets must be unchanged since the layout was made"):
        attend(query(), k)


def test_what_runs_forward_runs_backward():
    """Contract 5, TAIL-09: a refusal comes from the forward call or not at all."""
    for lengths in ((31,), (33, 0), (250, 1)):
        jt = make_jagged(lengths, 3, 5, dtype=torch.float32, requires_grad=True)
        jt.attend(jt, window=(7, 3)).values().sum().backward()
        assert jt.grad.values().isfinite().all()


def test_a_device_that_no_backend_serves_is_refused_with_what_each_lacks():
    message = (
        "the attention problem must be one that a backend serves, got cpu: runs on cpu, not on meta; .*"
        "backend='reference' serves everything, slowly"
    )
    with pytest.raises(NotImplementedError, match=message):
        attend(query().to("meta"), keys().to("meta"))
