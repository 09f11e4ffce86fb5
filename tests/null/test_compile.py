"""torch.compile and torch.export take a batch as they take tensors: whole graphs, no new one for another batch, and the
results and gradients of eager mode."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jaggedtensor import JaggedLayout, JaggedTensor, attend
from jaggedtensor.ops.contract import attend_bwd, attend_fwd
from jaggedtensor.testing import make_jagged, offsets_of
from jaggedtensor.testing.cases import random_tensor


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pooling(torch.nn.Module):
    """Builds the batch inside, attends to it with one learned query, and goes on."""

    def __init__(self, dim=8):
        super().__init__()
        self.query = torch.nn.Parameter(random_tensor(3, 2, dim // 2, dtype=torch.float32))
        self.project = torch.nn.Linear(dim, dim)

    def forward(self, values, offsets):
        keys = self.project(JaggedTensor(values, offsets)).unflatten(-1, (2, -1))
        return keys.attend(self.query).flatten(1)


class Encoder(torch.nn.Module):
    """Takes a batch: norm, causal self-attention, residual, sum of each sequence."""

    def __init__(self, dim=8):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = torch.chunk(self.qkv(self.norm(x)).unflatten(-1, (6, -1)), 3, dim=2)
        x = x + attend(q, k, v, causal=True).flatten(-2)
        return (x.relu() * 2).sum(1), x


BATCHES = [(3, 0, 5), (6, 1), (0, 2, 2, 4), (7, 7, 0, 0, 1), (1, 2, 3, 4, 5, 6)]


def values_of(lengths, slack=0):
    jt = make_jagged(lengths, 8, dtype=torch.float32, slack=slack, seed=len(lengths))
    return jt.values().requires_grad_(), jt.offsets()


def results_and_gradients(module, compiled, *inputs):
    leaves = [p for p in module.parameters()]
    out = compiled(*inputs)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), *grads]


def assert_as_eager(module, compiled, *inputs):
    mine, eager = (results_and_gradients(module, call, *inputs) for call in (compiled, module))
    for a, b in zip(mine, eager, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("slack", [0, 3])
def test_a_batch_is_built_and_attended_to_inside_the_graph(slack):
    """CMP-01, CMP-02, CMP-04: no break, and at most one graph more when sizes turn out to change."""
    module = Pooling()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for number, lengths in enumerate(BATCHES):
        values, offsets = values_of(lengths, slack)
        assert_as_eager(module, compiled, values.detach(), offsets)
        if number == 1:
            seen = counter.frame_count
    assert counter.frame_count == seen <= 2


@pytest.mark.parametrize("slack", [0, 3])
def test_a_batch_is_an_argument_of_the_graph(slack):
    module = Encoder()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for number, lengths in enumerate(BATCHES):
        jt = make_jagged(lengths, 8, dtype=torch.float32, slack=slack, seed=number)
        sums, x = compiled(jt)
        wanted_sums, wanted = module(jt)
        torch.testing.assert_close(sums, wanted_sums)
        torch.testing.assert_close(x.to_padded(), wanted.to_padded())
        mine, theirs = (torch.autograd.grad(s.square().sum(), list(module.parameters())) for s in (sums, wanted_sums))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
        if number == 1:
            seen = counter.frame_count
    assert counter.frame_count == seen <= 2


def test_what_the_host_knows_of_a_batch_makes_no_new_graph():
    """Caches are no part of what a graph depends on."""
    module = Encoder()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for number, lengths in enumerate([*BATCHES, *BATCHES]):
        jt = make_jagged(lengths, 8, dtype=torch.float32)
        if number % 2:
            jt.max_length, jt.lengths(), jt.sum(1), module(jt)
        compiled(jt)
        if number == 3:
            seen = counter.frame_count
    assert counter.frame_count == seen <= 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_the_same_graph():
    module = Pooling()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for lengths in BATCHES[:2]:
        values, offsets = values_of(lengths, 2)
        assert_as_eager(module, compiled, values.detach(), offsets)


OPERATIONS = {
    "sum": lambda jt: jt.sum(1),
    "mean": lambda jt: jt.mean(1),
    "std": lambda jt: jt.std(1),
    "amax": lambda jt: jt.amax(1),
    "logsumexp": lambda jt: jt.logsumexp(1),
    "softmax": lambda jt: jt.softmax(1).values(),
    "cumsum": lambda jt: jt.cumsum(1).values(),
    "total": lambda jt: jt.sum() + jt.mean(),
    "arithmetic": lambda jt: ((jt + 1) * jt / (jt.abs() + 2)).values(),
    "per sequence": lambda jt: (jt * jt.sum(1, keepdim=True)).values(),
    "first and last": lambda jt: jt.first() + jt.last(),
    "lengths": lambda jt: jt.lengths()[:, None] * jt.sum(1),
    "to_padded": lambda jt: jt.to_padded(max_length=8),
    "mse_loss": lambda jt: torch.nn.functional.mse_loss(jt, jt.detach() * 2),
    "matmul": lambda jt: (jt @ jt.values().new_ones(8, 3)).values(),
    "matmul of matrices": lambda jt: torch.matmul(jt.unflatten(-1, (2, 4)), jt.values().new_ones(4, 3)).values(),
    "integers": lambda jt: (jt * (jt.long() // (jt.long() % 5 + 1))).values(),
    "lse": lambda jt: jt.unsqueeze(2).attend(jt.values().new_ones(2, 1, 8), return_lse=True)[1].nan_to_num(neginf=0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_compile_whole(name):
    function = lambda values, offsets: OPERATIONS[name](JaggedTensor(values, offsets))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ((3, 0, 5), (1, 4, 2, 0)):
        results = []
        for call in (function, compiled):
            values, offsets = values_of(lengths, slack=2)
            out = call(values, offsets)
            out.square().sum().backward()
            results.append((out.detach(), values.grad))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=name == "std")


def test_operators_compile_with_tensors_on_either_side():
    def function(jt, x):
        return [
            r.values()
            for r in (
                jt + x, x + jt, jt - x, x - jt, jt * x, x * jt, jt / x, x / jt, jt // x, x // jt, jt % x, x % jt,
                jt.abs() ** x, x**jt, jt < x, x < jt, jt == x, (jt > 0) & (x > 0), jt - 1, 1 - jt, 2 / jt, 2**jt,
                -jt, abs(jt), jt - jt,
            )
        ]  # fmt: skip

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    jt, x = make_jagged([3, 0, 2], 4, dtype=torch.float32, slack=1), torch.arange(1.0, 5.0)
    for number, (mine, theirs) in enumerate(zip(compiled(jt, x), function(jt, x), strict=True)):
        torch.testing.assert_close(mine, theirs, msg=lambda m, n=number: f"operator {n}: {m}")


def test_an_ambiguous_product_is_refused_and_not_swapped():
    """torch.compile swaps the operands of @ where only the right one is a tensor."""
    matrix = torch.randn(4, 4)
    function = lambda jt: (jt @ matrix).values()
    jt = make_jagged([3, 0, 2], 4, 4, dtype=torch.float32)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"@ under torch.compile must be .*use torch.matmul\(left, right\)"):
        compiled(jt)
    torch.testing.assert_close(function(jt), jt.values() @ matrix)


def test_a_batch_made_inside_a_graph_goes_on_outside():
    compiled = torch.compile(lambda v, o: JaggedTensor(v, o) * 2, backend="aot_eager", fullgraph=True)
    values, offsets = torch.randn(5, 2), offsets_of([3, 0, 2])
    jt = compiled(values, offsets)
    assert [len(x) for x in jt] == [3, 0, 2]
    torch.testing.assert_close(jt.sum(1), 2 * JaggedTensor(values, offsets).sum(1))
    assert (jt.max_length, jt.num_tokens) == (3, 5)
    offsets[1] = 2
    with pytest.raises(RuntimeError, match="offsets must be unchanged"):
        jt.lengths()


def test_offsets_that_describe_no_batch_fail_inside_the_graph():
    function = lambda values, offsets: JaggedTensor(values, offsets).sum(1)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    values = torch.randn(5, 2)
    for offsets, message in (
        ([1, 3, 5], "must be 0"),
        ([0, 3, 2], "non-decreasing"),
        ([0, 3, 9], "at most the rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            compiled(values, torch.tensor(offsets))


def test_two_layouts_are_compared_inside_the_graph():
    function = lambda a, b, x, y: (JaggedTensor(a, x) + JaggedTensor(b, y)).sum(1)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    a, b = torch.randn(5, 2), torch.randn(5, 2)
    x, y, other = offsets_of([3, 2]), offsets_of([3, 2]), offsets_of([2, 3])
    torch.testing.assert_close(compiled(a, b, x, y), function(a, b, x, y))
    with pytest.raises(RuntimeError, match="the layouts must have the same offsets"):
        compiled(a, b, x, other)


def test_stacked_layers_save_what_they_need():
    """CMP-05: widths that allow an output to be taken for an input."""
    layers = torch.nn.ModuleList([Encoder(), Encoder()])

    def function(jt):
        for layer in layers:
            _, jt = layer(jt)
        return jt.sum(1)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    jt = make_jagged([5, 0, 2], 8, dtype=torch.float32)
    parameters = list(layers.parameters())
    mine, theirs = (torch.autograd.grad(f(jt).square().sum(), parameters) for f in (compiled, function))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks for one
def test_views_of_a_larger_leaf_compile():
    """STR-07: a call at full size first, then the view."""
    query = random_tensor(2, 2, 4, dtype=torch.float32)
    function = lambda k, v, offsets: JaggedTensor(k, offsets).attend(query, JaggedTensor(v, offsets))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for rows in (20, 12):
        grads = []
        for call in (function, compiled):
            leaves = [random_tensor(20, 2, 4, dtype=torch.float32, seed=i).requires_grad_() for i in range(2)]
            call(*(x[:rows] for x in leaves), offsets_of([5, 0, rows - 5])).square().sum().backward()
            grads.append([x.grad for x in leaves])
            assert not any(x[rows:].any() for x in grads[-1])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_strides_of_gradients_are_those_the_compiler_was_told():
    """STR-11: mixed contiguity."""
    function = lambda q, k, v, offsets: JaggedTensor(k, offsets).attend(
        q.transpose(0, 1), JaggedTensor(v.transpose(0, 1), offsets)
    )
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    offsets = offsets_of([5, 0, 2])
    grads = []
    for call in (function, compiled):
        shapes = ((2, 3, 4), (7, 2, 4), (2, 7, 4))
        q, k, v = (random_tensor(*s, dtype=torch.float32, seed=n).requires_grad_() for n, s in enumerate(shapes))
        call(q, k, v, offsets).square().sum().backward()
        grads.append([q.grad, k.grad, v.grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# -- export ------------------------------------------------------------------------------------------------------------


def test_a_module_that_takes_a_batch_is_exported():
    module = Encoder().eval()
    jt = make_jagged([3, 0, 5], 8, dtype=torch.float32)
    rows, batch = torch.export.Dim("rows", min=2), torch.export.Dim("ends", min=3)
    exported = torch.export.export(module, (jt,), dynamic_shapes=([{0: rows}, {0: batch}],), strict=False)
    for lengths in ((3, 0, 5), (6, 1), (7, 7, 0, 0, 1)):
        other = make_jagged(lengths, 8, dtype=torch.float32, seed=1)
        sums, x = exported.module()(other)
        wanted_sums, wanted = module(other)
        torch.testing.assert_close(sums, wanted_sums)
        assert isinstance(x, JaggedTensor)
        torch.testing.assert_close(x.values(), wanted.values())


# -- what torch asks of an operator ------------------------------------------------------------------------------------


def operator_arguments(kind, requires_grad, dtype=torch.float32, block_mask=None):
    k = make_jagged([3, 0, 2], 2, 4, dtype=dtype, slack=1)
    v = random_tensor(6, 2, 3, dtype=dtype, seed=1)
    k_values = k.values().nan_to_num(0)
    shape = {"broadcast": (2, 4, 4), "per sequence": (3, 2, 4, 4), "jagged": (5, 4, 4)}[kind]
    q = random_tensor(*shape, dtype=dtype, seed=2)
    tensors = [x.requires_grad_(requires_grad) for x in (q, k_values, v)]
    q_offsets = offsets_of([1, 2, 2]) if kind == "jagged" else None
    return (*tensors, q_offsets, k.offsets(), block_mask, [], [], 0.5, -1, 0, "cpu", False, True, False)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", ["broadcast", "per sequence", "jagged"])
def test_the_forward_operator_keeps_its_promises(kind, requires_grad):
    torch.library.opcheck(attend_fwd, operator_arguments(kind, requires_grad))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("kind", ["broadcast", "per sequence", "jagged"])
def test_the_backward_operator_keeps_its_promises(kind, needs):
    arguments = operator_arguments(kind, requires_grad=False)
    out, lse = attend_fwd(*arguments)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    grads = (torch.ones_like(out), torch.ones_like(lse) if needs[0] else None)
    torch.library.opcheck(attend_bwd, (*grads, out, lse, *arguments, list(needs)), test_utils=utils)


def test_results_never_alias_inputs():
    """CMP-05."""
    for kind in ("broadcast", "per sequence", "jagged"):
        arguments = operator_arguments(kind, requires_grad=False)
        inputs = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        results = attend_fwd(*arguments)
        grads = attend_bwd(results[0], results[1], *results, *arguments, [True, True, True])
        assert not inputs & {x.untyped_storage().data_ptr() for x in (*results, *grads)}


def test_a_layout_shared_in_and_out_of_a_graph():
    """A layout used in eager mode first and inside a graph after it keeps no tracer in its cache."""
    layout = JaggedLayout(offsets_of([3, 0, 2]))
    jt = JaggedTensor(torch.randn(5, 8), layout)
    compiled = torch.compile(lambda jt: jt.sum(1) + jt.softmax(1).sum(1), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(jt), jt.sum(1) + 1 * (jt.lengths() > 0)[:, None])
    torch.testing.assert_close(jt.softmax(1).sum(1), 1.0 * (jt.lengths() > 0)[:, None].expand(3, 8))
    torch.testing.assert_close(compiled(jt), jt.sum(1) + 1 * (jt.lengths() > 0)[:, None])
