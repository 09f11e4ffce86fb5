"""Which assembler there is decides which kernels serve the backward pass on Hopper."""

import pytest
import torch

from jaggedtensor.kernels import toolchain
from jaggedtensor.kernels.hopper.plan import backward_lacks
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

H200 = Device("cuda", (9, 0), 132, 227 << 10)


def problem_of(query):
    q_len = 64 if query is QueryKind.BROADCAST else None
    return AttentionProblem(query, q_len, 4, 4, 128, 128, torch.bfloat16, H200)


@pytest.mark.parametrize(
    ("triton", "cuda", "takes"),
    [((3, 8), "12.8", False), ((3, 8), "13.0", True), ((3, 9), "12.8", True), ((3, 10), None, True)],
)
def test_the_general_backward_needs_an_assembler_that_does_not_crash(monkeypatch, triton, cuda, takes):
    monkeypatch.setattr(toolchain, "_TRITON_VERSION", triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    lacks = backward_lacks(problem_of(QueryKind.JAGGED))
    assert lacks == (
        [] if takes else ["needs triton >= 3.9, or torch for CUDA 13, not triton 3.8 and torch for CUDA 12.8"]
    )
    assert backward_lacks(problem_of(QueryKind.BROADCAST)) == []
