"""What attention to a batch of given lengths comes to: `python -m jaggedtensor.explain --lengths FILE --q-len 128`.

FILE is a JSON list, a .npy array, or a parquet file with a column of lengths (or of lists, which are measured).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.errors import fail
from jaggedtensor.ops.attention import _window
from jaggedtensor.ops.plan import MACHINES, Plan, machine_of, plan_of
from jaggedtensor.problem import AttentionProblem, QueryKind

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read_lengths(path: Path, column: str | None = None) -> Tensor:
    """`[B]` int64.

    Raises:
        ValueError: not a file of lengths: another suffix, no numbers, a negative one, a column that is not there.
    """
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        found = found.get(column or "lengths") if isinstance(found, dict) else found
        if not isinstance(found, list):
            fail(str(path), 'a list of lengths, or {"lengths": [...]}', type(found).__name__)
    elif path.suffix == ".npy":
        import numpy as np

        found = np.load(path, allow_pickle=False)
    elif path.suffix == ".parquet":
        found = _read_parquet(path, column)
    else:
        fail("the file of lengths", "a .json, .npy or .parquet file", path.name)
    lengths = torch.as_tensor(found)
    if not lengths.numel():
        return torch.empty(0, dtype=torch.int64)
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        fail(f"lengths in {path.name}", "whole numbers, one for each sequence", lengths)
    lengths = lengths.to(torch.int64)
    if int(lengths.min()) < 0:
        fail(f"lengths in {path.name}", "at least 0", int(lengths.min()))
    return lengths


def _read_parquet(path: Path, column: str | None) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    usable = [
        f.name
        for f in schema
        if pa.types.is_integer(f.type) or pa.types.is_list(f.type) or pa.types.is_large_list(f.type)
    ]
    if column is None:
        column = next((name for name in ("lengths", "length") if name in usable), None)
        column = usable[0] if column is None and len(usable) == 1 else column
    if column not in usable:
        fail(
            f"the column of {path.name}",
            f"one of {', '.join(usable) or 'integers or lists, which it lacks'}",
            repr(column),
        )
    values = pq.read_table(path, columns=[column]).column(0)
    if not pa.types.is_integer(values.type):
        values = pc.list_value_length(values)
    return values.fill_null(0).to_pylist()


def main(arguments: Sequence[str] | None = None) -> Plan:
    """The command: parse, explain, print or plot."""
    parser = argparse.ArgumentParser(prog="python -m jaggedtensor.explain", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--lengths", type=Path, required=True, metavar="FILE", help="lengths of the keys: .json, .npy or .parquet")
    add("--column", help="of a parquet file, or key of a JSON object")
    add("--q-len", default="128", metavar="N|self", help="queries of each sequence; self: self-attention (%(default)s)")
    add("--heads", type=int, default=4, help="of the query (%(default)s)")
    add("--kv-heads", type=int, help="of the keys (as many)")
    add("--head-dim", type=int, default=128, help="(%(default)s)")
    add("--value-dim", type=int, help="(as the head dimension)")
    add("--per-sequence", action="store_true", help="a query for each sequence rather than one for all")
    add("--causal", action="store_true")
    add("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="-1: no limit")
    add("--dtype", choices=DTYPES, default="bf16", help="(%(default)s)")
    add("--device", choices=MACHINES, default="h200", help="(%(default)s)")
    add("--plot", type=Path, metavar="PATH", help="also draw it: .png, .pdf or .svg")
    options = parser.parse_args(arguments)
    try:
        plan = plan_of_options(options)
        print(plan)
        if options.plot is not None:
            plan.plot(options.plot)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return plan


def plan_of_options(options: argparse.Namespace) -> Plan:
    """The plan of a call that is described rather than made."""
    lengths = read_lengths(options.lengths, options.column)
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    if options.heads < 1 or kv_heads < 1 or options.heads % kv_heads:
        fail("--heads", f"a positive multiple of --kv-heads {kv_heads}", options.heads)
    if options.head_dim < 1:
        fail("--head-dim", "at least 1", options.head_dim)
    itself = options.q_len == "self"
    if not itself and not options.q_len.isdecimal():
        fail("--q-len", "a number or self", options.q_len)
    if itself:
        kind = QueryKind.JAGGED
    else:
        kind = QueryKind.PER_SEQUENCE if options.per_sequence else QueryKind.BROADCAST
    left, right = _window(options.causal, None if options.window is None else tuple(options.window))
    machine = machine_of(options.device)
    problem = AttentionProblem(
        query=kind,
        q_len=None if itself else int(options.q_len),
        q_heads=options.heads,
        kv_heads=kv_heads,
        head_dim=options.head_dim,
        value_dim=options.value_dim or options.head_dim,
        dtype=DTYPES[options.dtype],
        device=machine.device,
        left=left,
        right=right,
    )
    return plan_of(problem, lengths, lengths if itself else None, machine=machine)


if __name__ == "__main__":
    main(sys.argv[1:])
