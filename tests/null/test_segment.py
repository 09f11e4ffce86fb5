"""The primitives that ragged operations are made of: derivatives of first and second order, and what torch asks of an
operator."""

import pytest
import torch

from jaggedtensor.ops.segment import segment_cumsum, segment_expand, segment_max, segment_sum
from jaggedtensor.testing import LENGTHS, make_jagged, offsets_of
from jaggedtensor.testing.cases import random_tensor

LAYOUTS = {
    "mixed": ((3, 0, 1, 2), 0),
    "slack": ((2, 0, 1), 2),
    "empty at both ends": ((0, 2, 0), 0),
    "all empty": ((0, 0), 0),
    "no sequences": ((), 1),
}


def segments(lengths, slack, offsets_dtype=torch.int64):
    layout = make_jagged(lengths, slack=slack, offsets_dtype=offsets_dtype).layout
    return layout.offsets(), layout.sequence_ids(sum(lengths) + slack)


def rows_of(lengths, slack, dtype=torch.float64):
    return random_tensor(sum(lengths) + slack, 2, dtype=dtype, seed=3)


OPERATORS = {
    "sum": lambda x, at: segment_sum(x, *at),
    "expand": lambda x, at: segment_expand(x, *at),
    "max": lambda x, at: segment_max(x, *at),
    "cumsum": lambda x, at: segment_cumsum(x, *at, False),
    "cumsum from the end": lambda x, at: segment_cumsum(x, *at, True),
}


def input_of(name, lengths, slack, dtype=torch.float64):
    if name == "expand":
        return random_tensor(len(lengths), 2, dtype=dtype, seed=3)
    return rows_of(lengths, slack, dtype)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("lengths", "slack"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_first_and_second_derivatives(name, lengths, slack):
    at = segments(lengths, slack)
    x = input_of(name, lengths, slack).requires_grad_()
    function = lambda x: OPERATORS[name](x, at).nan_to_num(neginf=0)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


RAGGED = ["sum", "mean", "amax", "amin", "std", "logsumexp", "softmax", "log_softmax", "cumsum"]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("lengths", "slack"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_ragged_operations_have_first_and_second_derivatives(name, lengths, slack):
    jt = make_jagged(lengths, 2, slack=slack)
    live = jt.values()[: jt.num_tokens].clone().requires_grad_()

    def function(x):  # NaN in slack is beyond finite differences
        padded = torch.cat((x, jt.values()[jt.num_tokens :]))
        result = getattr(jt.with_values(padded), name)(1)
        result = result if isinstance(result, torch.Tensor) else result.values()
        return torch.where(result.isfinite(), result, 0)

    assert torch.autograd.gradcheck(function, live)
    assert torch.autograd.gradgradcheck(function, live)


MOVES = {
    "to_padded": lambda jt: jt.to_padded(max_length=4),
    "cut": lambda jt: jt[:, -2:].values(),
    "pick": lambda jt: jt[[0, 0, -1]].values() if jt.batch_size else jt.values(),
    "first": lambda jt: jt.first(),
    "last": lambda jt: jt.last(),
    "cat 1": lambda jt: torch.cat([jt, jt * 2], dim=1).values(),
    "expand": lambda jt: (jt * jt.sum(1, keepdim=True)).values(),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize(("lengths", "slack"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_moving_tokens_has_first_and_second_derivatives(name, lengths, slack):
    jt = make_jagged(lengths, 2, slack=slack)
    live = jt.values()[: jt.num_tokens].clone().requires_grad_()
    tail = torch.zeros_like(jt.values()[jt.num_tokens :])
    function = lambda x: MOVES[name](jt.with_values(torch.cat((x, tail))))
    assert torch.autograd.gradcheck(function, live)
    assert torch.autograd.gradgradcheck(function, live)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_sums_from_either_end(lengths, reverse):
    at = segments(lengths, 2)
    x = rows_of(lengths, 2)
    got = segment_cumsum(x, *at, reverse)
    parts = x[: sum(lengths)].split(list(lengths)) if lengths else []
    expected = [p.flip(0).cumsum(0).flip(0) if reverse else p.cumsum(0) for p in parts]
    torch.testing.assert_close(got, torch.cat([*expected, torch.zeros(2, 2, dtype=torch.float64)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_accumulated_in_float32(dtype):
    at = segments((300,), 0)
    x = torch.full((300, 1), 0.5, dtype=dtype)
    assert segment_sum(x, *at).dtype == segment_cumsum(x, *at, False).dtype == torch.float32
    assert segment_sum(x, *at).item() == 150
    assert segment_cumsum(x, *at, False)[-1].item() == 150


def test_extrema_of_nothing_are_the_lowest_value_of_the_dtype():
    offsets, ids = segments((0, 1), 0)
    assert segment_max(torch.ones(1, 1), offsets, ids)[0] == -torch.inf
    assert segment_max(torch.ones(1, 1, dtype=torch.int32), offsets, ids)[0] == torch.iinfo(torch.int32).min


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_operators_keep_their_promises_to_torch(name, dtype, strided):
    """opcheck: schema, fake tensors, autograd and compilation."""
    offsets, ids = segments((3, 0, 1, 2), 1, torch.int32)
    x = input_of(name, (3, 0, 1, 2), 1, dtype)
    if strided:
        x = x.T.contiguous().T
    x.requires_grad_(dtype.is_floating_point and not strided)
    operator = {"sum": segment_sum, "expand": segment_expand, "max": segment_max}.get(name, segment_cumsum)
    args = (x, offsets, ids, *([name.endswith("end")] if operator is segment_cumsum else []))
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    if dtype == torch.float32:
        utils += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(operator, args, test_utils=utils)


def test_offsets_of_either_width_give_the_same():
    x = rows_of((3, 0, 1), 1)
    for name, operator in OPERATORS.items():
        x = input_of(name, (3, 0, 1), 1)
        narrow, wide = (operator(x, segments((3, 0, 1), 1, d)) for d in (torch.int32, torch.int64))
        assert torch.equal(narrow, wide)
    assert offsets_of([3, 0, 1], torch.int32).dtype == torch.int32
