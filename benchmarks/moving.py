"""What moving an `nn.TransformerEncoder` over to jagged batches brings: `python benchmarks/moving.py [--quick]`.

Forward plus backward on a CPU, fp32, both models with the same weights and batches (examples/move_from_padded.py).
Values and gradients are compared before anything is timed; the two take turns pass by pass, and medians are compared.
Exits with 1 if they differ, or if the bar does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from move_from_padded import Contest, difference, milliseconds

BAR = 2.0  # times as fast, on lognormal lengths
# name: sequences, longest, features, layers
CASES = {
    "short, up to 256": (64, 256, 128, 2),
    "long, up to 1,024": (32, 1024, 128, 2),
    "wide, up to 512": (32, 512, 256, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="the first case alone, three passes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    passes = 3 if options.quick else options.passes
    print(f"forward + backward, lognormal lengths, {options.threads} threads, medians of {passes}\n")
    print(f"{'lengths':20}{'padded rows':>12}{'tokens':>9}{'padded ms':>11}{'jagged ms':>11}{'ratio':>8}{'apart':>12}")
    holds = True
    for name, (batch, longest, dim, layers) in list(CASES.items())[: 1 if options.quick else None]:
        args = argparse.Namespace(device="cpu", dim=dim, layers=layers)
        contest = Contest(args, torch.float32, batch, longest)
        apart = difference(contest)  # warms up, too
        times: dict[str, list[float]] = {"padded": [], "jagged": []}
        for _ in tqdm(range(passes), desc=name, leave=False):
            for which, taken in times.items():
                taken.append(milliseconds(getattr(contest, f"pass_{which}"), "cpu"))
        padded, jagged = (statistics.median(taken) for taken in times.values())
        rows = contest.rows.shape[0] * contest.rows.shape[1]
        figures = f"{padded:11.0f}{jagged:11.0f}{padded / jagged:8.1f}{apart:12.0e}"
        print(f"{name:20}{rows:12,}{contest.batch.num_tokens:9,}{figures}")
        holds &= apart < 1e-3 and padded / jagged >= BAR
    print(f"\n{'holds' if holds else 'FAILS'}: the same numbers, and at least {BAR:g} times as fast")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
