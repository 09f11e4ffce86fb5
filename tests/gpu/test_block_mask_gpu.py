"""Block masks on a GPU: values and gradients, blocks that are skipped, no waiting, graphs whose mask changes."""

import itertools
import math

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.kernels.dispatch import IMPLEMENTATIONS
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing.bounds import Call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKEND = "portable"
LENGTHS = (1000, 0, 1, 130, 700, 128)
Q_LENGTHS = (300, 3, 0, 140, 700, 1)
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


def random_mask(*shape, seed=0, share=0.5):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(shape, generator=generator, device="cuda") < share


def call_of(kind, q_length=140, mask=None, **options):
    query = Q_LENGTHS if kind is QueryKind.JAGGED else q_length
    q_blocks = -(-(max(Q_LENGTHS) if kind is QueryKind.JAGGED else q_length) // 128)
    if mask is None:
        mask = random_mask(len(LENGTHS), q_blocks, 8)
        mask[0, 0], mask[4, :, 1] = False, False
    per_sequence = kind is QueryKind.PER_SEQUENCE
    return Call.random(LENGTHS, query, per_sequence=per_sequence, slack=3, block_mask=mask, **options)


@kinds
@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "options"),
    [
        ((4, 4), (128, 128), torch.bfloat16, {}),
        ((6, 2), (64, 64), torch.float16, {"causal": True}),
        ((2, 1), (72, 40), torch.bfloat16, {"window": (200, 5)}),
        ((2, 2), (32, 32), torch.float32, {}),
    ],
    ids=["plain", "groups of three, causal", "odd dims, window", "fp32"],
)
def test_values_and_gradients(kind, heads, dims, dtype, options):
    call = call_of(kind, heads=heads, dims=dims, dtype=dtype, **options)
    call.check(call.run(BACKEND))


@kinds
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
def test_every_family_that_reads_masks(kind, heads):
    call = call_of(kind, heads=heads, causal=True)
    problem = call.keys.explain(call.query, call.values, causal=True, block_mask=call.options["block_mask"]).problem
    for family in IMPLEMENTATIONS:
        if family.name != BACKEND and not family.lacks(problem):
            call.check(call.run(family.name))


@pytest.mark.parametrize("length", [20, 128, 300])
def test_broadcast_queries_of_one_block_and_of_several(length):
    for share in (0.0, 0.2, 1.0):
        mask = random_mask(1, 3, 9, share=share, seed=2)  # more than there are, and one for all sequences
        call = call_of(QueryKind.BROADCAST, length, mask)
        got = call.run(BACKEND)
        call.check(got)
        assert (share > 0) == bool((got.lse > -math.inf).any())


@kinds
def test_blocks_that_nobody_sees_are_not_read(kind):
    """Keys and values there are NaN, which would reach every result that they touch."""
    mask = torch.ones(1, 6, 8, dtype=torch.bool, device="cuda")
    mask[:, :, 1] = False
    call = call_of(kind, mask=mask)
    hidden = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for begin, length in zip(itertools.accumulate(LENGTHS, initial=0), LENGTHS, strict=False):
        hidden[begin + min(128, length) : begin + min(256, length)] = True
    hidden = hidden.nonzero().flatten().cuda()
    for x in (call.keys, call.values):
        x.values()[hidden] = math.nan
    got = call.run(BACKEND)
    for x in (call.keys, call.values):
        x.values()[hidden] = 0.0
    call.check(got)
    assert not got.dk[hidden].any()
    assert not got.dv[hidden].any()


@kinds
def test_the_same_bits_every_time(kind):
    """Contract 11."""
    call = call_of(kind, heads=(4, 2))
    first = call.run(BACKEND)
    for _ in range(5):
        for mine, theirs in zip(call.run(BACKEND), first, strict=True):
            assert torch.equal(mine, theirs)


def test_the_kernel_chosen_is_one_that_reads_masks():
    keys = JaggedTensor.from_list([torch.randn(n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (300, 5)])
    mask = random_mask(2, 3, 3)
    chosen = keys.explain(keys, block_mask=mask).choice.implementation
    assert chosen.masks
    by_choice, named = (keys.attend(keys, block_mask=mask, backend=name).values() for name in (None, chosen.name))
    assert torch.equal(by_choice, named)


def train_step(keys, query, mask):
    k = keys.with_values(keys.values().detach().requires_grad_())
    k.attend(query, backend=BACKEND, block_mask=mask).square().sum().backward()
    k.attend(k, causal=True, backend=BACKEND, block_mask=mask).values().square().sum().backward()
    return k.values().grad


def test_the_host_never_waits_once_lengths_are_known():
    query = torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def batch_of(*lengths):
        values = torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16)
        return JaggedTensor(values, torch.tensor([0, *itertools.accumulate(lengths)]).cuda())

    train_step(batch_of(5, 0, 270), query, random_mask(3, 3, 3))  # compiles
    keys, mask = batch_of(300, 1, 0, 65), random_mask(4, 3, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(keys, query, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of the eager step, later
def test_a_graph_is_right_for_other_lengths_and_another_mask():
    capacity, longest = 1500, 1024
    layout = JaggedLayout.with_capacity(4, capacity, longest, device="cuda")
    values = torch.randn(capacity, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    query = torch.randn(20, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(4, 8, 8, dtype=torch.bool, device="cuda")

    def step(keys, mask):
        pooled = keys.attend(query, backend=BACKEND, block_mask=mask)
        mixed = keys.attend(keys, causal=True, backend=BACKEND, block_mask=mask).values()
        rows = torch.arange(len(mixed), device="cuda")[:, None, None] < keys.layout.offsets()[-1]
        loss = pooled.float().square().sum() + (mixed.float() * rows).square().sum()
        return (pooled, *torch.autograd.grad(loss, (values, query)))

    layout.copy_(torch.tensor([0, 64, 128, 192, 256]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(JaggedTensor(values, layout), mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(JaggedTensor(values, layout), mask)
    for seed, lengths in enumerate(([64] * 4, [1000, 12, 0, 1], [0] * 4, [300, 0, 700, 500])):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        layout.copy_(offsets)
        mask.copy_(random_mask(4, 8, 8, seed=seed))
        graph.replay()
        expected = step(JaggedTensor(values, offsets.cuda()), mask.clone())
        for got, want in zip(captured, expected, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=0.02, rtol=0.02)
        assert not captured[1][int(offsets[-1]) :].any()
