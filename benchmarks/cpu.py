"""Attention of one shared query with many histories on a CPU, against what else torch offers for it.

    python benchmarks/cpu.py [--quick] [--json FILE]

256 sequences with lengths exp(N(5.3, 1.2)) between 1 and 4096, a query of 32 rows, 4 heads of 64, fp32, 2 threads. Each
contender runs in a process of its own, so that its peak memory can be told, and all take turns pass by pass, so that a
busy machine is busy for all. Before any time is taken, values and gradients of each are compared with float64 on a part
of the batch; a contender that is wrong gets no times. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from jaggedtensor import JaggedTensor

HEADS, FEATURES, QUERIES, THREADS = 4, 64, 32, 2
Inputs = tuple[Tensor, Tensor, Tensor]  # query (m, H, D), keys and values (rows, H, D) or padded (B, longest, H, D)


class Ours:
    """JaggedTensor.attend"""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Inputs:
        self.offsets = F.pad(lengths.cumsum(0), (1, 0))
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = JaggedTensor(k, self.offsets)
        return keys.attend(q, keys.with_values(v))

    def packed(self, x: Tensor) -> Tensor:
        """The gradient of keys or values, (rows, H, D)."""
        return x


class Loop(Ours):
    """scaled_dot_product_attention on each part of k.split(lengths)

    Slices k[a:b] would do in forward, but backward then fills a gradient of the whole batch for every sequence.
    """

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Inputs:
        self.lengths = lengths.tolist()
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(0, 1)[None]  # (1, H, m, D)
        pairs = zip(k.split(self.lengths), v.split(self.lengths), strict=True)
        outs = [F.scaled_dot_product_attention(q, a.transpose(0, 1)[None], b.transpose(0, 1)[None]) for a, b in pairs]
        return torch.cat(outs).transpose(1, 2)


class Padded(Ours):
    """scaled_dot_product_attention with a mask, on the batch padded to its longest

    Padded with one index_put: the backward of torch's pad_sequence copies the whole padded gradient for every sequence,
    three minutes here.
    """

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Inputs:
        self.mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, longest)
        return q, k, v

    def pad(self, x: Tensor) -> Tensor:
        return x.new_zeros(*self.mask.shape, *x.shape[1:]).index_put((self.mask,), x)  # (B, longest, H, D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q.expand(len(self.mask), *q.shape), self.pad(k), self.pad(v)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:, None, None]).transpose(1, 2)


class GivenPadded(Padded):
    """the same without padding: a batch that came padded, and whose gradients stay padded"""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Inputs:
        q, k, v = super().prepare(q, k, v, lengths)
        return q, super().pad(k), super().pad(v)

    def pad(self, x: Tensor) -> Tensor:
        return x

    def packed(self, x: Tensor) -> Tensor:
        return x[self.mask]


class Nested(Ours):
    """scaled_dot_product_attention on torch.nested tensors of jagged layout, the query repeated"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged
        batch = len(self.offsets) - 1
        queries = q.expand(batch, *q.shape).flatten(0, 1)
        starts = torch.arange(batch + 1) * len(q)
        q, k, v = (nested(x, o).transpose(1, 2) for x, o in ((queries, starts), (k, self.offsets), (v, self.offsets)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values().unflatten(0, (batch, -1))


# With the most passes of each.
CONTENDERS: dict[str, tuple[type[Ours], int]] = {
    "ours": (Ours, 1000),
    "loop": (Loop, 1000),
    "padded": (Padded, 2),
    "given padded": (GivenPadded, 2),
    "nested": (Nested, 1),
}


def draw_lengths() -> Tensor:
    normal = torch.randn(256, generator=torch.Generator().manual_seed(0))
    return torch.exp(normal * 1.2 + 5.3).to(torch.int64).clamp(1, 4096)


def draw(lengths: Tensor) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    tokens = int(lengths.sum())
    return tuple(torch.randn(n, HEADS, FEATURES, generator=generator) for n in (QUERIES, tokens, tokens))


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, grad_out: Tensor) -> list[Tensor]:
    """Output and gradients in float64, written out."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    outs = []
    for a, b in zip(k.split(lengths.tolist()), v.split(lengths.tolist()), strict=True):
        p = torch.einsum("ihd,jhd->hij", q, a).mul(FEATURES**-0.5).softmax(2)
        outs.append(torch.einsum("hij,jhd->ihd", p, b))
    out = torch.stack(outs)
    return [out, *torch.autograd.grad(out, leaves, grad_out.double())]


def check(kind: type[Ours]) -> str:
    """What is wrong with a contender's values or gradients, on a part of the batch; empty if nothing is."""
    lengths = draw_lengths().sort().values[::17]
    inputs = draw(lengths)
    contender = kind()
    leaves = [x.requires_grad_() for x in contender.prepare(*inputs, lengths)]
    out = contender.forward(*leaves)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    mine = out.detach(), dq, contender.packed(dk), contender.packed(dv)
    wanted = exact(*(x.detach() for x in inputs), lengths, grad_out)
    for name, got, right in zip(("out", "dq", "dk", "dv"), mine, wanted, strict=True):
        error = (got - right).abs().max().item() / right.abs().max().item()
        if not error < 1e-5:
            return f"{name} is off by {error:.1e} of its largest value"
    return ""


def timed(function: Callable) -> tuple[object, float]:
    start = time.perf_counter()
    result = function()
    return result, 1e3 * (time.perf_counter() - start)


def peak_memory() -> float:
    """The most memory that this process has held, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def serve(name: str) -> None:
    """The child: checks the contender, then answers each line of input with the times of one pass, in milliseconds."""
    torch.set_num_threads(THREADS)
    kind, _ = CONTENDERS[name]
    wrong = check(kind)
    print(json.dumps({"wrong": wrong}), flush=True)
    if wrong:
        return
    before = peak_memory()
    contender, lengths = kind(), draw_lengths()
    leaves = [x.requires_grad_() for x in contender.prepare(*draw(lengths), lengths)]
    grad_out = torch.randn(len(lengths), QUERIES, HEADS, FEATURES)
    for _ in sys.stdin:
        out, forward = timed(lambda: contender.forward(*leaves))
        _, backward = timed(lambda out=out: torch.autograd.grad(out, leaves, grad_out))
        del out
        print(json.dumps({"forward": forward, "backward": backward, "peak": peak_memory() - before}), flush=True)


class Child:
    """A contender in a process of its own."""

    def __init__(self, name: str):
        self.name, self.passes = name, []
        command = [sys.executable, __file__, "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wrong: str = self.answer()["wrong"]

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def take_turn(self) -> None:
        time.sleep(0.03)  # threads of the one before stop spinning
        print(file=self.process.stdin, flush=True)
        self.passes.append(self.answer())

    def result(self) -> dict[str, float]:
        """Medians in milliseconds, without the first pass where there are others, and the peak in MB."""
        passes = self.passes[1:] or self.passes
        forward, backward = (statistics.median(x[part] for x in passes) for part in ("forward", "backward"))
        total = statistics.median(x["forward"] + x["backward"] for x in passes)
        peak = passes[-1]["peak"]
        return {"forward": forward, "backward": backward, "total": total, "peak": peak, "passes": len(passes)}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(names: list[str], repeats: int) -> dict[str, dict]:
    children: dict[str, Child] = {}
    results: dict[str, dict] = {}
    for name in tqdm(names, desc="comparing with float64", leave=False):
        child = Child(name)
        if child.wrong:
            results[name] = {"wrong": child.wrong}
            child.close()
        else:
            children[name] = child
    # One more than asked for: the first pass warms up.
    turns = [name for turn in range(repeats + 1) for name in children if turn < CONTENDERS[name][1]]
    for name in (progress := tqdm(turns, desc="timing", leave=False)):
        progress.set_postfix_str(name)
        children[name].take_turn()
    for name, child in children.items():
        results[name] = child.result()
        child.close()
    return results


def bars(results: dict[str, dict]) -> list[tuple[str, bool]]:
    """What must hold, as far as it was measured."""
    ours = results["ours"]
    right = {name: result for name, result in results.items() if "wrong" not in result}

    def ratio(name: str, what: str = "total") -> float:
        return right[name][what] / ours[what]

    found = []
    if "loop" in right:
        found.append((f"{ratio('loop'):.2f} times as fast as the loop (1.3)", ratio("loop") >= 1.3))
    if "padded" in right:
        fast, small = ratio("padded"), 1 / ratio("padded", "peak")
        found.append((f"{fast:.0f} times as fast as padding and attention on the padded batch (20)", fast >= 20))
        found.append((f"{small:.2f} of the memory of padding (0.2)", small <= 0.2))
    if "nested" in right:
        found.append((f"{ratio('nested'):.0f} times as fast as torch.nested (1)", ratio("nested") > 1))
    return found


def report(results: dict[str, dict]) -> bool:
    print(
        f"{'contender':14}{'forward ms':>12}{'backward ms':>13}{'total ms':>12}{'ratio':>9}{'peak MB':>9}{'passes':>8}"
    )
    ours = results["ours"]
    for name, x in results.items():
        if "wrong" in x:
            print(f"{name:14}  wrong: {x['wrong']}")
            continue
        times = f"{x['forward']:12.1f}{x['backward']:13.1f}{x['total']:12.1f}"
        relative = f"{x['total'] / ours['total']:9.2f}" if "wrong" not in ours else " " * 9
        print(f"{name:14}{times}{relative}{x['peak']:9.0f}{x['passes']:8d}")
    print()
    if "wrong" in ours:
        return False
    held = bars(results)
    for text, holds in held:
        print("holds " if holds else "MISSED", text)
    return all(holds for _, holds in held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few passes, and none of the contenders that take seconds")
    parser.add_argument("--repeats", type=int, help="passes of the fast contenders (default 15; 5 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
    if options.serve:
        serve(options.serve)
        return
    names = ["ours", "loop"] if options.quick else list(CONTENDERS)
    results = measure(names, options.repeats or (5 if options.quick else 15))
    passed = report(results)
    if options.json:
        setup = {"torch": torch.__version__, "threads": THREADS, "batch": 256, "tokens": int(draw_lengths().sum())}
        options.json.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
