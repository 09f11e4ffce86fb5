"""How far a result may be from the exact one: as far as the same formula in the same dtype is, and little further."""

from __future__ import annotations

import torch
from torch import Tensor

# Units in the last place of the largest value, for roundings that the low-precision formula happens to be spared. Half
# precision is computed in fp32 and rounded once; the wide types are computed in themselves, in any order of summation.
_FLOOR = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 8, torch.float64: 64}


def error_budget(low: Tensor, exact: Tensor, *, multiple: float = 3.0) -> float:
    """The largest absolute error allowed: `multiple` times the error of `low`, and some units in the last place.

    Args:
        low: the plain formula evaluated in the dtype under test, and of that dtype; ignored where it overflows.
        exact: the same in float64.

    >>> low, exact = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001], dtype=torch.float64)
    >>> 0.003 < error_budget(low, exact) < 0.0031
    True
    """
    finite = exact.isfinite()
    if not finite.any():
        return 0.0
    errors = (low.double() - exact)[finite & low.isfinite()].abs()
    error = errors.max().item() if errors.numel() else 0.0
    largest = exact[finite].abs().max().item()
    return multiple * error + _FLOOR[low.dtype] * torch.finfo(low.dtype).eps * largest


def assert_within_budget(
    got: Tensor, low: Tensor, exact: Tensor, name: str = "result", *, multiple: float = 3.0
) -> None:
    """Assert that `got` has the dtype of `low`, infinities where `exact` has them, and an error within budget.

    Raises:
        AssertionError: with the error, the budget and the place of the worst element.
    """
    assert got.dtype == low.dtype, f"{name} is {got.dtype}, expected {low.dtype}"
    assert got.shape == exact.shape, f"{name} has shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    got, exact = got.detach().double().cpu(), exact.detach().cpu()
    infinite = exact.isinf()
    assert torch.equal(got[infinite], exact[infinite]), f"{name} is not infinite where it must be"
    error = (got - exact).masked_fill(infinite, 0).abs().nan_to_num(torch.inf)
    if not error.numel():
        return
    budget = error_budget(low.detach().cpu(), exact, multiple=multiple)
    worst = error.flatten().argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    assert error.max() <= budget, (
        f"{name}{list(place)} is {got[place].item():.6g}, expected {exact[place].item():.6g}: "
        f"error {error.max().item():.3g} exceeds the budget {budget:.3g}"
    )
