"""The Hopper backward on an SM90: values against float64 element by element, the same bits from run to run.

The case list in other files of this folder runs with it too: JAGGEDTENSOR_TEST_BACKEND=hopper.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.kernels.hopper import plan
from jaggedtensor.kernels.hopper.plan import backward_lacks, plan_general_backward
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.testing import offsets_of
from jaggedtensor.testing.bounds import Call
from jaggedtensor.testing.guards import guarded_allocations


def lacks_here():
    x = torch.empty(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    return by_name("hopper").lacks(AttentionProblem.of(x, x, x, None, -1, -1, False))


if lacks_here():
    pytest.skip(f"the Hopper kernels here: {', '.join(lacks_here())}", allow_module_level=True)

LENGTHS = (330, 0, 1, 16, 150, 128, 64, 1000, 129, 65, 0, 63)


def check(call):
    """Results stand between guards, and what is not written is NaN."""
    with guarded_allocations():
        got = call.run("hopper")
    call.check(got)
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (64, 128), (72, 104), (8, 16)], ids=str)
@pytest.mark.parametrize("rows", [1, 37, 64, 65, 128])
def test_a_query_within_one_cta(rows, dims, dtype):
    check(Call.random(LENGTHS, rows, heads=(2, 2), dims=dims, dtype=dtype, slack=5))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [129, 256, 300, 512])
def test_parts_of_a_long_query_add_up(rows, dim):
    check(Call.random(LENGTHS, rows, heads=(2, 2), dims=(dim, dim), slack=5))


@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (64, 1), (6, 3), (5, 5), (140, 140)], ids=str)
def test_heads_in_groups_and_numbers_that_do_not_divide_processors(heads):
    check(Call.random((70, 0, 300, 5), 2, heads=heads, dims=(64, 64)))


@pytest.mark.parametrize(
    "lengths", [(), (0, 0), (1,), (1,) * 900, (64,) * 700, (20000,), (20000, *range(100), 9000)], ids=lambda n: len(n)
)
def test_batches_of_all_shapes(lengths):
    check(Call.random(lengths, 33, heads=(2, 2), dims=(128, 128)))


OTHERS = (330, 7, 0, 16, 300, 64, 1, 700, 1, 200, 0, 63)
WINDOWS = [{}, {"causal": True}, {"window": (100, 30)}, {"window": (-1, 40)}, {"window": (70, -1)}]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("heads", "deterministic"), [((2, 2), False), ((8, 2), False), ((6, 3), True)], ids=str)
@pytest.mark.parametrize("query", [LENGTHS, OTHERS, 70], ids=("self", "cross", "per sequence"))
def test_queries_of_each_sequence(query, heads, window, deterministic):
    more = {"per_sequence": True} if isinstance(query, int) else {}
    check(
        Call.random(
            LENGTHS, query, heads=heads, dims=(128, 128), slack=5, deterministic=deterministic, **more, **window
        )
    )


@pytest.mark.parametrize("dims", [(64, 64), (40, 40), (48, 104), (128, 64), (64, 128), (72, 104)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_of_each_sequence_in_other_dimensions(dims, deterministic):
    check(Call.random(LENGTHS, OTHERS, heads=(4, 2), dims=dims, causal=True, slack=5, deterministic=deterministic))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-35, 2.0])
def test_a_scale_of_any_sign_and_none(scale):
    """lse is divided by it; rows that see nothing are among these."""
    check(Call.random(LENGTHS, OTHERS, heads=(4, 2), dims=(128, 128), causal=True, scale=scale))
    check(Call.random(LENGTHS, 70, heads=(2, 2), dims=(64, 64), per_sequence=True, scale=scale))


@pytest.mark.parametrize(
    ("batch", "length", "query", "heads", "dims"),
    [(1, 4000, None, (2, 2), (128, 128)), (3, 1100, 2050, (4, 2), (72, 104)), (3, 2048, None, (4, 4), (64, 64))],
)
def test_parts_of_tiles_of_a_last_round(batch, length, query, heads, dims):
    """Sequences that are all as long: the schedule has merges."""
    keys = JaggedLayout(offsets_of((length,) * batch).cuda())
    queries = keys if query is None else JaggedLayout(offsets_of((query,) * batch).cuda())
    x = torch.empty(1, heads[0], dims[0], device="cuda", dtype=torch.bfloat16)
    k, v = (x.new_empty(1, heads[1], dim) for dim in dims)
    problem = AttentionProblem.of(x, k, v, queries.offsets(), -1, -1, False)
    rows = (keys.num_tokens, queries.num_tokens)
    assert len(plan_general_backward(problem, keys, queries, *rows)) == 3
    call = Call.random((length,) * batch, (query or length,) * batch, heads=heads, dims=dims, slack=5)
    first, again = check(call), call.run("hopper")
    for one, other in zip(first[3:], again[3:], strict=True):  # dQ alone is added in no order
        assert torch.equal(one, other)


@pytest.fixture
def in_waves(monkeypatch):
    """Whatever may come in waves does, however small."""
    asked = []

    def pay(problem, keys, query):
        asked.append(problem)
        return not (problem.windowed or problem.deterministic)

    monkeypatch.setattr(plan, "waves_pay", pay)
    yield
    assert asked


@pytest.mark.parametrize(
    ("dims", "heads", "dtype"),
    [
        ((128, 128), (2, 2), torch.bfloat16),
        ((72, 104), (8, 2), torch.float16),
        ((64, 64), (2, 2), torch.bfloat16),
        ((40, 128), (8, 2), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("query", [LENGTHS, OTHERS, 70], ids=("self", "cross", "per sequence"))
def test_waves_of_tiles(query, dims, heads, dtype, in_waves):
    """dQ is stored by the first tile of a sequence, of NaN otherwise, added to by those between, and finished by the
    last: of none, one, two and many tiles, rows without keys and keys without rows."""
    more = {"per_sequence": True} if isinstance(query, int) else {}
    check(Call.random(LENGTHS, query, heads=heads, dims=dims, dtype=dtype, slack=5, **more))


@pytest.mark.parametrize("lengths", [(2048,) * 3, (128,) * 50, (129,) * 300, (0,) * 70 + (6000,), (64,) * 700], ids=len)
def test_waves_of_batches_of_all_shapes(lengths, in_waves):
    check(Call.random(lengths, lengths, heads=(4, 4), dims=(128, 128)))


def test_a_graph_of_waves_is_right_for_other_lengths(in_waves):
    batch, capacity = 6, 1500
    layout = JaggedLayout.with_capacity(batch, capacity, 1024, device="cuda")
    values = torch.randn(capacity, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn_like(values)

    def gradient(layout):
        keys = JaggedTensor(values, layout)
        return torch.autograd.grad(keys.attend(keys, backend="hopper").values(), values, weight)[0]

    layout.copy_(offsets_of([64] * batch))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradient(layout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient(layout)
    for lengths in (
        [64] * batch,
        [1000, 12, 0, 0, 0, 1],
        [0] * batch,
        [1, 0, 500, 500, 400, 99],
        [129, 257, 128, 1, 0, 2],
    ):
        offsets = offsets_of(lengths)
        layout.copy_(offsets)
        captured.fill_(torch.nan)
        graph.replay()
        tokens = sum(lengths)
        x = values.detach()[:tokens].double().requires_grad_()
        exact = JaggedTensor(x, offsets.cuda())
        (wanted,) = torch.autograd.grad(exact.attend(exact, backend="reference").values(), x, weight[:tokens].double())
        torch.testing.assert_close(captured[:tokens].double(), wanted, atol=0.05, rtol=0.02)
        assert not captured[tokens:].any()


def broadcast_calls():
    """CTAs in a chain for each 128 rows, which wait for each other in both directions."""
    return [Call.random(LENGTHS * 20, rows, heads=(4, 4), dims=(128, 128)) for rows in (128, 256, 512)]


def general_calls():
    """CTAs that add to dQ one after the other."""
    lengths = (2000, 130, 0, 700, 129, 64, 1, 4000) * 3
    return [
        Call.random(lengths, lengths, heads=(4, 4), dims=(128, 128), deterministic=True, **window)
        for window in ({}, {"causal": True}, {"window": (300, 64)})
    ]


@pytest.mark.limit(300)
@pytest.mark.parametrize("make", [broadcast_calls, general_calls])
def test_the_same_bits_in_shuffled_repeats_beside_other_work(make):
    """EMP-07: CTAs that wait for each other neither hang nor change a bit, whatever ran before."""
    calls, generator = make(), torch.Generator().manual_seed(0)
    first = [call.run("hopper") for call in calls]
    for call, got in zip(calls, first, strict=True):
        call.check(got, range(8))
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for turn in range(200):
        with torch.cuda.stream(other):
            for _ in range(turn % 7):
                noise @ noise
        for i in torch.randperm(len(calls), generator=generator).tolist():
            for name, a, b in zip(first[i]._fields, first[i], calls[i].run("hopper"), strict=True):
                assert torch.equal(a, b), f"{name} of call {i} in turn {turn}"


def test_what_is_lacking_goes_to_the_portable_kernels():
    x = torch.empty(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    windowed = AttentionProblem.of(x, x, x, None, 3, -1, False)
    assert backward_lacks(windowed) == ["takes no window"]
    assert by_name("hopper").backward_launcher(windowed) is by_name("portable").launcher()
    assert windowed.query is QueryKind.BROADCAST
    check(Call.random((70, 0, 300), 20, heads=(2, 2), dims=(64, 64), window=(30, 5)))


def test_slack_of_nan_is_never_read_and_gets_no_gradient():
    got = check(Call.random((70, 0, 300), 20, heads=(2, 2), dims=(64, 64), slack=64))
    assert not got.dk[370:].any()
    assert not got.dv[370:].any()
