"""What one of several ranks checks: attention to spread sequences, and batches that are cut and put together."""

import os
import re
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from jaggedtensor import JaggedTensor, attend
from jaggedtensor.nn import PMAPooling
from jaggedtensor.testing import LENGTHS, make_jagged
from jaggedtensor.testing.cases import random_tensor

warnings.simplefilter("error")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
F64 = torch.float64
MIXED = (5, 0, 1, 17, 2, 3)


def raises(error, message, call):
    """The error of this rank, whose message has these words."""
    with pytest.raises(error, match=re.escape(message)):
        call()


def part_of(jt, how, mesh):
    """This rank's part, with a gradient of its own, and its rows of the whole."""
    numbers = JaggedTensor(torch.arange(jt.num_tokens), jt.layout)
    if how == "shard":
        part, rows = jt.detach().shard(mesh), numbers.shard(mesh).values()
    else:  # the last rank has everything
        begin = 0 if WORLD - 1 == RANK else None
        rows = numbers[:, begin or 0 : None if begin == 0 else 0].values()
        part = jt.detach()[:, : None if begin == 0 else 0]
    return JaggedTensor(part.values().clone().requires_grad_(), part.layout), rows


QUERIES = {
    "one for all": lambda b: random_tensor(3, 4, 8, seed=5),
    "one for each": lambda b: random_tensor(b, 2, 4, 8, seed=5),
    "jagged": lambda b: make_jagged([n % 4 for n in range(b)], 4, 8, seed=5, slack=2),
}


def check_every_kind_of_query(mesh):
    for name, make in QUERIES.items():
        for lengths in (MIXED, (0, 0), (), (1,)):
            for how in ("shard", "last has all"):
                compare(mesh, make(len(lengths)), lengths, how, (name, lengths, how))


def compare(mesh, query, lengths, how, label):
    """Result, lse and gradients with those of one process, which every rank computes for itself."""
    jagged = isinstance(query, JaggedTensor)
    key, value = make_jagged(lengths, 2, 8, seed=1), make_jagged(lengths, 2, 6, seed=2)
    value = key.with_values(value.values())
    (k_part, rows), (v_part, _) = part_of(key, how, mesh), part_of(value, how, mesh)
    v_part = k_part.with_values(v_part.values())
    results = []
    for group, k, v in ((None, key.clone().requires_grad_(), value.clone().requires_grad_()), (mesh, k_part, v_part)):
        q = query.detach().clone().requires_grad_()
        out, lse = attend(q, k, v, return_lse=True, scale=0.7, group=group)
        if jagged:
            assert out.layout is query.layout
            out, q = out.values(), q.values()
        live = lse.isfinite()
        weight = random_tensor(*out.shape, seed=7)
        loss = (out * weight).sum() + (torch.where(live, lse, 0) * random_tensor(*lse.shape, seed=8)).sum()
        grads = torch.autograd.grad(loss, (q, k.values(), v.values()))
        results.append((out.detach(), lse.detach(), *grads))
    (out, lse, dq, dk, dv), mine = results
    for what, got, wanted in zip(
        ("out", "lse", "dq", "dk", "dv"), mine, (out, lse, dq, dk[rows], dv[rows]), strict=True
    ):
        assert got.shape == wanted.shape, (*label, what, got.shape, wanted.shape)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13, msg=lambda m, w=what: f"{label} {w}: {m}")


def check_a_process_group_serves_as_a_mesh_does(mesh):
    key = make_jagged(MIXED, 2, 8).shard(mesh)
    query = random_tensor(3, 4, 8)
    assert torch.equal(key.attend(query, group=mesh), key.attend(query, group=mesh.get_group()))
    assert torch.equal(key.attend(query, group=mesh), key.attend(query, group=dist.group.WORLD))


def check_one_head_and_lse_without_head_axis(mesh):
    whole = make_jagged(MIXED, 8)
    key = whole.shard(mesh)
    for query in (random_tensor(3, 8), random_tensor(6, 3, 8), make_jagged((1, 2, 0, 3, 1, 1), 8)):
        for mine, wanted in zip(
            attend(query, key, return_lse=True, group=mesh), attend(query, whole, return_lse=True), strict=True
        ):
            mine, wanted = (x.values() if isinstance(x, JaggedTensor) else x for x in (mine, wanted))
            assert mine.shape == wanted.shape
            torch.testing.assert_close(mine, wanted)


def check_half_precision_is_merged_in_single(mesh):
    whole = make_jagged((300, 0, 40), 2, 16, dtype=torch.bfloat16)
    query = random_tensor(3, 4, 16, dtype=torch.bfloat16).requires_grad_()
    exact = query.detach().double().requires_grad_()
    wanted = whole.double().attend(exact)
    out = whole.shard(mesh).attend(query, group=mesh)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.01)
    (grad,) = torch.autograd.grad(out.sum(), query)
    (right,) = torch.autograd.grad(wanted.sum(), exact)
    assert (grad.double() - right).abs().max() < 0.02 * right.abs().max() + 0.02


def check_mistakes_are_errors_on_every_rank(mesh):
    """And not a wait without end: the mistaken rank is the last, and the group is in order afterwards."""
    mistaken = WORLD - 1 == RANK
    key = make_jagged(MIXED, 2, 8)
    query = random_tensor(3, 4, 8)
    call = lambda q=query, k=key, **options: lambda: attend(q, k, group=mesh, **options)
    same = "the same on every rank"
    raises(
        ValueError,
        f"heads of query must be {same}, got 4 on rank 0, ",
        call(random_tensor(3, 2, 8) if mistaken else query),
    )
    single = (query.float(), key.float())
    raises(ValueError, f"dtype must be {same}, got torch.float64 on rank 0", call(*single) if mistaken else call())
    raises(ValueError, f"batch size must be {same}", call(k=key[:2] if mistaken else key))
    raises(ValueError, f"query length must be {same}", call(query[:1] if mistaken else query))
    raises(ValueError, f"the value dimension must be {same}", call(value=key[:, :, :, :5] if mistaken else key))
    raises(ValueError, f"requires_grad of query must be {same}", call(query.clone().requires_grad_(mistaken)))
    raises(ValueError, f"a jagged query must be {same}", call(key if mistaken else query[:, :, :]))
    # What one rank alone is refused, the others hear of.
    bad = call(random_tensor(3, 3, 8) if mistaken else query)
    if mistaken:
        raises(ValueError, "heads of query must be a positive multiple of the 2 heads of key, got 3", bad)
    else:
        raises(RuntimeError, f"rank {WORLD - 1} of the group has failed before data moved", bad)
    bad = call(k=key.values() if mistaken else key)
    raises(TypeError if mistaken else RuntimeError, "JaggedTensor" if mistaken else "has failed", bad)
    raises(ValueError, f"operation must be {same}", call() if mistaken else lambda: key.shard(mesh))
    raises(NotImplementedError, "causal and window must be left out with group", call(causal=True))
    raises(NotImplementedError, "causal and window must be left out with group", call(window=3))
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    raises(NotImplementedError, "block_mask must be left out with group", call(block_mask=mask))
    raises(
        TypeError,
        "group must be a ProcessGroup or a one-dimensional DeviceMesh, got 3",
        lambda: attend(query, key, group=3),
    )
    compare(mesh, query, MIXED, "shard", ("after mistakes",))


def check_meshes_that_do_not_fit(mesh):
    square = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("data", "part"))
    batch = make_jagged(MIXED, 4)
    raises(
        ValueError,
        "mesh must be one-dimensional, got shape (2, 1); pick a dimension: mesh[name] of 'data', 'part'",
        lambda: batch.shard(square),
    )
    torch.testing.assert_close(batch.shard(square["data"]).gather().values(), batch.values())
    alone = batch.shard(square["part"])  # one rank each: everything stays
    assert torch.equal(alone.values(), batch.values())
    other = dist.new_group([0])
    if RANK == 0:
        assert torch.equal(batch.shard(other).gather().values(), batch.values())
    else:
        raises((ValueError, TypeError), "group must be", lambda: batch.shard(other))


def check_batches_are_cut_and_put_together(mesh):
    for dim in (0, 1):
        for name, lengths in {**LENGTHS, "long": (100, 3, 0, 41)}.items():
            whole = make_jagged(lengths, 2, 3, slack=2, requires_grad=True)
            part = whole.shard(mesh, dim=dim)
            if dim == 1:
                assert part.batch_size == len(lengths)
                assert all(
                    n // WORLD <= m <= -(-n // WORLD) for n, m in zip(lengths, part.lengths().tolist(), strict=True)
                )
            counts = torch.zeros(WORLD, dtype=torch.int64)
            counts[RANK] = part.num_tokens
            dist.all_reduce(counts)
            assert counts.sum() == sum(lengths), (name, counts)
            again = (part * 2).square().gather()
            assert again.layout is whole.layout
            wanted = (whole * 2).square().values()[: sum(lengths)]
            torch.testing.assert_close(again.values(), wanted)
            weight = random_tensor(*wanted.shape, seed=3)
            grads = [torch.autograd.grad((x * weight).sum(), whole.values())[0] for x in (again.values(), wanted)]
            torch.testing.assert_close(*grads)
            assert not grads[0][sum(lengths) :].any()


def check_short_sequences_go_to_all_ranks_alike(mesh):
    assert make_jagged([1] * 4 * WORLD, 1).shard(mesh).num_tokens == 4
    assert make_jagged([WORLD + 1] * 4 * WORLD, 1).shard(mesh).num_tokens == 4 * WORLD + 4


def check_sequences_are_dealt_by_cost(mesh):
    whole = make_jagged((8, 1, 1, 1, 1, 1, 1, 1, 1), 1)
    part = whole.shard(mesh, dim=0)
    assert part.num_tokens == 8
    quadratic = whole.shard(mesh, dim=0, cost=lambda lengths: lengths**2)
    assert sorted(quadratic.lengths().tolist()) in ([8], [1] * 8)
    torch.testing.assert_close(quadratic.gather().values(), whole.values())


def check_what_cannot_be_cut_or_put_together(mesh):
    mistaken = WORLD - 1 == RANK
    batch = make_jagged(MIXED, 4)
    other = make_jagged((5, 0, 1, 17, 3, 2), 4)
    raises(
        ValueError,
        "offsets (their hash) must be the same on every rank",
        lambda: (other if mistaken else batch).shard(mesh),
    )
    raises(
        ValueError, "dtype must be the same on every rank", lambda: (batch.float() if mistaken else batch).shard(mesh)
    )
    part = batch.shard(mesh)
    raises(ValueError, "size of a token must be the same on every rank", (part[:, :, :2] if mistaken else part).gather)
    raises(ValueError, "the batch must be made by shard(mesh)", batch.gather)
    raises(ValueError, "dim must be 0 (sequences to ranks) or 1", lambda: batch.shard(mesh, dim=2))
    torch.testing.assert_close(part.gather().values(), batch.values())


def check_pooling_of_spread_sequences(mesh):
    torch.manual_seed(0)
    pool = PMAPooling(16, 4, num_queries=2, kv_heads=2, dtype=F64)
    whole = make_jagged(MIXED, 16, requires_grad=True)
    leaves = [*pool.parameters(), whole.values()]
    wanted = pool(whole)
    mine = pool(whole.shard(mesh), group=mesh)
    torch.testing.assert_close(mine, wanted)
    # Of what acts on a part, a rank has a part of the gradient; of what acts on the whole, the whole.
    of_parts = {id(p) for p in (*pool.norm_keys.parameters(),)}
    rows = pool.attention.rows[0]
    grads = zip(pool.named_parameters(), torch.autograd.grad(mine.square().sum(), leaves),
                torch.autograd.grad(wanted.square().sum(), leaves), strict=False)  # fmt: skip
    for (name, parameter), got, right in grads:
        if name.startswith("attention.in_proj"):
            dist.all_reduce(got[rows:])
        elif id(parameter) in of_parts:
            dist.all_reduce(got)
        torch.testing.assert_close(got, right, msg=lambda m, n=name: f"{n}: {m}")


def check_compiled_attention_is_one_graph(mesh):
    whole = make_jagged(MIXED, 2, 8)
    part = whole.shard(mesh)
    query = nn.Parameter(random_tensor(3, 4, 8))
    group = mesh.get_group()

    def function(values, offsets):
        return JaggedTensor(values, offsets).attend(query, group=group)

    warnings.filterwarnings(
        "ignore", "<class .torch.autograd.function.Function.*> should not be", DeprecationWarning
    )  # dynamo
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (compiled, function):
        values = part.values().detach().clone().requires_grad_()
        out = call(values, part.offsets())
        out.square().sum().backward()
        grads.append((out.detach(), values.grad, query.grad))
        query.grad = None
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def main():
    store = dist.FileStore(os.environ["STORE"], WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (WORLD,))
    for name, check in list(globals().items()):
        if name.startswith("check_") and (len(sys.argv) < 2 or sys.argv[1] in name):
            print(name, flush=True)
            torch.manual_seed(0)
            check(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
