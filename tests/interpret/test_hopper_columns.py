"""lse and delta of query rows as columns of an operand: three numbers of bf16 whose sum has all bits."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from jaggedtensor.kernels.hopper.attention_bwd.columns import columns_of, divisible


@pytest.mark.parametrize("scale", [0.088, -0.3, 1e-20])
@pytest.mark.parametrize("jagged", [True, False])
@pytest.mark.parametrize("with_grad_lse", [True, False])
def test_sums_of_columns_are_lse_and_delta(jagged, with_grad_lse, scale):
    generator = torch.Generator().manual_seed(0)
    shape = (53, 3, 40) if jagged else (4, 9, 3, 40)
    out, grad_out = (torch.randn(shape, generator=generator) for _ in range(2))
    lse = torch.randn(shape[:-1] if jagged else (4, 3, 9), generator=generator) * 20
    lse.view(-1)[7] = -math.inf  # a row that sees nothing
    grad_lse = torch.randn(lse.shape, generator=generator) if with_grad_lse else None
    delta = (out * grad_out).sum(-1)
    rows = lse if jagged else lse.transpose(1, 2)
    if grad_lse is not None:
        delta -= grad_lse if jagged else grad_lse.transpose(1, 2)
    columns = columns_of(out, grad_out, grad_lse, lse, scale).float()
    assert columns.shape == (out.numel() // 120, 3, 16)
    got_lse, nothing, got_delta, no_more = columns.double().split([3, 5, 3, 5], -1)
    assert not nothing.any()
    assert not no_more.any()
    got_lse, got_delta = (-x.sum(-1).view(rows.shape) for x in (got_lse, got_delta))
    blind = rows == -math.inf
    assert int(blind.sum()) == 1
    assert not got_delta[blind].any()
    # The product of such a row and the scale is far below 0 whatever its score.
    assert (got_lse[blind] * scale > 1e18).all()
    exact = rows[~blind].double() / scale
    assert ((got_lse[~blind] - exact).abs() <= 2e-7 * exact.abs()).all()
    assert torch.allclose(got_delta[~blind], delta[~blind].double(), rtol=1e-5, atol=1e-5)


def test_no_rows_have_no_columns():
    nothing = torch.zeros(0, 2, 64)
    assert columns_of(nothing, nothing, None, torch.zeros(0, 2), 1.0).shape == (0, 2, 16)


def test_what_is_no_scale_divides_by_one():
    assert [divisible(x) for x in (0.0, 1e-40, -0.2, 1e-20)] == [1.0, 1.0, -0.2, 1e-20]
