"""The portable kernels under torch.compile: schedules are built inside the graph, one graph serves every batch, and the
operators keep what they promise to torch."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jaggedtensor import JaggedTensor
from jaggedtensor.ops.contract import attend_bwd, attend_fwd
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, make_jagged
from jaggedtensor.testing.launches import recorded_launches

BATCHES = [(6, 5, 3, 0, 20), (1, 2, 3), (17, 0, 0, 40, 1, 1, 1), (0, 2)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def broadcast(values, offsets, query):
    keys = JaggedTensor(values, offsets)
    return keys.attend(query, backend="portable")


def per_sequence(values, offsets, query):
    keys = JaggedTensor(values, offsets)
    return keys.attend(query.expand(len(keys), -1, -1, -1) * 2, backend="portable", causal=True)


def two_layers(values, offsets, query):
    """Self-attention, then pooling of its result, with as many columns as the model has: nothing may be aliased."""
    x = JaggedTensor(values, offsets)
    x = x + x.attend(x, backend="portable", window=(9, 2))
    return x.attend(query, backend="portable").square()


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [(broadcast, True), (per_sequence, None), (two_layers, None)],
    ids=lambda x: getattr(x, "__name__", "dynamic" if x else "automatic"),
)
def test_one_graph_serves_batches_of_every_shape(function, dynamic):
    """CMP-01, CMP-02, CMP-04, CMP-05: compiled whole, forward and backward; the bits of eager mode."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    query = torch.randn(3, 2, 8, requires_grad=True)
    for number, lengths in enumerate(BATCHES):
        batch = make_jagged(lengths, 2, 8, dtype=torch.float32, slack=number % 2, requires_grad=True)
        results = []
        for call in (compiled, function):
            out = call(batch.values(), batch.offsets(), query)
            weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
            results.append((out, *torch.autograd.grad(out, (batch.values(), query), weight)))
        for mine, eager in zip(*results, strict=True):
            assert torch.equal(mine, eager)
        if number == 1:
            graphs = counter.frame_count
    assert graphs <= (1 if dynamic else 2)
    assert counter.frame_count == graphs


def test_a_number_of_queries_that_changes_is_compiled_for():
    """Blocks depend on it; torch.compile may hold it for a symbol."""
    compiled = torch.compile(broadcast, fullgraph=True, backend="aot_eager", dynamic=True)
    batch = make_jagged((5, 0, 17), 2, 8, dtype=torch.float32)
    for length in (3, 20):
        query = torch.randn(length, 2, 8)
        arguments = (batch.values(), batch.offsets(), query)
        assert torch.equal(compiled(*arguments), broadcast(*arguments))


@pytest.mark.parametrize("kind", QueryKind, ids=lambda k: k.name)
def test_operators_pass_opcheck(kind):
    """STR-11: the strides of q, k and v differ, and real results have those that the fakes promise."""
    length = 70 if kind is QueryKind.BROADCAST else 3
    case = AttentionCase(
        (9, 0, 20), query=kind, q_length=length, q_lengths=(4, 2, 9), heads=2, kv_heads=2, dim=16, value_dim=8
    )
    captured = captured_calls(case)
    for operator, args in captured:
        if operator is attend_bwd:  # which has no derivative
            args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        torch.library.opcheck(operator, args)
        real = operator(*args)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
        for mine, promised in zip(real, fake, strict=True):
            assert mine.shape == promised.shape
            assert mine.stride() == promised.stride()
            assert mine.dtype == promised.dtype


def captured_calls(case):
    """The operators with the arguments that a forward and a backward pass give them."""
    q, k, v = case.inputs()
    calls = []

    class Capture(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (attend_fwd, attend_bwd):
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    k = k.with_values(k.values().detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_())
    with Capture():
        out = k.attend(q, v, backend="portable")
        (out.values() if isinstance(out, JaggedTensor) else out).square().sum().backward()
    assert [func for func, _ in calls] == [attend_fwd, attend_bwd]
    return calls


def test_checkpointing_and_moving_saved_tensors_away():
    """AUT-05."""
    from torch.utils.checkpoint import checkpoint

    batch = make_jagged((6, 0, 20), 2, 8, dtype=torch.float32, requires_grad=True)
    query = torch.randn(3, 2, 8, requires_grad=True)
    leaves = (batch.values(), query)
    arguments = (batch.values(), batch.offsets(), query)
    wanted = torch.autograd.grad(broadcast(*arguments).square().sum(), leaves)
    for reentrant in (False, True):
        out = checkpoint(broadcast, *arguments, use_reentrant=reentrant)
        if reentrant:
            for leaf in leaves:
                leaf.grad = None
            out.square().sum().backward()
            got = [leaf.grad for leaf in leaves]
        else:
            got = torch.autograd.grad(out.square().sum(), leaves)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        got = torch.autograd.grad(broadcast(*arguments).square().sum(), leaves)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_a_plan_without_gradients_does_not_serve_training():
    """AUT-02: the schedules of the backward pass are not left out because the layout has those of a forward pass."""
    batch = make_jagged((6, 0, 20), 2, 8, dtype=torch.float32, requires_grad=True)
    query = torch.randn(3, 2, 8, requires_grad=True)
    with torch.no_grad():
        first = batch.attend(query, backend="portable")
    with recorded_launches() as launches:
        out = batch.attend(query, backend="portable")
        out.sum().backward()
    assert torch.equal(first, out)
    assert "broadcast_kernel" in [launch.name for launch in launches]
    fresh = make_jagged((6, 0, 20), 2, 8, dtype=torch.float32, requires_grad=True)
    fresh.attend(query, backend="portable").sum().backward()
    assert torch.equal(batch.values().grad, fresh.values().grad)
