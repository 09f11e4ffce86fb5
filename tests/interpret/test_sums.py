"""Sums of what several CTAs have of dQ."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from jaggedtensor.kernels.shared.gradients import sum_of_slots


def test_slots_of_a_head_are_added_and_no_others():
    generator = torch.Generator().manual_seed(0)
    length, group, dim = 5, 2, 40
    slots = torch.randn(40, 16, 64, generator=generator)
    slots[21], slots[:, length * group :], slots[:, :, dim:] = torch.nan, torch.nan, torch.nan
    merges = torch.tensor([(-1, 0, 0, 1, 0, 21), (-1, 1, 0, 1, 22, 17), (-1, 2, 0, 1, 39, 0)], dtype=torch.int32)
    q = torch.empty(length, 3 * group, dim, dtype=torch.float16)
    got = sum_of_slots(slots, merges, q, group)
    for head, (first, count) in enumerate(merges[:, 4:].tolist()):
        wanted = slots[first : first + count, : length * group, :dim].double().sum(0).view(length, group, dim)
        error = (got[:, head * group : (head + 1) * group].double() - wanted).abs()
        assert (error <= 2**-10 * wanted.abs() + 1e-5).all()
