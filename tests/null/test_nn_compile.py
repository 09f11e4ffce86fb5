"""Modules of jaggedtensor.nn go through torch.compile as one graph, and through torch.export."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from jaggedtensor import JaggedTensor
from jaggedtensor.nn import JaggedAttention, JaggedTransformerLayer, PMAPooling
from jaggedtensor.testing import make_jagged

BATCHES = [(3, 0, 5), (6, 1), (0, 2, 2, 4), (7, 7, 0, 0, 1), (1, 2, 3, 4, 5, 6)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Builds the batch inside the graph, and runs a layer and a pool on it."""

    def __init__(self, dim=8):
        super().__init__()
        self.layer = JaggedTransformerLayer(dim, 2, 16, kv_heads=1, causal=True, rotary=True, qk_norm=True)
        self.pool = PMAPooling(dim, 2, 2, hidden=0, norm=nn.RMSNorm)

    def forward(self, values, offsets):
        return self.pool(self.layer(JaggedTensor(values, offsets))).flatten(1)


def results_and_gradients(module, call, *inputs):
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


def assert_as_eager(module, compiled, *inputs):
    for a, b in zip(*(results_and_gradients(module, call, *inputs) for call in (compiled, module)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_layer_and_pool_are_one_graph_for_all_batches():
    torch.manual_seed(0)
    module = Model()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for number, lengths in enumerate(BATCHES[:3]):
        jt = make_jagged(lengths, 8, dtype=torch.float32, slack=1)
        assert_as_eager(module, compiled, jt.values(), jt.offsets())
        if number == 0:
            seen = counter.frame_count
    assert counter.frame_count == seen


def test_cross_attention_and_dense_queries_are_one_graph():
    torch.manual_seed(0)
    cross = JaggedAttention(8, 2, key_dim=4, causal=True, rotary=True)
    dense = JaggedAttention(8, 2, key_dim=4)

    def function(q, q_offsets, k, k_offsets, learned):
        query, key = JaggedTensor(q, q_offsets), JaggedTensor(k, k_offsets)
        return cross(query, key).sum(1) + dense(learned, key).sum(1)

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for lengths in BATCHES[:3]:
        query = make_jagged(lengths, 8, dtype=torch.float32)
        key = make_jagged([n + 1 for n in lengths], 4, dtype=torch.float32, seed=1)
        inputs = (query.values(), query.offsets(), key.values(), key.offsets(), torch.randn(3, 8))
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


def test_compiled_under_autocast():
    torch.manual_seed(0)
    module = Model()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    jt = make_jagged((3, 0, 5), 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, wanted = compiled(jt.values(), jt.offsets()), module(jt.values(), jt.offsets())
    torch.testing.assert_close(mine, wanted, rtol=0.05, atol=0.05)


class Taking(nn.Module):
    """Takes a batch and gives one and a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = JaggedTransformerLayer(8, 2, 16, causal=True, rotary=True)
        self.pool = PMAPooling(8, 2)

    def forward(self, jt):
        jt = self.layer(jt)
        return jt, self.pool(jt)


def test_modules_are_exported_for_batches_of_any_size():
    torch.manual_seed(0)
    module = Taking().eval()
    jt = make_jagged((3, 0, 5), 8, dtype=torch.float32)
    rows, ends = torch.export.Dim("rows", min=2), torch.export.Dim("ends", min=3)
    exported = torch.export.export(module, (jt,), dynamic_shapes=([{0: rows}, {0: ends}],), strict=False)
    for lengths in BATCHES:
        other = make_jagged(lengths, 8, dtype=torch.float32, seed=1)
        for mine, wanted in zip(exported.module()(other), module(other), strict=True):
            mine, wanted = (x.values() if isinstance(x, JaggedTensor) else x for x in (mine, wanted))
            torch.testing.assert_close(mine, wanted)
