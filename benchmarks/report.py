"""The results of the attention benchmark for a terminal, for docs/benchmarks.md, and as a plot.

python benchmarks/report.py benchmarks/results/nvidia-h200.json --markdown docs/benchmarks.md --plot docs/benchmarks.svg
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from workloads import WORKLOADS

Row = dict[str, Any]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

# pass, suite (None: all), how many times as fast as FlashAttention-2
BARS = (("fwd", None, 1 / 1.1), ("bwd", "pma", 1.5), ("bwd", "self", 1 / 1.1))


def table(rows: list[Row], *, markdown: bool = False) -> str:
    """A line for each workload and pass; `fa2/ours` is how many times as long FA2 takes."""
    peers = _peers(rows)
    head = ["workload", "pass", "ms", "sustained", "TFLOP/s", "of floor", *(f"{peer}/ours" for peer in peers)]
    lines = []
    for row in rows:
        if row["ms"] is None:
            lines.append([row["workload"], row["pass"], *["-"] * (len(head) - 2)])
            continue
        numbers = (
            f"{row['ms']:.3f}",
            "-" if row["sustained_ms"] is None else f"{row['sustained_ms']:.3f}",
            f"{row['tflops']:.0f}",
            f"{row['floor_share']:.0%}",
        )
        ratios = (f"{row['peers'][peer] / row['ms']:.2f}" if peer in row["peers"] else "-" for peer in peers)
        lines.append([row["workload"], row["pass"], *numbers, *ratios])
    if markdown:
        rule = ["---", "---", *["---:"] * (len(head) - 2)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *lines]
    )


def absences(rows: list[Row]) -> list[str]:
    """Every contender that has no time somewhere, with the reason and where."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        own = {row["backend"]: row["error"]} if row["ms"] is None else {}
        for name, why in (own | row["without"]).items():
            found.setdefault((name, why), []).append(row)
    return [f"{name}: {why} ({_places(where, rows)})" for (name, why), where in found.items()]


def _places(some: list[Row], rows: list[Row]) -> str:
    """In few words, which of all the rows these are."""
    if len(some) == len(rows):
        return "everywhere"
    parts = []
    for which in dict.fromkeys(row["pass"] for row in some):
        names = [row["workload"] for row in some if row["pass"] == which]
        every = [row["workload"] for row in rows if row["pass"] == which]
        parts.append(f"{which} of {'every workload' if names == every else ', '.join(names)}")
    return "; ".join(parts)


def bars(rows: list[Row], costs: Row) -> list[str]:
    """Which of the project's bars these results meet; nothing of those that they do not cover."""
    lines = []
    for which, suite, least in BARS:
        ratios = {
            row["workload"]: row["peers"]["fa2"] / row["ms"] if row["ms"] else 0.0
            for row in rows
            if row["pass"] == which
            and suite in (None, WORKLOADS[row["workload"]].suite)
            and ("fa2" in row["peers"] or row["ms"] is None)
        }
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            verdict = "met" if ratios[worst] >= least else "missed"
            lines.append(
                f"{which} of {suite or 'every workload'}, fa2/ours at least {least:.2f}: {verdict} "
                f"({ratios[worst]:.2f} on {worst}, the lowest of {len(ratios)})"
            )
    memory = costs.get("memory", {}).get("beyond_inputs", {})
    if "fa2" in memory and len(memory) > 1:
        ours, least_bytes = next((name, size) for name, size in memory.items() if name != "fa2")
        verdict = "met" if least_bytes < memory["fa2"] else "missed"
        lines.append(
            f"peak memory of a training step below FA2's: {verdict} "
            f"({ours} {least_bytes / 1e9:.2f} GB, fa2 {memory['fa2'] / 1e9:.2f} GB beyond the inputs)"
        )
    return lines


def cost_lines(costs: Row) -> list[str]:
    """What `--overhead` and `--memory` found."""
    lines = []
    if "overhead" in costs:
        for name, times in costs["overhead"]["microseconds"].items():
            spelled = ", ".join(f"{time:.0f} µs {how}" for how, time in times.items())
            lines.append(f"host time of a forward, {costs['overhead']['problem']}, {name}: {spelled}")
    if "memory" in costs:
        memory = costs["memory"]
        for name, size in memory["beyond_inputs"].items():
            lines.append(
                f"peak memory of a training step, {memory['workload']}, {name}: {size / 1e9:.2f} GB beyond the "
                f"{memory['inputs'] / 1e9:.2f} GB of its inputs"
            )
    for kind in costs:
        lines += [f"{kind}, {name}: {why}" for name, why in costs[kind]["without"].items()]
    return lines


def as_markdown(rows: list[Row], costs: Row) -> str:
    first = rows[0]
    versions = f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, commit {first['commit']}"
    parts = [f"{versions}; backend `{first['backend']}`.", table(rows, markdown=True)]
    for title, lines in (
        ("Bars", bars(rows, costs)),
        ("Not measured", absences(rows)),
        ("Host time and memory", cost_lines(costs)),
    ):
        if lines:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def write_between_markers(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Raises ValueError if the file lacks the markers."""
    old = path.read_text()
    if begin not in old or end not in old:
        raise ValueError(f"{path} must have the lines {begin} and {end} for the table to go between")
    before, _, rest = old.partition(begin)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def plot(rows: list[Row], path: Path) -> None:
    """Bars of the share of the floor that each contender reaches, a panel for each pass."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaggedtensor"  # the same results, the same file
    import matplotlib.pyplot as plt

    passes = [which for which in ("fwd", "bwd", "both") if any(row["pass"] == which for row in rows)]
    figure, axes = plt.subplots(len(passes), 1, figsize=(10, 3.2 * len(passes)), squeeze=False)
    names = [rows[0]["backend"], *_peers(rows)]
    for ax, which in zip(axes[:, 0], passes, strict=True):
        shown = [row for row in rows if row["pass"] == which]
        for i, name in enumerate(names):
            places = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(shown))]
            ax.bar(places, [_share(row, name) for row in shown], 0.8 / len(names), label=name)
        ax.set_xticks(range(len(shown)), [row["workload"] for row in shown], rotation=20, ha="right")
        ax.set_ylabel(f"{which}, share of the floor")
        ax.set_ylim(0, 1)
        ax.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.suptitle(f"{rows[0]['gpu']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def costs_path(results: Path) -> Path:
    """Where what is no speed lies: beside the results."""
    return results.with_suffix(".costs.json")


def render(rows: list[Row], costs: Row, markdown: Path | None, picture: Path | None) -> None:
    """Into the files that are named."""
    if not rows:
        return
    if picture is not None:
        plot(rows, picture)
    if markdown is not None:
        text = as_markdown(rows, costs)
        if picture is not None:
            text += f"\n\n![Share of the floor]({os.path.relpath(picture, markdown.parent)})"
        write_between_markers(markdown, text)


def _peers(rows: list[Row]) -> list[str]:
    """Those with a time somewhere, in the order in which they were asked for."""
    return list(dict.fromkeys(peer for row in rows for peer in row["peers"]))


def _share(row: Row, name: str) -> float:
    if not row["ms"]:
        return 0.0
    if name == row["backend"]:
        return row["floor_share"]
    return row["floor_share"] * row["ms"] / row["peers"][name] if name in row["peers"] else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())
    beside = costs_path(options.results)
    costs = json.loads(beside.read_text()) if beside.exists() else {}
    print(table(rows), *bars(rows, costs), *cost_lines(costs), sep="\n")
    render(rows, costs, options.markdown, options.plot)


if __name__ == "__main__":
    main()
