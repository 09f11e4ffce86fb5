"""torch.compile traces how a call is planned for GPUs that are not there: no graph break, no warning."""

import pytest
import torch

from jaggedtensor import JaggedTensor, attend
from jaggedtensor.kernels import cpu, dispatch, toolchain
from jaggedtensor.problem import AttentionProblem, Device


def self_attention(keys):
    return attend(keys, keys, causal=True).values()


@pytest.mark.parametrize(("arch", "name"), [((8, 0), "portable"), ((9, 0), "hopper"), ((10, 0), "blackwell")], ids=str)
@pytest.mark.parametrize("train", [False, True])
def test_planning_for_a_gpu_is_traced(monkeypatch, arch, name, train):
    if name != "portable" and toolchain.triton_version() < toolchain.GLUON_NEEDS:
        pytest.skip("needs Gluon")
    if not toolchain.HAS_TRITON:
        pytest.skip("needs Triton")
    device = Device("cuda", arch, 132, 227 << 10)
    for method in ("of", "_look_up"):
        monkeypatch.setattr(Device, method, classmethod(lambda cls, _: device))
    monkeypatch.setattr("jaggedtensor.problem._PROBLEMS", {})
    for family in ("hopper", "blackwell", "portable"):  # what runs in the end
        monkeypatch.setitem(dispatch._LAUNCHERS, family, cpu)
    monkeypatch.setattr(dispatch, "_has_passed", lambda name, arch: True)
    torch._dynamo.reset()
    keys = JaggedTensor.from_lengths(torch.randn(105, 2, 64).bfloat16(), torch.tensor([30, 0, 70, 5]))
    query = torch.randn(40, 2, 64).bfloat16().requires_grad_(train)
    problem = AttentionProblem.of(query, keys.values(), keys.values(), None, -1, -1, False)
    assert dispatch.choose(problem).implementation.name == name
    for function, args in ((attend, (query, keys)), (self_attention, (keys,))):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*args), function(*args))
    if train:
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        (grad,) = torch.autograd.grad(compiled(query, keys).sum(), [query])
        (expected,) = torch.autograd.grad(attend(query, keys).sum(), [query])
        torch.testing.assert_close(grad, expected)
