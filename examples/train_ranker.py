"""Trains a next-item ranker on user histories of any length, packed without padding: a minute or two on two cores.

    python examples/train_ranker.py                    # MovieLens-100k if `recbole` is installed, else invented data
    python examples/train_ranker.py --data clicks.csv  # another log with user, item and timestamp columns

Two layers of causal self-attention read each history, then one learned query pools it (PMA, Lee et al. 2019). The last
item of each history is kept for the test and the one before for validation; every item of the catalogue is ranked.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import jaggedtensor
from jaggedtensor import JaggedTensor, attend

# -- data -------------------------------------------------------------------------------------------------------------


def find_movielens() -> Path | None:
    """The MovieLens-100k log that comes inside the package recbole, which need not be imported for it."""
    spec = importlib.util.find_spec("recbole")
    folders = (spec and spec.submodule_search_locations) or []
    paths = [Path(folder, "dataset_example/ml-100k/ml-100k.inter") for folder in folders]
    return next((path for path in paths if path.is_file()), None)


def read_log(path: Path) -> list[list[str]]:
    """Histories, the items of each user in order of time, from a table of commas or tabs with a header.

    Its columns are the first whose names begin with user, item and time, such as `user_id:token`.
    """
    with path.open(newline="") as file:
        header = file.readline().rstrip("\r\n").lower()
        delimiter = "\t" if "\t" in header else ","
        names = header.split(delimiter)
        found = [[i for i, name in enumerate(names) if name.startswith(word)] for word in ("user", "item", "time")]
        if not all(found):
            raise SystemExit(f"{path} must have columns named user..., item... and time..., got {', '.join(names)}")
        user, item, time = (columns[0] for columns in found)
        events = [(float(row[time]), row[user], row[item]) for row in csv.reader(file, delimiter=delimiter) if row]
    histories: dict[str, list[str]] = {}
    for _, user_id, item_id in sorted(events, key=lambda event: event[0]):  # equal times: in the order of the file
        histories.setdefault(user_id, []).append(item_id)
    return list(histories.values())


def invent_histories(users: int, seed: int, genres: int = 16, size: int = 25) -> list[list[str]]:
    """Each user has three genres and takes their famous items more often. The last item tells of one genre only."""
    rng = random.Random(seed)
    fame = [1 / (1 + rank) for rank in range(size)]
    histories = []
    for _ in range(users):
        mine = rng.sample(range(genres), 3)
        length = min(200, 4 + int(rng.lognormvariate(3.0, 0.8)))
        histories.append([f"{rng.choice(mine)}/{rng.choices(range(size), fame)[0]}" for _ in range(length)])
    return histories


class Split:
    """Leave one out: the last item of each history is the test, the one before validation, the rest training."""

    def __init__(self, histories: list[list[str]]):
        histories = [history for history in histories if len(history) >= 3]
        if not histories:
            raise SystemExit("no user of the data has three events or more")
        number = {item: i for i, item in enumerate(dict.fromkeys(item for history in histories for item in history))}
        self.items, self.histories = len(number), [torch.tensor([number[x] for x in h]) for h in histories]
        self.train = [h[:-2] for h in self.histories]
        self.valid = [{"history": h[:-2], "next": h[-2]} for h in self.histories]
        self.test = [{"history": h[:-1], "next": h[-1]} for h in self.histories]
        # Where nobody takes an item twice, what a user has had cannot be next, and need not be ranked.
        self.exclude_seen = all(len(h.unique()) == len(h) for h in self.train)


class Thinned(Dataset):
    """Training examples: four fifths of each history, others in every epoch, which makes more of few users."""

    def __init__(self, histories: list[Tensor], max_length: int):
        self.histories, self.max_length = histories, max_length

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, user: int) -> dict[str, Tensor]:
        history = self.histories[user]
        history = history[torch.rand(len(history)) < 0.8][-self.max_length - 1 :]
        return {"history": history[:-1], "next": history[1:]}


# -- model ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal self-attention and a feed-forward net. Modules of torch act on a JaggedTensor token by token."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: JaggedTensor) -> JaggedTensor:  # (users, j, dim)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.dropout(self.out(attend(q, k, v, causal=True).flatten(2)))
        return x + self.dropout(self.feed(x))


class Pool(nn.Module):
    """One learned query asks every history the same: (users, j, dim) -> (users, dim), 0 for an empty history."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, heads, dim // heads))
        self.norm, self.kv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.out.weight)  # the model starts without it, and learns what it is good for

    def forward(self, x: JaggedTensor) -> Tensor:
        keys, values = (part.unflatten(-1, self.query.shape[1:]) for part in self.kv(self.norm(x)).chunk(2, -1))
        return self.dropout(self.out(keys.attend(self.query, values).flatten(1)))


class Ranker(nn.Module):
    """Scores every item as the next, from where the user is (the last state) and who they are (the pooled history)."""

    def __init__(self, items: int, dim: int = 64, heads: int = 2, dropout: float = 0.2, max_length: int = 512):
        super().__init__()
        self.max_length = max_length
        self.items, self.places = nn.Embedding(items, dim), nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(2))
        self.pool = Pool(dim, heads, dropout)
        self.norm, self.bias, self.dropout = nn.LayerNorm(dim), nn.Parameter(torch.zeros(items)), nn.Dropout(dropout)
        for embedding in (self.items, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def states(self, history: JaggedTensor) -> JaggedTensor:
        place = history.with_values(history.layout.positions(history.num_tokens))
        x = self.dropout(self.items(history) + self.places(place))
        for layer in self.layers:
            x = layer(x)  # every layer shares one layout
        return x

    def scores(self, x: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
        return F.linear(self.norm(x), self.items.weight, self.bias)  # (..., items)

    def forward(self, history: JaggedTensor) -> Tensor:
        """Scores of what comes after each history, (users, items)."""
        states = self.states(history[:, -self.max_length :])
        return self.scores(states.last() + self.pool(states[:, :-1]))

    def loss(self, history: JaggedTensor, following: JaggedTensor) -> Tensor:
        """Cross-entropy of the next item after every place of every history.

        The last few places, a random number, may use what the pool finds in those before them.
        """
        recent = int(50 ** torch.rand(()))
        states = self.states(history)
        before, after = states[:, :-recent], states[:, -recent:]
        after = after + self.pool(before)[:, None]
        early = F.cross_entropy(self.scores(before), following[:, :-recent], reduction="sum")
        late = F.cross_entropy(self.scores(after), following[:, -recent:], reduction="sum")
        return (early + late) / max(history.num_tokens, 1)


# -- training and evaluation ------------------------------------------------------------------------------------------

Ranking = Callable[[JaggedTensor], Tensor]  # histories -> scores of every item, (users, items)


@torch.no_grad()
def evaluate(ranking: Ranking, examples: list[dict[str, Tensor]], exclude_seen: bool) -> tuple[float, float]:
    """Hit rate and NDCG among the first ten of the whole catalogue. A tie counts against the ranking."""
    ranks = []
    for batch in DataLoader(examples, batch_size=256, collate_fn=jaggedtensor.collate):
        history, following = batch["history"], batch["next"]
        scores = ranking(history)
        target = scores.gather(1, following[:, None])
        if exclude_seen:
            user = history.layout.sequence_ids(history.num_tokens)
            scores = scores.index_put((user, history.values()), torch.tensor(-torch.inf))
        ranks.append((~(scores < target)).sum(1) - 1)
    rank = torch.cat(ranks)
    hit = (rank < 10).double()
    return hit.mean().item(), (hit / (rank + 2).log2()).mean().item()


def baselines(train: list[Tensor], items: int) -> dict[str, Ranking]:
    """What needs no gradient: the most popular items, and those that most often came right after the last one."""
    popularity = torch.bincount(torch.cat(train), minlength=items).float()
    pairs = torch.cat([h[:-1] for h in train]), torch.cat([h[1:] for h in train])
    counts = torch.zeros(items, items).index_put_(pairs, torch.ones(()), accumulate=True)
    counts += 0.5 * popularity / popularity.max()  # orders those that never came after it
    return {
        "popularity": lambda history: popularity.expand(len(history), -1),
        "after the last item": lambda history: counts[history.last()],
    }


def fit(model: Ranker, train: list[Tensor], epochs: int, batch_size: int = 8, lr: float = 2e-3) -> list[float]:
    """The loss of every step."""
    loader = DataLoader(Thinned(train, model.max_length), batch_size, shuffle=True, collate_fn=jaggedtensor.collate)
    steps = epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    losses = []
    model.train()
    bar = tqdm((batch for _ in range(epochs) for batch in loader), total=steps, unit="step", mininterval=0.5)
    for batch in bar:
        loss = model.loss(batch["history"], batch["next"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    return losses


def draw(losses: list[float], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib")
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    width = max(1, len(losses) // 50)
    mean = torch.tensor(losses).unfold(0, width, 1).mean(1).tolist()
    axes.plot(losses, color="lightsteelblue", linewidth=0.8, label="each step")
    axes.plot(range(width - 1, len(losses)), mean, color="navy", label=f"mean of {width}")
    axes.set(xlabel="step", ylabel="cross-entropy of the next item")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture of the loss: {path}")


def main(argv: list[str] | None = None) -> int:
    """0 if the ranker beats both baselines in both measures of the test, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a log in .inter, .tsv or .csv format")
    parser.add_argument("--invent", type=int, metavar="USERS", help="invent the histories of so many users")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/train_ranker.png"), help="where the picture goes")
    args = parser.parse_args(argv)
    if args.data and not args.data.is_file():
        parser.error(f"--data: there is no file {args.data}")
    torch.manual_seed(args.seed)

    source = args.data or (None if args.invent else find_movielens())
    data = Split(read_log(source) if source else invent_histories(args.invent or 1000, args.seed))
    lengths = [len(history) for history in data.histories]
    origin = source.name if source else "INVENTED histories (for MovieLens-100k: pip install --no-deps recbole==1.2.1)"
    print(f"data: {origin}")
    print(
        f"{len(lengths)} users, {min(lengths)} to {max(lengths)} events each, {sum(lengths)} in all, {data.items} items"
    )
    print(f"every item is ranked{', but for those that the user has had' if data.exclude_seen else ''}")

    model = Ranker(data.items, args.dim)
    losses = fit(model, data.train, args.epochs)
    model.eval()
    others = baselines(data.train, data.items)
    print(f"\n{'':22}validation         test\n{'':22}HR@10   NDCG@10    HR@10   NDCG@10")
    table = {}
    for name, ranking in {**others, "ranker": model}.items():
        table[name] = [x for part in (data.valid, data.test) for x in evaluate(ranking, part, data.exclude_seen)]
        print(f"{name:22}{table[name][0]:.4f}  {table[name][1]:.4f}     {table[name][2]:.4f}  {table[name][3]:.4f}")
    draw(losses, args.out)
    beaten = all(table["ranker"][i] > table[name][i] for name in others for i in (2, 3))
    print(f"the ranker {'beats' if beaten else 'does not beat'} both baselines on the test")
    return 0 if beaten else 1


if __name__ == "__main__":
    raise SystemExit(main())
