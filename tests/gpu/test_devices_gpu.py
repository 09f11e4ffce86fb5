"""Portable kernels where they are called: other devices than the current one, other threads, other streams."""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from jaggedtensor import JaggedTensor
from jaggedtensor.testing.bounds import Call

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")


def moved(call, device):
    """The same numbers elsewhere."""

    def put(x):
        if isinstance(x, JaggedTensor):
            return JaggedTensor(x.values().to(device), x.offsets().to(device))
        return x.to(device)

    keys, query = put(call.keys), put(call.query)
    return Call(
        query, keys, keys.with_values(call.values.values().to(device)), call.options, put(call.grad_out),
        put(call.grad_lse),
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("query", [20, (16, 3, 0, 16)], ids=["for all", "jagged"])
def test_operands_may_be_on_another_device_than_the_current_one(query):
    """DEV-01."""
    here = Call.random((16, 16, 0, 16), query, heads=(32, 32), dtype=torch.float16, device="cuda:0", causal=True)
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    there = moved(here, other)
    expected, got = here.run(BACKEND), there.run(BACKEND)
    there.check(got)
    assert torch.cuda.current_device() == 0
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.device == other
        assert torch.equal(mine.cpu(), theirs.cpu())
    with pytest.raises(ValueError, match=r"query must be on cuda:\d"):
        there.keys.attend(torch.randn(3, 32, 64, device="cuda:0", dtype=torch.float16), backend=BACKEND)


@pytest.mark.parametrize("index", range(torch.cuda.device_count()))
def test_backward_may_be_the_first_work_of_a_process(index):
    """DEV-02: in a process of its own, whose autograd thread has done nothing yet."""
    program = f"""
import torch
from jaggedtensor import JaggedTensor
keys = JaggedTensor.from_list([torch.ones(n, 2, 64, device="cuda:{index}", dtype=torch.float16) for n in (32, 0, 4)])
query = torch.ones(5, 2, 64, device="cuda:{index}", dtype=torch.float16, requires_grad=True)
out = keys.requires_grad_().attend(query, backend={BACKEND!r})
torch.autograd.backward(out, torch.ones_like(out))
torch.cuda.synchronize({index})
assert torch.cuda.current_device() == 0
print(out.float().sum().item(), keys.grad.values().float().sum().item())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # Two means of ones, each of whose rows gives 1 to the values, and nothing to keys that are all equal.
    assert [float(x) for x in run.stdout.split()] == [2 * 5 * 2 * 64, 2 * 5 * 2 * 64]


def test_what_another_stream_reads_is_not_given_away():
    """DEV-04: with all that a batch has made on the way, also schedules."""
    lengths = (300, 0, 1, 64)
    values = torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(20, 2, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    expected = JaggedTensor(values, offsets).attend(query, backend=BACKEND)
    keys = JaggedTensor(values.clone(), offsets.clone())
    assert keys.max_length == 300
    keys.lengths(), keys.unbind(), keys.attend(query, backend=BACKEND)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second, in which the memory could be taken
        got = keys.attend(query, backend=BACKEND)
    keys.record_stream(side)
    del keys
    taken = [torch.full((n,), math.nan, device="cuda") for n in (1 << 7, 1 << 9, 1 << 12, 1 << 14) for _ in range(64)]
    torch.cuda.synchronize()
    assert torch.equal(got, expected)
    assert taken
