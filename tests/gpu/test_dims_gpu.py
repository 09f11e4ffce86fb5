"""Portable kernels on a GPU: head dimensions."""

import os

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing.bounds import Call, query_of

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def check(call, **options):
    return call.checked(BACKEND, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(72, 72), (104, 104), (40, 24), (80, 96), (17, 33), (1, 1)], ids=str)
def test_head_dimensions_that_are_no_powers_of_two(dims, dtype):
    """DIM-02: no column of the next head is touched."""
    lengths = (729, 50, 1) if dtype == torch.bfloat16 else (150, 50, 1)
    for query in (30, lengths):
        check(Call.random(lengths, query, heads=(3, 3), dims=dims, dtype=dtype))


@pytest.mark.parametrize("dim", [16, 64, 72, 128, 192, 256])
def test_every_column_takes_part(dim):
    """DIM-03: of all columns one after the other; the result depends on nothing else."""
    for column in (0, dim // 2 - 1, dim - 2, dim - 1):
        call = Call.random((20, 3), 2, heads=(1, 1), dims=(dim, dim), scale=1.0)
        for x in (call.query, call.keys.values()):
            kept = x[..., column].clone()
            x.zero_()
            x[..., column] = kept
        got = check(call)
        assert (got.out - call.values.values()[:20].float().mean(0)).abs().max() > 0.05


@pytest.mark.parametrize("dims", [(128, 64), (64, 128), (192, 128), (256, 32), (32, 256)], ids=str)
@kinds
def test_keys_and_values_of_different_dimensions(kind, dims):
    """DIM-06."""
    lengths = (130, 7)
    check(Call.random(lengths, heads=(4, 4), dims=dims, **query_of(kind, 40, lengths)))


@pytest.mark.parametrize("dim", [257, 384, 512])
def test_head_dimensions_too_large_are_refused(dim):
    """DIM-05."""
    with pytest.raises(NotImplementedError, match="256"):
        Call.random((64, 64), 4, dims=(dim, dim)).run(BACKEND)
