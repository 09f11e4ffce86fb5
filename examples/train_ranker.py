"""Trains a next-item ranker on user histories of any length, packed without padding, in a minute or two on two cores.

    python examples/train_ranker.py                     # MovieLens-100k where `recbole` is installed, else invented data
    python examples/train_ranker.py --data clicks.csv   # another log with user, item and timestamp columns

Two layers of causal self-attention read each history; one learned query then pools it (PMA, Lee et al. 2019). Of each
history the last item is kept for the test and the one before for validation, and every item of the catalogue is ranked.
"""

from __future__ import annotations

import argparse
import copy
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

# -- data ---------------------------------------------------------------------------------------------------------------


def find_movielens() -> Path | None:
    """The copy of MovieLens-100k inside the package recbole, which is not imported for it."""
    spec = importlib.util.find_spec("recbole")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], "dataset_example/ml-100k/ml-100k.inter") if folders else None
    return path if path and path.is_file() else None


def read_log(path: Path) -> list[list[str]]:
    """Histories, the items of each user in order of time, from a table with a header, of commas or tabs.

    Columns are found by name: the first that begins with user, with item and with time, as in `user_id:token`.
    """
    with path.open(newline="") as file:
        header = file.readline().rstrip("\r\n")
        delimiter = "\t" if "\t" in header else ","
        names = header.lower().split(delimiter)
        columns = [
            next((i for i, name in enumerate(names) if name.startswith(x)), None) for x in ("user", "item", "time")
        ]
        if None in columns:
            raise SystemExit(f"{path}: expected columns user..., item... and time..., got {', '.join(names)}")
        user, item, time = columns
        events = [(row[user], row[item], float(row[time])) for row in csv.reader(file, delimiter=delimiter) if row]
    histories: dict[str, list[str]] = {}
    for user_id, item_id, _ in sorted(events, key=lambda event: event[2]):  # stable: ties stay in the order of the file
        histories.setdefault(user_id, []).append(item_id)
    return list(histories.values())


def invent_histories(users: int, seed: int, genres: int = 24, size: int = 25) -> list[list[str]]:
    """Each user follows three genres at once, each in its own order: what comes next hangs on more than the last item."""
    rng = random.Random(seed)
    histories = []
    for _ in range(users):
        places = {genre: rng.randrange(size) for genre in rng.sample(range(genres), 3)}
        history = []
        for _ in range(min(200, 4 + int(rng.lognormvariate(2.8, 0.8)))):
            genre = rng.choice(list(places))
            places[genre] = (places[genre] + rng.choice((1, 1, 1, 2))) % size
            history.append(f"{genre}/{places[genre]}")
        histories.append(history)
    return histories


class Split:
    """Leave one out: the last item of each history is the test, the one before validation, the rest training."""

    def __init__(self, histories: list[list[str]]):
        histories = [history for history in histories if len(history) >= 3]
        if not histories:
            raise SystemExit("the data holds no user of at least three events")
        number = {item: i for i, item in enumerate(dict.fromkeys(item for history in histories for item in history))}
        self.items = len(number)
        self.histories = [torch.tensor([number[item] for item in history]) for history in histories]
        self.train = [h[:-2] for h in self.histories]
        self.valid = [{"history": h[:-2], "next": h[-2]} for h in self.histories]
        self.test = [{"history": h[:-1], "next": h[-1]} for h in self.histories]
        # Where nobody takes an item twice, what the user has had cannot be next, and no ranking need rank it.
        self.exclude_seen = all(len(h.unique()) == len(h) for h in self.train)


class Thinned(Dataset):
    """A random part of each training history, another in every epoch, which makes more of few users."""

    def __init__(self, histories: list[Tensor], keep: float, max_length: int):
        self.histories, self.keep, self.max_length = histories, keep, max_length

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, user: int) -> dict[str, Tensor]:
        history = self.histories[user]
        history = history[torch.rand(len(history)) < self.keep][-self.max_length - 1 :]
        return {"history": history[:-1], "next": history[1:]}


# -- model --------------------------------------------------------------------------------------------------------------


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
    """One learned query asks every history the same: (users, j, dim) -> (users, dim), and 0 for an empty history."""

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
    """Scores every item as the next one, from where the user is (the last state) and who they are (the pooled history)."""

    def __init__(self, items: int, dim: int, heads: int, dropout: float, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.items, self.places = nn.Embedding(items, dim), nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(2))
        self.pool = Pool(dim, heads, dropout)
        self.norm, self.bias = nn.LayerNorm(dim), nn.Parameter(torch.zeros(items))
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.items, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def states(self, history: JaggedTensor) -> JaggedTensor:
        place = history.with_values(history.layout.positions(history.num_tokens))
        x = self.dropout(self.items(history) + self.places(place))
        for layer in self.layers:
            x = layer(x)
        return x

    def scores(self, x: Tensor | JaggedTensor) -> Tensor | JaggedTensor:
        return F.linear(self.norm(x), self.items.weight, self.bias)  # (..., items)

    def forward(self, history: JaggedTensor) -> Tensor:
        """Scores of what comes after each history, (users, items)."""
        states = self.states(history[:, -self.max_length :])
        return self.scores(states.last() + self.pool(states[:, :-1]))

    def loss(self, history: JaggedTensor, following: JaggedTensor) -> Tensor:
        """Cross-entropy over the catalogue of each history's every next item.

        The last `recent` places may use what the pool finds in all that was before them; it never sees what it predicts.
        """
        recent = int(50 ** torch.rand(()))
        states = self.states(history)
        before, after = states[:, :-recent], states[:, -recent:]
        after = after + self.pool(before)[:, None]
        losses = [
            F.cross_entropy(self.scores(before), following[:, :-recent], reduction="sum"),
            F.cross_entropy(self.scores(after), following[:, -recent:], reduction="sum"),
        ]
        return sum(losses) / max(history.num_tokens, 1)


# -- evaluation ---------------------------------------------------------------------------------------------------------

Ranking = Callable[[JaggedTensor], Tensor]  # histories -> scores (users, items)


@torch.no_grad()
def evaluate(ranking: Ranking, examples: list[dict[str, Tensor]], exclude_seen: bool) -> tuple[float, float]:
    """Hit rate and NDCG among the first ten of the whole catalogue. A tie counts against the ranking."""
    ranks = []
    for batch in DataLoader(examples, batch_size=256, collate_fn=jaggedtensor.collate):
        history, following = batch["history"], batch["next"]
        scores = ranking(history)
        target = scores.gather(1, following[:, None])
        if exclude_seen:
            scores = scores.index_put((history.layout.sequence_ids(history.num_tokens), history.values()), -torch.inf)
        ranks.append((~(scores < target)).sum(1) - 1)
    rank = torch.cat(ranks)
    hit = (rank < 10).double()
    return hit.mean().item(), (hit / (rank + 2).log2()).mean().item()


def baselines(train: list[Tensor], items: int) -> dict[str, Ranking]:
    """What needs no training: the most popular items, and what most often came right after the last one."""
    popularity = torch.bincount(torch.cat(train), minlength=items).float()
    popularity /= popularity.max()
    pairs = torch.cat([torch.stack([h[:-1], h[1:]]) for h in train], 1)
    counts = torch.sparse_coo_tensor(pairs, torch.ones(pairs.shape[1]), (items, items)).coalesce()
    return {
        "popularity": lambda history: popularity.expand(len(history), -1),
        "after the last item": lambda history: counts.index_select(0, history.last()).to_dense() + popularity / 2,
    }


# -- training -----------------------------------------------------------------------------------------------------------


def train(model: Ranker, data: Split, epochs: int, batch_size: int, lr: float, keep: float):
    """Leaves the model of the best epoch by validation; returns the loss of every step and NDCG of every epoch."""
    histories = Thinned(data.train, keep, model.max_length)
    loader = DataLoader(histories, batch_size, shuffle=True, collate_fn=jaggedtensor.collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader), pct_start=0.1)
    losses, valid, best = [], [], copy.deepcopy(model.state_dict())
    with tqdm(total=epochs * len(loader), desc="training") as bar:
        for _ in range(epochs):
            model.train()
            for batch in loader:
                loss = model.loss(batch["history"], batch["next"])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bar.update()
            model.eval()
            valid.append(evaluate(model, data.valid, data.exclude_seen)[1])
            bar.set_postfix(loss=f"{losses[-1]:.3f}", valid_ndcg=f"{valid[-1]:.4f}")
            if valid[-1] == max(valid):
                best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return losses, valid


def draw(losses: list[float], valid: list[float], lines: dict[str, float], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib")
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = max(1, len(losses) // 50)
    left.plot(losses, color="lightsteelblue", linewidth=0.8)
    left.plot(torch.tensor(losses).unfold(0, window, 1).mean(1), color="navy")
    left.set(xlabel="step", ylabel="cross-entropy of the next item")
    right.plot(range(1, len(valid) + 1), valid, "o-", color="navy", label="ranker")
    for (name, value), style in zip(lines.items(), (":", "--"), strict=True):
        right.axhline(value, color="gray", linestyle=style, label=name)
    right.set(xlabel="epoch", ylabel="NDCG@10, validation", ylim=0)
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main(argv: list[str] | None = None) -> int:
    """0 if the ranker beats both baselines in both measures on the test, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a log in .inter, .tsv or .csv format")
    parser.add_argument("--invent", type=int, metavar="USERS", help="invent the histories of so many users")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--keep", type=float, default=0.8, help="part of each history that an epoch trains on")
    parser.add_argument("--max-length", type=int, default=512, help="items that are read, the latest")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/train_ranker.png"), help="the picture")
    args = parser.parse_args(argv)
    if args.data and not args.data.is_file():
        parser.error(f"--data: no file {args.data}")

    torch.manual_seed(args.seed)

    source = None if args.invent else args.data or find_movielens()
    if source:
        data = Split(read_log(source))
    else:
        data = Split(invent_histories(args.invent or 1500, args.seed))
    lengths = [len(history) for history in data.histories]
    print(f"data: {source or 'INVENTED histories; for MovieLens-100k: pip install --no-deps recbole==1.2.1'}")
    print(
        f"{len(lengths)} users, {data.items} items, {sum(lengths)} events; histories of {min(lengths)} to {max(lengths)}"
    )
    seen = "without those that the user has had" if data.exclude_seen else "those that the user has had too"
    print(f"ranked: all items, {seen}")

    model = Ranker(data.items, args.dim, args.heads, args.dropout, args.max_length)
    losses, valid = train(model, data, args.epochs, args.batch_size, args.lr, args.keep)

    model.eval()
    rankings = {
        **baselines(data.train, data.items),
        "ranker, last state only": lambda history: model.scores(model.states(history[:, -args.max_length :]).last()),
        "ranker": model,
    }
    print(f"\n{'':24}  validation         test")
    print(f"{'':24}  HR@10   NDCG@10    HR@10   NDCG@10")
    table = {}
    for name, ranking in rankings.items():
        table[name] = [
            *evaluate(ranking, data.valid, data.exclude_seen),
            *evaluate(ranking, data.test, data.exclude_seen),
        ]
        print(f"{name:24}  " + "  ".join(f"{x:.4f}" for x in table[name]))
    others = ("popularity", "after the last item")
    draw(losses, valid, {name: table[name][1] for name in others}, args.out)
    better = all(table["ranker"][i] > table[name][i] for name in others for i in (2, 3))
    print(f"the ranker {'beats' if better else 'does not beat'} both baselines on the test")
    return 0 if better else 1


if __name__ == "__main__":
    raise SystemExit(main())
