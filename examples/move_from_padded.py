"""Moves an `nn.TransformerEncoder` with its weights to batches without padding, and compares.

    python examples/move_from_padded.py            # about half a minute on two cores
    python examples/move_from_padded.py --device cuda

The padded model has a padding mask, as it must; both get the same batch of lognormal lengths. Outputs and gradients of
the two are compared, in float64 too; forward plus backward are timed in turn, and the memory of a pass is measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from jaggedtensor import JaggedTensor
from jaggedtensor.nn import JaggedTransformer, from_torch

# -- moving: this is all -----------------------------------------------------------------------------------------------


def padded_model(dim: int, layers: int, **factory: object) -> nn.TransformerEncoder:
    """What is there already. Dropout 0, so that two passes can be compared."""
    layer = nn.TransformerEncoderLayer(
        dim, dim // 32, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, **factory
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim, **factory), enable_nested_tensor=False)


def run_padded(model: nn.TransformerEncoder, padded: Tensor, lengths: Tensor) -> Tensor:
    """[B, longest, dim]"""
    padding = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    return model(padded, src_key_padding_mask=padding)


def move(model: nn.TransformerEncoder) -> JaggedTransformer:
    """The same weights; a state dict of either loads into the other from now on."""
    return from_torch(model)


def run_jagged(model: JaggedTransformer, batch: JaggedTensor) -> JaggedTensor:
    """(B, j, dim): there is no mask, as there is no padding."""
    return model(batch)


# -- comparing ---------------------------------------------------------------------------------------------------------


def draw_lengths(batch: int, longest: int) -> Tensor:
    """Lognormal with a median of a twentieth of the longest: milder than many logs of users are."""
    normal = torch.randn(batch, generator=torch.Generator().manual_seed(0))
    return torch.exp(normal * 1.2 + math.log(longest / 20)).to(torch.int64).clamp(1, longest)


class Contest:
    """Both models with the same weights, and the same batch for both."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, batch: int, longest: int) -> None:
        torch.manual_seed(0)
        factory = {"device": args.device, "dtype": dtype}
        self.padded = padded_model(args.dim, args.layers, **factory)
        self.jagged = move(self.padded)
        self.lengths = draw_lengths(batch, longest).to(args.device)
        self.batch = JaggedTensor.from_lengths(torch.randn(int(self.lengths.sum()), args.dim, **factory), self.lengths)
        self.rows = self.batch.to_padded()
        self.wanted = torch.randn_like(self.batch.values())  # some loss: its gradient by the output

    def pass_padded(self) -> tuple[Tensor, list[Tensor]]:
        """Output of the tokens, `[tokens, dim]`, and the gradients of all parameters."""
        out = run_padded(self.padded, self.rows, self.lengths)
        tokens = JaggedTensor.from_padded(out, self.lengths).values()
        return tokens.detach(), self.gradients(self.padded, tokens)

    def pass_jagged(self) -> tuple[Tensor, list[Tensor]]:
        tokens = run_jagged(self.jagged, self.batch).values()
        return tokens.detach(), self.gradients(self.jagged, tokens)

    def gradients(self, model: nn.Module, tokens: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((tokens * self.wanted).sum(), list(model.parameters())))


def difference(contest: Contest) -> float:
    """The largest, of outputs and gradients, as a part of the largest entry."""
    (out, grads), (other, others) = contest.pass_padded(), contest.pass_jagged()
    pairs = [(out, other), *zip(grads, others, strict=True)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def milliseconds(call: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def megabytes(which: str, args: argparse.Namespace) -> float:
    """What a pass takes at its peak. On a CPU that is known of a process of its own only."""
    if args.device == "cuda":
        contest = Contest(args, torch.float32, args.batch, args.longest)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(contest, f"pass_{which}")()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    command = [sys.executable, __file__, "--measure", which]
    for name in ("batch", "longest", "dim", "layers", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(which: str, args: argparse.Namespace) -> None:
    """The child: prints by how much a pass raises the peak of its memory."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    contest = Contest(args, torch.float32, args.batch, args.longest)
    small = Contest(args, torch.float32, 4, 32)  # what the first pass of any size takes
    getattr(small, f"pass_{which}")()
    before = peak()
    getattr(contest, f"pass_{which}")()
    print(peak() - before)


def main(argv: list[str] | None = None) -> int:
    """0 if both agree, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU; 1 on a busy machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", choices=("padded", "jagged"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.measure:
        measure(args.measure, args)
        return 0

    memory = {which: megabytes(which, args) for which in ("padded", "jagged")}  # first: a child inherits a peak
    exact = difference(Contest(args, torch.float64, 16, 200))
    contest = Contest(args, torch.float32, args.batch, args.longest)
    tokens, rows = contest.batch.num_tokens, contest.rows.shape[0] * contest.rows.shape[1]
    single = difference(contest)  # also warms up
    times: dict[str, list[float]] = {"padded": [], "jagged": []}
    for _ in tqdm(range(args.passes), unit="pass of each", leave=False):
        for which, taken in times.items():
            taken.append(milliseconds(getattr(contest, f"pass_{which}"), args.device))
    padded, jagged = (statistics.median(taken) for taken in times.values())

    print(f"{args.layers} layers of {args.dim}, {args.batch} sequences of up to {contest.rows.shape[1]} tokens, fp32")
    print(f"padded {rows:9,} rows  {padded:8.0f} ms  {memory['padded']:7.0f} MB   forward + backward")
    print(f"jagged {tokens:9,} rows  {jagged:8.0f} ms  {memory['jagged']:7.0f} MB")
    print(f"{padded / jagged:.1f} times as fast, {memory['padded'] / max(memory['jagged'], 0.1):.1f} times less memory")
    print(f"largest difference of outputs and gradients: {exact:.0e} in fp64, {single:.0e} in fp32")
    agree = exact < 1e-10 and single < 1e-3
    print("the numbers are the same" if agree else "THE NUMBERS DIFFER")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
