"""Attention on a GPU: the values of the reference, the limits of 32 bits, no waiting, graphs, compilation."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, assert_attention_within_budget, make_jagged
from jaggedtensor.testing.bounds import Call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKEND = "portable"
LENGTHS = (330, 0, 1, 64, 129, 700)
Q_LENGTHS = (200, 3, 0, 65, 1, 77)


def check(case):
    # In fp32 the kernel sums in order, where the formula on a CPU sums pairwise, and ex2 is good to two units.
    multiple = 10.0 if case.dtype == torch.float32 else 3.0
    assert_attention_within_budget(case, case.run(BACKEND, "cuda"), multiple=multiple)


def poison(megabytes=256):
    """Fill memory that the allocator will hand out next with NaN."""
    blocks = [torch.full((megabytes << 18,), math.nan, device="cuda") for _ in range(2)]
    del blocks


@pytest.fixture(autouse=True)
def _poisoned_memory():
    poison()
    yield
    torch.cuda.synchronize()  # a fault belongs to the test that caused it


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "dims", "options"),
    [
        (256, (2, 2), (128, 128), {}),
        (150, (6, 2), (64, 64), {"causal": True}),  # 450 packed rows
        (129, (2, 2), (72, 104), {"window": (200, 5)}),
        (512, (1, 1), (128, 64), {"scale": -0.2}),
    ],
    ids=["two", "four of grouped heads", "one row in the second", "four"],
)
def test_a_long_broadcast_query_in_parts(rows, heads, dims, options, dtype):
    """Each adds its share of dK and dV to what those before have left: in one order, so the same bits."""
    call = Call.random((700, 0, 1, 64, 65, 2000, 0), rows, heads=heads, dims=dims, dtype=dtype, slack=5, **options)
    first = call.run(BACKEND)
    call.check(first)
    for mine, theirs in zip(call.run(BACKEND), first, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", list(QueryKind), ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "options"),
    [
        (4, 4, 128, 128, {}),
        (8, 2, 64, 64, {"causal": True}),
        (6, 1, 72, 104, {"window": (37, 5)}),
        (3, 3, 256, 192, {"causal": True, "window": 100}),
    ],
    ids=["plain", "grouped causal", "odd dims window", "wide"],
)
def test_values_and_gradients_are_those_of_the_reference(kind, dtype, heads, kv_heads, dim, value_dim, options):
    """TAIL, DIM, GQA, MSK: empty, single-token and partial blocks with NaN in slack."""
    check(
        AttentionCase(
            LENGTHS, kind, q_length=70, q_lengths=Q_LENGTHS, heads=heads, kv_heads=kv_heads, dim=dim,
            value_dim=value_dim, dtype=dtype, k_slack=3, q_slack=2, **options,
        )
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 16, 33, 128, 129, 300])
def test_broadcast_queries_of_any_length(rows):
    check(AttentionCase(LENGTHS, q_length=rows, heads=2, kv_heads=2, dim=64, value_dim=64, dtype=torch.bfloat16))


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 127, 128, 129, 240, 250, 252, 255, 257, 704, 913])
def test_lengths_around_blocks(length):
    """TAIL-01, TAIL-04."""
    case = AttentionCase((length, 0, length, 1), q_length=20, heads=2, dim=64, value_dim=64, dtype=torch.bfloat16)
    check(case)
    check(case.with_options(query=QueryKind.JAGGED, q_lengths=(length, 2, 0, 1), causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 3), (12, 4), (8, 2), (6, 1), (9, 3), (16, 16), (5, 5), (64, 8)])
def test_every_ratio_of_heads(heads, kv_heads):
    """GQA-01, GQA-04."""
    case = AttentionCase(
        (65, 0, 3), q_length=9, heads=heads, kv_heads=kv_heads, dim=64, value_dim=64, dtype=torch.float16
    )
    check(case)
    check(case.with_options(query=QueryKind.JAGGED, q_lengths=(70, 1, 2), causal=True))


def test_many_short_sequences():
    """EMP-16, OVF-09: more sequences than a grid's second axis holds."""
    lengths = torch.full((80_000,), 16)
    keys = JaggedTensor.from_lengths(torch.randn(80_000 * 16, 4, 64, dtype=torch.bfloat16), lengths).to("cuda")
    query = torch.randn(8, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = keys.with_values(keys.values().requires_grad_())
    out = k.attend(query, backend=BACKEND)
    out.backward(torch.ones_like(out))
    dense = keys.values().detach().view(80_000, 16, 4, 64)[-5:].float()
    p = torch.softmax(torch.einsum("lhd,bthd->bhlt", query.float() / 8, dense), -1)
    expected = torch.einsum("bhlt,bthd->blhd", p, dense)
    assert (out[-5:].float() - expected).abs().max() < 0.02
    assert query.grad.isfinite().all()
    assert k.values().grad.isfinite().all()


@pytest.mark.parametrize("sequences", [511, 512, 513])
def test_offsets_times_strides_beyond_32_bits(sequences):
    """OVF-05: rows x heads x D passes 2^31 elements at 512 sequences."""
    lengths = torch.full((sequences,), 512)
    q = torch.zeros(sequences * 512, 32, 256, device="cuda", dtype=torch.bfloat16)
    q[-512:] = torch.randn(512, 32, 256, device="cuda", dtype=torch.bfloat16)
    queries = JaggedTensor(q, JaggedLayout.from_lengths(lengths).to("cuda"))
    keys = queries.with_values(torch.randn(q.shape[0], 2, 256, device="cuda", dtype=torch.bfloat16))
    out = keys.attend(queries, backend=BACKEND)
    one = keys[sequences - 1 :].attend(queries[sequences - 1 :], backend="reference")
    assert (out[sequences - 1].float() - one.values().float()).abs().max() < 0.05
    mean = keys[0].float().mean(0).repeat_interleave(16, 0)  # a query of zeros sees the mean
    assert (out[0].float() - mean).abs().max() < 0.02


# -- extreme values ----------------------------------------------------------------------------------------------------


def test_one_key_gives_its_value_whatever_the_score():
    """NUM-01, NUM-02."""
    for level in (133_120.0, -250_000.0):
        x = torch.full((1, 1, 64), level, device="cuda", dtype=torch.bfloat16)
        keys = JaggedTensor.from_list([x, x[:0]]).requires_grad_()
        query = x.clone().requires_grad_()
        out, lse = keys.attend(query, return_lse=True, backend=BACKEND)
        assert torch.equal(out[0], x)
        assert lse[0].isfinite().all()
        out.sum().backward()
        assert query.grad.isfinite().all()
        assert keys.grad.values().isfinite().all()


def test_half_precision_scores_beyond_its_range():
    """NUM-04."""
    keys = JaggedTensor.from_list([torch.full((n, 1, 128), 40.0, device="cuda", dtype=torch.float16) for n in (7, 300)])
    out = keys.attend(keys, backend=BACKEND)
    assert torch.equal(out.values(), keys.values())


@pytest.mark.parametrize("length", [64, 192, 320, 704, 705])
def test_all_scores_far_below_zero(length):
    """TAIL-06: zero-filled keys of the last block must not overflow beside an lse of -120."""
    for dtype in (torch.bfloat16, torch.float16):
        level = math.sqrt(120 / math.sqrt(64) / 64 * 8)
        keys = JaggedTensor.from_list(
            [torch.full((length, 1, 64), -level, device="cuda", dtype=dtype)]
        ).requires_grad_()
        query = torch.full((20, 1, 64), level, device="cuda", dtype=dtype, requires_grad=True)
        values = keys.with_values(torch.randn(length, 1, 64, device="cuda").to(dtype)).requires_grad_()
        keys.attend(query, values, backend=BACKEND).square().sum().backward()
        for gradient in (query.grad, keys.grad.values(), values.grad.values()):
            assert gradient.isfinite().all()


# -- determinism, isolation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(QueryKind), ids=lambda kind: kind.name)
def test_same_inputs_give_the_same_bits(kind):
    """DET-01, DET-04, EMP-07."""
    case = AttentionCase(
        (3, 0, 1, 127, 128, 129, 1024) * 8, kind, q_length=32, q_lengths=(5, 0, 130, 1, 64, 7, 256) * 8, heads=4,
        kv_heads=2, dim=128, value_dim=128, dtype=torch.bfloat16,
    )  # fmt: skip
    first = case.run(BACKEND, "cuda", deterministic=True)
    for _ in range(20):
        for mine, theirs in zip(case.run(BACKEND, "cuda", deterministic=True), first, strict=True):
            assert torch.equal(mine, theirs)


def test_a_neighbour_full_of_nan_changes_nothing():
    """ISO-01."""
    clean = make_jagged([100, 37, 50], 2, 64, dtype=torch.bfloat16).to("cuda")
    dirty = clean.clone()
    dirty.values()[100:137] = math.nan
    query = torch.randn(9, 2, 64, device="cuda", dtype=torch.bfloat16)
    for causal in (False, True):
        a, b = (x.attend(query, causal=causal, backend=BACKEND) for x in (clean, dirty))
        assert torch.equal(a[[0, 2]], b[[0, 2]])


# -- strides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_parts_of_one_buffer_and_odd_places(shift):
    """STR-01, STR-02, STR-04: pitches larger than a row, pointers that are not aligned."""
    lengths = torch.tensor([93, 0, 117, 128])
    tokens = int(lengths.sum())
    flat = torch.randn(shift + tokens * 4 * 256, device="cuda", dtype=torch.bfloat16)
    fused = flat[shift:].view(tokens, 4, 4, 64).requires_grad_()
    layout = JaggedLayout.from_lengths(lengths).to("cuda")
    q, k, v = (JaggedTensor(fused[:, i], layout) for i in range(3))
    k.attend(q, v, causal=True, backend=BACKEND).values().square().sum().backward()
    got, fused.grad = fused.grad, None
    q, k, v = (JaggedTensor(fused[:, i].contiguous(), layout) for i in range(3))
    k.attend(q, v, causal=True, backend=BACKEND).values().square().sum().backward()
    assert torch.equal(got, fused.grad)
    assert not got[:, 3].any()


# -- no waiting, no compilation ----------------------------------------------------------------------------------------


def train_step(keys, query):
    k = keys.with_values(keys.values().detach().requires_grad_())
    k.attend(query, backend=BACKEND).square().sum().backward()
    k.attend(k, causal=True, backend=BACKEND).values().square().sum().backward()
    return k.values().grad


def batch_of(lengths, heads=2, dim=64):
    tokens = int(torch.as_tensor(lengths).sum())
    return JaggedTensor.from_lengths(torch.randn(tokens, heads, dim).bfloat16(), torch.as_tensor(lengths)).to("cuda")


def test_the_host_never_waits_once_lengths_are_known():
    query = torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    train_step(batch_of([5, 0, 70]), query)  # compiles
    keys = batch_of([300, 1, 0, 65])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(keys, query)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_batches_and_lengths_compile_nothing():
    from triton.runtime.jit import JITFunction

    query = torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for lengths in ([5, 0, 70], [64, 16, 0, 48]):
        train_step(batch_of(lengths), query)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("jaggedtensor.kernels.")]
    kernels = {x.fn: x for module in ours for x in vars(module).values() if isinstance(x, JITFunction)}

    def compiled():
        return {
            f"{fn.__module__}.{fn.__name__}": sum(len(caches[0]) for caches in kernel.device_caches.values())
            for fn, kernel in kernels.items()
            if kernel.device_caches
        }

    before = compiled()
    assert sum(before.values()) >= 3  # forward, delta, backward
    for lengths in ([1], [300, 1, 0, 65, 2], [17] * 33, [0, 0, 5]):
        train_step(batch_of(lengths), query)
    assert compiled() == before


def test_the_current_device_and_stream_are_the_callers():
    side = torch.cuda.Stream()
    keys = batch_of([40, 0, 9])
    query = torch.randn(3, 2, 64, device="cuda", dtype=torch.bfloat16)
    expected = keys.attend(query, backend=BACKEND)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = keys.attend(query, backend=BACKEND)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, expected)
    assert torch.cuda.current_device() == 0


# -- graphs and compilation --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of the eager step, later
def test_a_graph_is_right_for_other_lengths():
    """CUG-01, CUG-02: longer, shorter and empty sequences than at capture, forward and backward."""
    batch, capacity, longest = 6, 1500, 1024
    layout = JaggedLayout.with_capacity(batch, capacity, longest, device="cuda")
    values = torch.randn(capacity, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    query = torch.randn(20, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        keys = JaggedTensor(values, layout)
        pooled = keys.attend(query, backend=BACKEND)
        mixed = keys.attend(keys, causal=True, backend=BACKEND)
        loss = pooled.float().square().sum() + mixed.float().square().sum()
        return (pooled, *torch.autograd.grad(loss, (values, query)))

    layout.copy_(torch.tensor([0, 64, 128, 192, 256, 320, 384]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([64] * 6, [1000, 12, 0, 0, 0, 1], [0] * 6, [1, 0, 500, 500, 400, 99]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        layout.copy_(offsets)
        graph.replay()
        eager = JaggedTensor(values, offsets.cuda())
        pooled = eager.attend(query, backend=BACKEND)
        mixed = eager.attend(eager, causal=True, backend=BACKEND)
        loss = pooled.float().square().sum() + mixed.float().square().sum()
        expected = (pooled, *torch.autograd.grad(loss, (values, query)))
        for got, want in zip(captured, expected, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=0.02, rtol=0.02)
        assert not captured[1][int(offsets[-1]) :].any()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("batches", [(5, 4, 3, 2, 1), (1, 2, 3, 4, 5)], ids=["smaller", "larger"])
def test_graphs_of_several_batch_sizes_share_their_memory(batches):
    """CUG-03: each in a size of its own, whichever was captured last."""
    pool, captured = torch.cuda.graph_pool_handle(), []
    query = torch.randn(200, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for batch in batches:
        lengths = torch.tensor([300, 0, 64, 1, 129][:batch])
        keys = JaggedTensor(
            torch.randn(int(lengths.sum()), 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True),
            JaggedLayout.from_lengths(lengths).to("cuda"),
        )

        def step(keys=keys):
            pooled = keys.attend(query, backend=BACKEND)
            mixed = keys.attend(keys, causal=True, backend=BACKEND).values()
            loss = pooled.float().square().sum() + mixed.float().square().sum()
            return (pooled, mixed, *torch.autograd.grad(loss, (keys.values(), query)))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = step()
        captured.append((graph, results, step))
    for graph, results, step in (*captured, *reversed(captured)):
        poison(64)
        graph.replay()
        got = [x.clone() for x in results]
        for mine, theirs in zip(got, step(), strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), atol=0.02, rtol=0.02)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.query = nn.Parameter(torch.randn(4, 2, 32))

    def forward(self, values, offsets):
        x = JaggedTensor(values, offsets, validate=False)
        for norm, projection in zip(self.norms, self.projections, strict=True):
            heads = projection(norm(x)).unflatten(-1, (2, 32))
            x = x + heads.attend(heads, causal=True, backend=BACKEND).flatten(2)
        return x.unflatten(-1, (2, 32)).attend(self.query, backend=BACKEND)


@pytest.mark.limit(300)  # inductor compiles for long on a busy host
@pytest.mark.filterwarnings("ignore")  # inductor warns of TF32, of torch.jit and of more as versions go
def test_a_compiled_module_trains_as_the_eager_one_does():
    """CMP-01, CMP-02, CMP-04."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = TwoLayers().cuda()
    compiled = TwoLayers().cuda()
    compiled.load_state_dict(eager.state_dict())
    run = torch.compile(compiled, fullgraph=True, dynamic=True)
    for lengths in ([30, 0, 5], [100, 1, 64, 2], [7, 7, 0, 0, 200]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
        values = torch.randn(sum(lengths), 64, device="cuda")
        for model, call in ((eager, eager), (compiled, run)):
            model.zero_grad()
            call(values, offsets).square().sum().backward()
        for mine, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-3, rtol=1e-3)


def test_autocast_casts_queries_keys_and_values_together():
    """AUT-07."""
    keys = JaggedTensor.from_list([torch.randn(n, 2, 64, device="cuda") for n in (40, 0, 3)]).requires_grad_()
    query = torch.randn(5, 2, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = keys.attend(query, keys.with_values(keys.values().bfloat16()), backend=BACKEND)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert query.grad.dtype == torch.float32
    assert keys.grad.values().dtype == torch.float32


def test_backward_may_be_the_first_work_of_its_thread():
    """DEV-02 within this process; AUT-02: first without, then with gradients."""
    keys = batch_of([33, 0, 5])
    query = torch.randn(5, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        without = keys.attend(query, backend=BACKEND)
    out = keys.attend(query, backend=BACKEND)
    torch.autograd.backward(out, torch.ones_like(out))
    assert torch.equal(out, without)
    assert query.grad.isfinite().all()
