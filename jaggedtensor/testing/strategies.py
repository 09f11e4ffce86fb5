"""Hypothesis strategies for jagged batches: shapes are drawn, values follow from a drawn seed.

>>> from hypothesis import given
>>> @given(batches())
... def test_sum_of_an_empty_sequence_is_zero(batch):
...     assert not batch.sum(1)[batch.lengths() == 0].any()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.cases import LENGTHS, make_jagged

FEATURES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3))


def lengths(max_batch: int = 6, max_length: int = 6) -> st.SearchStrategy[list[int]]:
    """Lengths of a batch. Most have an empty and a one-token sequence somewhere; some have nothing at all."""
    mixed = st.lists(st.integers(0, max_length), max_size=max(max_batch - 3, 0)).flatmap(
        lambda others: st.permutations([0, 0, 1, *others])
    )
    known = [list(x) for x in LENGTHS.values() if len(x) <= max_batch and max(x, default=0) <= max_length]
    return st.one_of(mixed, st.sampled_from(known))


def features() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of a token: a number, a vector, a matrix."""
    return st.sampled_from(FEATURES)


@st.composite
def batches(
    draw: st.DrawFn,
    feature: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    of_lengths: Sequence[int] | None = None,
    max_slack: int = 3,
) -> JaggedTensor:
    """A JaggedTensor: offsets of either dtype, values contiguous or not, slack full of poison.

    Args:
        feature: the shape of a token, or a strategy for it; one of `FEATURES` if left out.
        of_lengths: the lengths to use, for a second batch on the structure of a first.
    """
    shape = feature if isinstance(feature, tuple) else draw(features() if feature is None else feature)
    return make_jagged(
        draw(lengths()) if of_lengths is None else of_lengths,
        *shape,
        dtype=dtype,
        offsets_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        slack=draw(st.integers(0, max_slack)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
