"""Items are dealt to ranks by cost with the code of the schedules, and the loads are about equal."""

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.data import SequenceCost, assign, imbalance

KINDS = [ScheduleKind.LPT, ScheduleKind.ZIGZAG, ScheduleKind.ROUND_ROBIN, ScheduleKind.CONTIGUOUS]


def lognormal(count=4096, seed=0):
    drawn = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 1.2 + 5.3)
    return drawn.to(torch.int64).clamp(1, 8192)


def loads(costs, owner, ranks):
    return torch.zeros(ranks, dtype=torch.float64).index_add_(0, owner, torch.as_tensor(costs).double())


@pytest.mark.parametrize("kind", KINDS)
@given(costs=st.lists(st.integers(0, 1000), max_size=40), ranks=st.integers(1, 12))
def test_every_item_has_one_rank_and_no_rank_is_without_where_there_are_enough(kind, costs, ranks):
    owner = assign(costs, ranks, kind)
    assert owner.shape == (len(costs),)
    assert owner.dtype == torch.int64
    counts = owner.bincount(minlength=ranks)
    assert counts.shape == (ranks,)
    if len(costs) >= ranks:
        assert counts.min() >= 1
    elif kind is not ScheduleKind.CONTIGUOUS:
        assert counts.max() <= 1


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 12))
def test_lpt_keeps_the_bound_of_graham(costs, ranks):
    """No load is over the mean by more than one item, and the longest first makes that the last one dealt."""
    found = loads(costs, assign(costs, ranks), ranks)
    assert found.max() <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-9


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 12))
def test_lpt_gives_each_next_to_the_least_loaded(costs, ranks):
    owner, found = assign(costs, ranks).tolist(), [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        assert found[owner[i]] == min(found)
        found[owner[i]] += costs[i]


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_dealt_as_tiles_of_a_schedule_are(kind):
    """One level up: sequences of so many blocks, one tile each, and the same hands."""
    lengths = lognormal(300)
    schedule = JaggedLayout.from_lengths(lengths).schedule(kind, q_len=1, heads=1, workers=7, block_q=1, block_kv=1)
    owner = torch.empty(300, dtype=torch.int64)
    owner[schedule.tiles[:, 0].long()] = schedule.owner.long()
    assert torch.equal(assign(lengths, 7, kind), owner)


def test_balanced_assignment_of_lognormal_lengths_is_within_one_percent_at_64_ranks():
    lengths = lognormal()
    for cost in (SequenceCost(), SequenceCost.of_pooling(512, 128), SequenceCost.of_encoder(512)):
        costs = cost(lengths)
        drawn = torch.randint(64, (4096,), generator=torch.Generator().manual_seed(1))
        balanced, random = imbalance(costs, assign(costs, 64), 64), imbalance(costs, drawn, 64)
        assert balanced <= 1.01
        assert random >= 1.3


def test_fractions_of_any_size_are_costs():
    costs = torch.tensor([1e-9, 2e-9, 3e-9, 0.0])
    assert torch.equal(assign(costs, 2), assign(costs * 2.0**90, 2))
    assert assign(torch.zeros(5), 2).bincount().tolist() == [3, 2]


def test_cost_of_a_sequence_is_quadratic_linear_and_constant():
    lengths = torch.tensor([0, 3, 1000])
    assert SequenceCost(2, 5, 7)(lengths).tolist() == [7, 40, 2_005_007]
    encoder = SequenceCost.of_encoder(8, 32)
    assert encoder(torch.tensor([3])).item() == 3 * (8 * 64 + 4 * 8 * 32) + 9 * 4 * 8
    assert SequenceCost.of_encoder(8, causal=True).pair == encoder.pair / 2
    assert SequenceCost.of_pooling(8, 2).pair == 0


REFUSALS = [
    (lambda: assign([1.0, -1.0], 2), r"costs must be finite and at least 0, got -1.0..1.0"),
    (lambda: assign([1.0, float("nan")], 2), "costs must be finite"),
    (lambda: assign([float("inf")], 2), "costs must be finite"),
    (lambda: assign([1], 0), "ranks must be at least 1, got 0"),
    (lambda: assign(torch.ones(2, 2), 2), "costs must be of rank 1"),
    (lambda: assign([1], 2, ScheduleKind.STREAM_K), "kind must be one of lpt, zigzag, .* got stream-k"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_benchmark_prints_both_and_its_bar_holds(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    scaling = importlib.import_module("scaling")
    assert scaling.bars()
    shown = capsys.readouterr().out
    assert "random" in shown
    assert "lpt" in shown
    monkeypatch.setattr(scaling, "owners", lambda costs, ranks, kind: torch.arange(len(costs)) % ranks)
    assert not scaling.bars()
    forward, train = (scaling.worth_splitting(scaling.INSIDE, 128, train=train) for train in (False, True))
    assert forward == pytest.approx(3.5 * train)
