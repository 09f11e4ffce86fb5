"""Trains a model of sequences on several processes, on CPUs over gloo or on GPUs over NCCL.

    torchrun --nproc-per-node 2 examples/train_distributed.py                      # DDP
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp      # FSDP2: parameters are spread, too
    torchrun --nproc-per-node 2 examples/train_distributed.py --resume             # goes on from the last checkpoint

Sequences have lognormal lengths and are never padded. Each step takes as many as the ranks may hold together and deals
them by cost, so that all are done at the same time. The loss is the mean over the tokens of all ranks, however uneven,
so gradients are those of one process. A run that was stopped goes on bit for bit as if it had not been.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

import jaggedtensor
from jaggedtensor import JaggedTensor
from jaggedtensor.data import SequenceCost, TokenBudgetSampler
from jaggedtensor.distributed import fully_shard
from jaggedtensor.nn import JaggedTransformerLayer

WORDS = 64


def invent_sequences(count: int, seed: int, longest: int = 512) -> list[Tensor]:
    """A word most often follows from the one before by a rule, and is otherwise drawn by chance."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=generator) * 1.2 + 3.5).long().clamp(1, longest) + 1
    sequences = []
    for length in lengths.tolist():
        words = torch.randint(WORDS, (length,), generator=generator)
        for i in (torch.rand(length, generator=generator) < 0.8).nonzero()[:, 0].tolist():
            if i:
                words[i] = (5 * words[i - 1] + 7) % WORDS
        sequences.append(words)
    return sequences


class Model(nn.Module):
    """Says of each word which comes next."""

    def __init__(self, dim: int, layers: int, dropout: float, **factory: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, dim, **factory)
        self.layers = nn.ModuleList(
            JaggedTransformerLayer(dim, dim // 16, causal=True, rotary=True, dropout=dropout, **factory)
            for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(dim, **factory), nn.Linear(dim, WORDS, **factory)

    def forward(self, sequences: JaggedTensor) -> Tensor:
        """The sum of the losses of all words but the first of each sequence: a mean needs the words of all ranks."""
        x = self.words(sequences[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(self.norm(x)), sequences[:, 1:], reduction="sum")


def parallel(model: Model, kind: str, device: torch.device) -> nn.Module:
    """The model on all ranks."""
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model: nn.Module, batch: JaggedTensor) -> tuple[float, int]:
    """Gradients of the mean loss over the words of all ranks; that loss, and the number of words."""
    # Of each rank words may be many, few or none. DDP and FSDP divide by the number of ranks, hence the factor.
    loss = model(batch)
    total = torch.stack((loss.detach().double(), (batch.lengths() - 1).clamp(min=0).sum().to(loss.device).double()))
    dist.all_reduce(total)
    count = int(total[1])
    (loss * (dist.get_world_size() / max(count, 1))).backward()
    return float(total[0]) / max(count, 1), count


class Training:
    """A run: what it needs to take a step, and to go on later."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)  # the same weights on every rank
        self.args, self.device, self.step = args, device, 0
        self.sequences = invent_sequences(args.sequences, args.seed)
        self.sampler = TokenBudgetSampler(
            [len(x) for x in self.sequences], args.budget, cost=SequenceCost.of_encoder(args.dim, causal=True),
            bucket=64 * dist.get_world_size(), seed=args.seed, drop_last=True,
        )  # fmt: skip
        if not len(self.sampler):
            raise SystemExit("--sequences: too few to fill a batch of every rank; take more, or a smaller --budget")
        self.model = parallel(Model(args.dim, args.layers, args.dropout, device=device), args.parallel, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.lr)

    def batches(self) -> Iterator[JaggedTensor]:
        """From where the sampler is, epoch after epoch."""
        loader = DataLoader(
            self.sequences, batch_sampler=self.sampler, collate_fn=jaggedtensor.collate,
            num_workers=self.args.workers, pin_memory=self.device.type == "cuda",
        )  # fmt: skip
        self.done = self.sampler.state_dict()["done"]
        while True:
            for batch in loader:
                self.done += 1  # counted here: workers are ahead
                yield batch.to(self.device, non_blocking=True)
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.done = 0

    def run(self) -> list[float]:
        """The loss of each step, the same on every rank."""
        rank, losses, words, began = dist.get_rank(), [], 0, time.perf_counter()
        bar = tqdm(total=self.args.steps, initial=self.step, unit="step", disable=rank != 0)
        batches = self.batches()
        while self.step < self.args.steps:
            batch = next(batches)
            # Dropout depends on the step and not on the past, so that a resumed run draws the same.
            torch.manual_seed(self.args.seed + 1_000_003 * (self.step + 1) + rank)
            if self.step == self.args.fail_at and rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss, count = backward(self.model, batch)
            except RuntimeError as error:
                remedy = "if another rank is gone, start anew with --resume"
                raise RuntimeError(f"rank {rank} stopped at step {self.step}: {error}; {remedy}") from error
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss)
            words += count
            bar.update()
            speed = words / (time.perf_counter() - began)
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
            if self.step % self.args.save_every == 0 or self.step == self.args.steps:
                self.save()
        bar.close()
        return losses

    def save(self) -> None:
        """Into a folder that gets its name once everything is in it: no half checkpoint is ever taken for a whole."""
        folder = self.args.out / f"step-{self.step:06d}"
        unfinished = folder.with_suffix(".unfinished")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            loop = {"step": self.step, "sampler": self.sampler.state_dict(self.done)}
            (unfinished / "loop.json").write_text(json.dumps(loop))
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        dist.barrier()

    def load(self) -> None:
        """The last checkpoint, with as many ranks as wrote it."""
        folders = sorted(path for path in self.args.out.glob("step-*") if path.suffix != ".unfinished")
        if not folders:
            raise SystemExit(f"--resume: there is no checkpoint in {self.args.out}")
        loop = json.loads((folders[-1] / "loop.json").read_text())
        self.sampler.load_state_dict(loop["sampler"])
        self.step = loop["step"]
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=folders[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a batch of one rank, at most")
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, of each rank")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("out/train_distributed"), help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for another rank")
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="kill the last rank there, to see what happens")
    return parser.parse_args(argv)


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """The loss of each step."""
    training = Training(args, device)
    if args.resume:
        training.load()
    losses = training.run()
    # DDP must not outlive the process group: the last to go would wait for gloo's threads, and they for Python.
    del training
    gc.collect()
    return losses


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"timeout": timedelta(seconds=args.timeout)}
    if device.type == "cuda":
        options["device_id"] = device
    if "RANK" not in os.environ:  # without torchrun: one process
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **options)
    losses = train(args, device)
    if dist.get_rank() == 0:
        ends = f"from {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "not taken a step"
        print(f"{args.parallel} on {dist.get_world_size()} ranks: loss {ends}, checkpoint in {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
