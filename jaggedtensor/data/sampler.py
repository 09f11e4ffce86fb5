"""Batches bounded by tokens, dealt to ranks by cost, the same again from the same seed, epoch and step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from jaggedtensor.data.assign import SequenceCost, assign
from jaggedtensor.errors import fail
from jaggedtensor.schedules.types import ScheduleKind

Step = list[Tensor]  # the sequence numbers of each rank


class TokenBudgetSampler(Sampler[list[int]]):
    """Lists of sequence numbers of at most `budget` tokens together, for `DataLoader(batch_sampler=...)`.

    >>> sampler = TokenBudgetSampler([5, 1, 7, 3, 4], budget=8, shuffle=False)
    >>> list(sampler)
    [[0, 1], [2], [3, 4]]

    With several replicas, as many sequences as they may hold together are taken at each step and dealt to them by cost,
    so that all are done at about the same time. All have the same number of steps, and every sequence comes once in an
    epoch, but for those of `drop_last` or padding, as in `torch.utils.data.DistributedSampler`. Call `set_epoch` before
    each epoch.

    Args:
        lengths: of all sequences, the same on every rank.
        budget: tokens of a batch of one rank, at most.
        max_sequences: sequences of a batch of one rank, at most.
        bucket: if not 0, so many sequences at a time are sorted by length before they are cut into batches, whose order
            is then drawn: a batch has sequences of similar lengths. Where attention is quadratic, equal tokens are then
            about equal costs.
        shuffle: another order in each epoch.
        seed: of that order; the same on every rank.
        drop_last: leave out the last batch, which the data did not fill. Otherwise, where it has fewer sequences than
            there are replicas, some are repeated, so that no rank is without. With `groups`: leave out the steps that
            not every rank has, rather than have ranks repeat some.
        num_replicas, rank: of `torch.distributed` if it is initialised, else 1 and 0.
        cost: of lengths `[n]`, what ranks are to have equally much of; tokens if left out. Where costs and tokens
            disagree, batches hold fewer tokens than the budget.
        balance: how a step is dealt, see `assign`.
        groups: how many of the sequences, in order, are stored together, such as the row groups of a parquet file. Then
            each rank reads groups of its own, dealt by their costs, and sequences are shuffled among `window` groups.
        window: groups that are mixed, and so held in memory.

    Raises:
        ValueError: a sequence of more tokens than the budget; numbers out of range; fewer groups than replicas.
    """

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        budget: int,
        *,
        max_sequences: int | None = None,
        bucket: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        cost: Callable[[Tensor], Tensor] | None = None,
        balance: ScheduleKind = ScheduleKind.LPT,
        groups: Sequence[int] | None = None,
        window: int = 4,
    ) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64).cpu()
        if self.lengths.dim() != 1:
            fail("lengths", "of rank 1", self.lengths)
        is_running = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if is_running else 1
        if rank is None:
            rank = dist.get_rank() if is_running else 0
        for name, value in (("budget", budget), ("num_replicas", num_replicas), ("window", window)):
            if value < 1:
                fail(name, "at least 1", value)
        if max_sequences is not None and max_sequences < 1:
            fail("max_sequences", "at least 1", max_sequences)
        if bucket < 0:
            fail("bucket", "at least 0", bucket)
        if not 0 <= rank < num_replicas:
            fail("rank", f"in 0..{num_replicas - 1}", rank)
        if self.lengths.numel():
            longest, where = self.lengths.max(0)
            if int(self.lengths.min()) < 0:
                fail("lengths", "at least 0", int(self.lengths.min()))
            if int(longest) > budget:
                remedy = f"cut sequences to it (jt[:, -{budget}:]), leave them out, or raise it"
                fail("budget", f"at least {int(longest)} (the length of sequence {int(where)})", budget, remedy)
        if groups is not None:
            groups = [int(size) for size in groups]
            if min(groups, default=0) < 0 or sum(groups) != self.lengths.shape[0]:
                fail("groups", f"0 or more each and {self.lengths.shape[0]} (sequences) in all", str(sum(groups)))
            filled = len([size for size in groups if size])
            if 0 < filled < num_replicas:
                fail("groups", f"at least {num_replicas} (num_replicas)", filled, "write smaller row groups")
        self.budget, self.max_sequences, self.bucket = budget, max_sequences, bucket
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.num_replicas, self.rank = num_replicas, rank
        self.balance, self.groups, self.window = balance, groups, window
        self.epoch = 0
        self._costs = (SequenceCost() if cost is None else cost)(self.lengths)
        self._begin = self._done = 0
        self._planned: tuple[int, list[Step]] | None = None

    # -- what DistributedSampler does ---------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Another epoch begins from its first step; the one that goes on, from where it was."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._done = epoch, 0, 0

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank, however many are behind us."""
        return len(self._plan())

    def __iter__(self) -> Iterator[list[int]]:
        steps = self._plan()
        begin, self._begin = self._begin, 0  # a second walk of the same epoch starts over
        self._done = begin
        for step in steps[begin:]:
            self._done += 1
            yield step[self.rank].tolist()

    def loads(self) -> Tensor:
        """float64 `[steps, replicas]`: what each rank has to do at each step of this epoch, in units of `cost`."""
        loads = [[float(self._costs[numbers].sum()) for numbers in step] for step in self._plan()]
        return torch.tensor(loads, dtype=torch.float64).view(-1, self.num_replicas)

    # -- resuming -----------------------------------------------------------------------------------------------------

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Where we are, to go on from with `load_state_dict`. The same on every rank.

        Args:
            done: steps of this epoch that training has taken. If left out, as many as were handed out; a DataLoader
                with workers takes some ahead of training, so count them there.
        """
        return {"epoch": self.epoch, "done": self._done if done is None else done, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            ValueError: the state is of another seed, other lengths, budget or replicas, which make other batches.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                shown = "others" if name == "lengths" else repr(state.get(name))
                wanted = "those of this sampler" if name == "lengths" else repr(own)
                fail(f"{name} of the state", wanted, shown, "resume with the sampler that was saved")
        self.epoch, self._begin = int(state["epoch"]), int(state["done"])
        self._done = self._begin

    def _identity(self) -> dict[str, Any]:
        odd = torch.arange(1, 2 * len(self.lengths), 2) * 0x9E3779B97F4A7C1  # sums wrap around
        return {
            "seed": self.seed,
            "lengths": int(((self.lengths + 1) * odd).sum()),
            "budget": self.budget,
            "max_sequences": self.max_sequences,
            "bucket": self.bucket,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
            "balance": self.balance.value,
            "costs": f"{float(self._costs.sum()):.6e}",  # how a sum is rounded depends on the number of threads
            "groups": None if self.groups is None else [len(self.groups), self.window],
        }

    # -- the plan of an epoch -----------------------------------------------------------------------------------------

    def _plan(self) -> list[Step]:
        if self._planned is None or self._planned[0] != self.epoch:
            generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {self.epoch}").getrandbits(63))
            plan = self._plan_together(generator) if self.groups is None else self._plan_apart(generator)
            self._planned = self.epoch, plan
        return self._planned[1]

    def _plan_together(self, generator: torch.Generator) -> list[Step]:
        """All ranks share the sequences of each step."""
        count = self.lengths.shape[0]
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        steps = self._cut(self._bucketed(order), self.num_replicas, self.drop_last)
        return self._mixed(steps, generator)

    def _plan_apart(self, generator: torch.Generator) -> list[Step]:
        """Each rank has groups of its own."""
        assert self.groups is not None
        members = torch.arange(len(self.lengths)).split(self.groups)
        filled = [i for i, numbers in enumerate(members) if len(numbers)]
        owner = assign([float(self._costs[members[i]].sum()) for i in filled], self.num_replicas, self.balance)
        streams = []
        for rank in range(self.num_replicas):
            own = [members[i] for i, its in zip(filled, owner.tolist(), strict=True) if its == rank]
            if self.shuffle:
                own = [own[i] for i in torch.randperm(len(own), generator=generator).tolist()]
            stream: list[Tensor] = []
            for begin in range(0, len(own), self.window):
                order = torch.cat(own[begin : begin + self.window])
                if self.shuffle:
                    order = order[torch.randperm(len(order), generator=generator)]
                steps = self._cut(self._bucketed(order), 1, drop_last=False)
                stream += [step[0] for step in self._mixed(steps, generator)]
            streams.append(stream)
        sizes = [len(stream) for stream in streams]
        if not all(sizes):
            return []
        count = min(sizes) if self.drop_last else max(sizes)
        return [[stream[step % len(stream)] for stream in streams] for step in range(count)]

    def _bucketed(self, order: Tensor) -> Tensor:
        if not self.bucket:
            return order
        parts = []
        for n, part in enumerate(order.split(self.bucket)):  # up and down, so that neighbours are alike
            parts.append(part[self.lengths[part].sort(stable=True, descending=bool(n % 2)).indices])
        return torch.cat(parts) if parts else order

    def _mixed(self, steps: list[Step], generator: torch.Generator) -> list[Step]:
        """Buckets leave the order of batches sorted."""
        if not (self.bucket and self.shuffle):
            return steps
        return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]

    def _cut(self, order: Tensor, ranks: int, drop_last: bool) -> list[Step]:
        """Steps of as many sequences, in order, as the ranks may hold together."""
        lengths, costs = self.lengths[order], self._costs[order]
        before = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        steps: list[Step] = []
        begin, count = 0, order.shape[0]
        while begin < count:
            most = int(torch.searchsorted(before, before[begin] + ranks * self.budget, right=True)) - 1
            if self.max_sequences is not None:
                most = min(most, begin + ranks * self.max_sequences)
            end, owner = self._fit(lengths, costs, begin, most, ranks)
            if end == count and drop_last and self._has_room(lengths, begin, ranks):
                break
            chosen = order[begin:end]
            if end - begin < ranks:
                more = order[torch.arange(ranks - (end - begin)) % count]
                chosen, owner = torch.cat((chosen, more)), torch.arange(ranks)
            steps.append([chosen[owner == rank] for rank in range(ranks)])
            begin = end
        return steps

    def _fit(self, lengths: Tensor, costs: Tensor, begin: int, end: int, ranks: int) -> tuple[int, Tensor]:
        """The sequences `begin..end - 1`, or as many of them as keep every rank within its budget, and their ranks."""
        while True:
            if ranks == 1:
                return end, torch.zeros(end - begin, dtype=torch.int64)
            owner = assign(costs[begin:end], ranks, self.balance)
            tokens = lengths.new_zeros(ranks).index_add_(0, owner, lengths[begin:end])
            sequences = owner.bincount(minlength=ranks)
            most = self.max_sequences or int(sequences.max())
            over = max(int(tokens.max()) / self.budget, int(sequences.max()) / most)
            if over <= 1 or end - begin <= ranks:  # one to each always fits
                return end, owner
            end = max(begin + ranks, min(end - 1, begin + int((end - begin) / over)))

    def _has_room(self, lengths: Tensor, begin: int, ranks: int) -> bool:
        """Whether what is left from `begin` on leaves a batch unfilled."""
        left = lengths[begin:]
        return int(left.sum()) < ranks * self.budget and len(left) < ranks * (self.max_sequences or len(left) + 1)
