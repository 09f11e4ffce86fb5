"""Batches keep to their budget, come the same again, and give every rank as much to do."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import jaggedtensor
from jaggedtensor import ScheduleKind
from jaggedtensor.data import SequenceCost, TokenBudgetSampler


def lognormal(count=2000, seed=0):
    drawn = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 1.2 + 3)
    return drawn.to(torch.int64).clamp(0, 500)


def of_all_ranks(lengths, budget, replicas, epoch=0, **options):
    """steps x ranks lists of numbers."""
    samplers = [TokenBudgetSampler(lengths, budget, num_replicas=replicas, rank=r, **options) for r in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    streams = [list(sampler) for sampler in samplers]
    assert {len(stream) for stream in streams} == {len(samplers[0])}
    return list(zip(*streams, strict=True))


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "bucket": st.sampled_from([0, 3, 10]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
        "max_sequences": st.integers(1, 6),
        "cost": st.sampled_from([SequenceCost(), SequenceCost(pair=1, token=3)]),
        "balance": st.sampled_from([ScheduleKind.LPT, ScheduleKind.ZIGZAG, ScheduleKind.ROUND_ROBIN]),
    },
)


@given(
    lengths=st.lists(st.integers(0, 20), max_size=60),
    budget=st.integers(20, 60),
    replicas=st.integers(1, 5),
    options=OPTIONS,
)
@example(lengths=[12, 12, 12], budget=20, replicas=2, options={"shuffle": False})  # 36 of 40, but no two fit together
@example(lengths=[20, *[1] * 30], budget=20, replicas=2, options={"shuffle": False, "cost": SequenceCost(1, 0)})
def test_every_sequence_comes_once_and_no_batch_is_over_its_budget(lengths, budget, replicas, options):
    steps = of_all_ranks(lengths, budget, replicas, **options)
    numbers = [n for step in steps for batch in step for n in batch]
    for step in steps:
        for batch in step:
            assert 0 < len(batch) <= options.get("max_sequences", 60)
            assert sum(lengths[n] for n in batch) <= budget
    padding = len(numbers) - len(set(numbers))
    assert padding < replicas
    if options.get("drop_last"):
        assert padding == 0
    else:
        assert set(numbers) == set(range(len(lengths)))


def test_groups_are_read_by_one_rank_each_and_mixed_in_windows():
    lengths = lognormal(1000)
    groups = [100, 50, 150, 0, 200, 100, 100, 100, 200]
    group_of = torch.repeat_interleave(torch.arange(9), torch.tensor(groups)).tolist()
    steps = of_all_ranks(lengths, 600, 2, groups=groups, window=2)
    seen = [set(), set()]
    numbers = []
    for step in steps:
        for rank, batch in enumerate(step):
            assert sum(int(lengths[n]) for n in batch) <= 600
            seen[rank] |= {group_of[n] for n in batch}
            assert len({group_of[n] for n in batch}) <= 2
            numbers += batch
    assert not seen[0] & seen[1]
    assert set(numbers) == set(range(1000))
    # One window after the other: a group that has gone does not come back, until there is only padding left.
    short = of_all_ranks(lengths, 600, 2, groups=groups, window=2, drop_last=True)
    assert short == steps[: len(short)]
    for rank in range(2):
        stream = [group_of[n] for step in short for n in step[rank]]
        order = list(dict.fromkeys(stream))
        for first, later in zip(order[::2], order[2::2], strict=False):
            assert stream.index(later) > len(stream) - 1 - stream[::-1].index(first)
    kept = [n for step in short for batch in step for n in batch]
    assert len(kept) == len(set(kept))
    assert len(steps) < 1.5 * len(short)
    assert sorted(
        n for (batch,) in of_all_ranks(lengths, 600, 1, groups=groups, drop_last=True) for n in batch
    ) == list(range(1000))


def test_epochs_and_seeds_differ_and_repeat():
    lengths = lognormal()
    orders = {
        (seed, epoch): of_all_ranks(lengths, 1000, 2, epoch, seed=seed) for seed in (0, 1, 2**40) for epoch in (0, 1)
    }
    assert len({json.dumps(x) for x in orders.values()}) == 6
    assert orders[1, 1] == of_all_ranks(lengths, 1000, 2, 1, seed=1)
    still = of_all_ranks(lengths, 1000, 2, 0, shuffle=False)
    assert still == of_all_ranks(lengths, 1000, 2, 1, shuffle=False)
    state = torch.random.get_rng_state()
    of_all_ranks(lengths, 1000, 2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_steps_are_balanced_where_chance_is_not():
    lengths = lognormal(20_000)
    busiest = {}
    for balance in (ScheduleKind.LPT, ScheduleKind.CONTIGUOUS):
        sampler = TokenBudgetSampler(lengths, 4000, num_replicas=8, rank=0, balance=balance)
        loads = sampler.loads()
        assert loads.shape == (len(sampler), 8)
        busiest[balance] = float((loads.amax(1) / loads.mean(1)).mean())
    assert busiest[ScheduleKind.LPT] < 1.01
    assert busiest[ScheduleKind.CONTIGUOUS] > 1.1


def test_buckets_make_equal_tokens_equal_costs():
    lengths = lognormal(20_000)
    cost = SequenceCost(pair=1, token=0)
    found = []
    for bucket in (0, 2000):
        sampler = TokenBudgetSampler(lengths, 1500, num_replicas=8, rank=0, cost=cost, bucket=bucket)
        loads = sampler.loads()
        tokens = sum(int(lengths[b].sum()) for step in sampler._plan() for b in step)
        found.append((float(loads.amax(1).sum() / loads.mean(1).sum()), tokens / (len(sampler) * 8 * 1500)))
    (plain, plain_fill), (bucketed, fill) = found
    assert bucketed < 1.1 < 1.3 < plain
    assert fill > 0.9 > 0.8 > plain_fill
    kinds = [float(lengths[b].double().std(correction=0)) for step in sampler._plan() for b in step]
    assert sum(kinds) / len(kinds) < 0.6 * float(lengths.double().std())
    few, many = lengths.double().quantile(torch.tensor([0.2, 0.8], dtype=torch.float64))
    assert not any(lengths[b].min() < few and lengths[b].max() > many for step in sampler._plan() for b in step)
    longest = [int(lengths[step[0]].max()) for step in sampler._plan()]
    assert longest != sorted(longest)  # batches of short ones are not all at the beginning


@pytest.mark.parametrize("done", [0, 1, 5])
def test_a_new_sampler_goes_on_where_the_old_one_was(done):
    lengths = lognormal()
    make = lambda **options: TokenBudgetSampler(lengths, 1000, num_replicas=2, rank=1, **options)
    sampler = make()
    sampler.set_epoch(3)
    walk = iter(sampler)
    for _ in range(done):
        next(walk)
    state = json.loads(json.dumps(sampler.state_dict()))  # plain numbers and names
    rest = list(walk)
    other = make()
    other.load_state_dict(state)
    other.set_epoch(3)  # as a training loop does
    assert list(other) == rest
    assert len(other) == len(rest) + done
    assert list(other) == list(other)[:done] + list(other)[done:]
    assert len(list(other)) == len(other)
    other.set_epoch(4)
    sampler.set_epoch(4)
    assert list(other) == list(sampler)


def test_steps_that_a_loader_took_ahead_are_not_done():
    sampler = TokenBudgetSampler(lognormal(), 1000)
    walk = iter(sampler)
    first = [next(walk) for _ in range(5)]
    other = TokenBudgetSampler(lognormal(), 1000)
    other.load_state_dict(sampler.state_dict(done=2))
    assert list(other)[:3] == first[2:]
    finished = TokenBudgetSampler(lognormal(), 1000)
    finished.load_state_dict(sampler.state_dict(done=len(sampler)))
    assert list(finished) == []


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_padded_or_dropped(drop_last):
    lengths = [4] * 10  # three ranks of two sequences each: 6, then 4 are left
    steps = of_all_ranks(lengths, 8, 3, shuffle=False, drop_last=drop_last)
    assert len(steps) == (1 if drop_last else 2)
    alone = of_all_ranks([4, 4], 8, 3, shuffle=False, drop_last=drop_last)
    assert alone == ([] if drop_last else [([0], [1], [0])])
    full = of_all_ranks([4] * 12, 8, 3, shuffle=False, drop_last=drop_last)
    assert len(full) == 2


def test_no_sequences_are_no_steps():
    sampler = TokenBudgetSampler([], 8, num_replicas=3, rank=1)
    assert len(sampler) == 0
    assert list(sampler) == []
    assert sampler.loads().shape == (0, 3)
    assert list(TokenBudgetSampler([0, 0, 0], 1)) == [[0, 1, 2]] or sorted(*TokenBudgetSampler([0, 0, 0], 1)) == [
        0,
        1,
        2,
    ]


REFUSALS = [
    (lambda: TokenBudgetSampler([3, 9, 4], 8), r"budget must be at least 9 \(the length of sequence 1\), got 8; cut"),
    (lambda: TokenBudgetSampler([3], 0), "budget must be at least 1"),
    (lambda: TokenBudgetSampler([-3], 8), "lengths must be at least 0, got -3"),
    (lambda: TokenBudgetSampler([3], 8, num_replicas=2, rank=2), r"rank must be in 0\.\.1, got 2"),
    (lambda: TokenBudgetSampler([3], 8, max_sequences=0), "max_sequences must be at least 1"),
    (lambda: TokenBudgetSampler([3], 8, bucket=-1), "bucket must be at least 0"),
    (
        lambda: TokenBudgetSampler([3], 8, groups=[2]),
        r"groups must be 0 or more each and 1 \(sequences\) in all, got 2",
    ),
    (
        lambda: TokenBudgetSampler([3, 1], 8, groups=[2, 0], num_replicas=2, rank=0),
        r"groups must be at least 2 .*got 1",
    ),
    (lambda: TokenBudgetSampler(torch.ones(2, 2), 8), "lengths must be of rank 1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed of the state must be 1, got 0; resume with the sampler that was saved"),
        ({"budget": 999}, "budget of the state must be 999, got 1000"),
        ({"num_replicas": 4}, "num_replicas of the state must be 4, got 2"),
        ({"lengths": lognormal(seed=5)}, "lengths of the state must be those of this sampler, got others"),
        ({"bucket": 10}, "bucket of the state must be 10, got 0"),
        ({"cost": SequenceCost(pair=1)}, "costs of the state must be"),
    ],
    ids=str,
)
def test_a_state_of_another_sampler_is_refused(other, message):
    options = {"lengths": lognormal(), "budget": 1000, "num_replicas": 2, "rank": 0}
    sampler = TokenBudgetSampler(**{**options, **other})
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(TokenBudgetSampler(**options).state_dict())
    sampler.load_state_dict(TokenBudgetSampler(**{**options, **other, "rank": 1}).state_dict())  # of another rank


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_workers_give_the_batches_of_the_sampler(workers):
    lengths = lognormal(300)
    data = [torch.full((n,), i) for i, n in enumerate(lengths.tolist())]
    sampler = TokenBudgetSampler(lengths, 1000, bucket=50)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=jaggedtensor.collate, num_workers=workers)
    assert len(loader) == len(sampler)
    wanted = [[data[n].tolist() for n in batch] for batch in sampler]
    assert [[x.tolist() for x in batch.to_list()] for batch in loader] == wanted
