"""The Blackwell forward on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_forward.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.block_masks import blocks_of, mask_of_sequence, visible_through
from jaggedtensor.kernels.blackwell.attention_fwd import config as configuration
from jaggedtensor.kernels.blackwell.attention_fwd.device import forward_kernel
from jaggedtensor.kernels.blackwell.attention_fwd.launch import tables_of
from jaggedtensor.kernels.blackwell.plan import lacks, plan_forward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.problem import UNLIMITED, AttentionArgs, AttentionProblem, Device, Quantised, QueryKind
from jaggedtensor.testing.families import Family

B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    q_len: int = 128
    q_lengths: tuple[int, ...] = ()  # of a jagged query
    kind: QueryKind = B
    kv_heads: int = 1
    group: int = 1
    dim: int = 64
    value_dim: int = 64
    left: int = UNLIMITED
    right: int = UNLIMITED
    processors: int = 2
    dtype: torch.dtype = torch.float16
    slack: int = 3
    key_spread: float = 1.0
    masked: bool = False  # by a random block mask
    backwards: bool = False  # each CTA takes its shortest tiles first
    spread: float = 1.0  # of the query: how much peaks grow
    quantised: bool = False  # operands in e4m3, with scales of each head; results in `dtype`
    negative: bool = False  # all scores are
    growth: float = 1.0  # of the keys of a sequence but its last 128, by which later peaks pass anchors
    quiet: tuple[int, int] = (0, 0)  # query rows begin..end-1 of each sequence are zeros, and have no peaks
    redone: int | None = None  # tiles that anchored rows are known to stray in

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            self.kind,
            None if self.q_lengths else self.q_len,
            self.kv_heads * self.group,
            self.kv_heads,
            self.dim,
            self.value_dim,
            torch.float8_e4m3fn if self.quantised else self.dtype,
            Device("cuda", (10, 0), self.processors, 227 << 10),
            self.left,
            self.right,
            masked=self.masked,
        )


def reference(case: Case, queries, k, v, offsets, scale, mask):
    """Of each sequence in float64: out `[Lq, Hq, Dv]`, lse `[Lq, Hq]`, and how far out may spread if each weight is
    wrong by a part of itself: `[2, Lq, Hq, Dv]`, at most and on average."""
    outs, lses, spreads = [], [], []
    for b, q in enumerate(queries):
        rows = slice(offsets[b], offsets[b + 1])
        key, value = (x[rows].repeat_interleave(case.group, 1) for x in (k, v))
        score = scale * torch.einsum("ihd,jhd->hij", q, key)
        shift = len(key) - len(q)
        i, j = torch.arange(len(q))[:, None], torch.arange(len(key))[None]
        if case.left != UNLIMITED:
            score = score.masked_fill(j < i + shift - case.left, -math.inf)
        if case.right != UNLIMITED:
            score = score.masked_fill(j > i + shift + case.right, -math.inf)
        if mask is not None:
            seen = visible_through(mask_of_sequence(mask, b), len(q), len(key))
            score = score.masked_fill(~seen, -math.inf)
        lse = score.logsumexp(2) if len(key) else torch.full(score.shape[:2], -math.inf, dtype=torch.float64)
        p = torch.nan_to_num((score - lse[:, :, None]).exp())
        outs.append(torch.einsum("hij,jhd->ihd", p, value))
        lses.append(lse.T)
        most, squares = (torch.einsum("hij,jhd->ihd", p**n, value.abs() ** n) for n in (1, 2))
        spreads.append(torch.stack([most, squares.sqrt()]))
    return outs, lses, spreads


def queries_of(case: Case, q) -> list:
    """Of each sequence, `[Lq, Hq, D]`."""
    if case.q_lengths:
        return list(q[: sum(case.q_lengths)].split(case.q_lengths))
    return list(q.view(-1, case.q_len, *q.shape[1:]).expand(len(case.lengths), -1, -1, -1))


def run(case: Case, order: str, seed: int, reports: list[Any] | None = None, **chosen: Any):
    """The kernel's results against float64; NaN wherever nobody should look, and in all that is to be written.
    `reports` gets that of each launch."""
    reports = [] if reports is None else reports
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype)

    problem = case.problem
    assert not lacks(problem)
    config = configuration.select(problem, **chosen)
    layout = JaggedLayout.from_lengths(torch.tensor(case.lengths))
    batch, tokens, heads = len(case.lengths), sum(case.lengths), problem.q_heads
    offsets, rows = layout.offsets(), tokens + case.slack
    k, v = normal(rows, case.kv_heads, case.dim) * case.key_spread, normal(rows, case.kv_heads, case.value_dim)
    q_layout, q_offsets = None, None
    if case.q_lengths:
        q_layout = JaggedLayout.from_lengths(torch.tensor(case.q_lengths))
        q_offsets = q_layout.offsets()
        q = normal(sum(case.q_lengths) + case.slack, heads, case.dim) * case.spread
        out_rows = len(q)
    else:
        q = normal(case.q_len * (1 if case.kind is B else batch), heads, case.dim) * case.spread
        out_rows = batch * case.q_len
    if case.negative:
        q, k = q.abs(), -k.abs()
    if case.quiet[1]:
        for rows_of in q[: sum(case.q_lengths)].split(case.q_lengths):
            rows_of[slice(*case.quiet)] = 0
    for begin, end in pairwise(offsets.tolist()):
        k[begin : begin + max(0, end - begin - 1) // 128 * 128] *= case.growth  # all blocks but the last
    scale = 1 / math.sqrt(case.dim)
    tables = (None, None)
    if case.quantised:  # of a head, spread over powers of two and what is between
        q_scales, k_scales, v_scales = (
            (0.5 + torch.rand(n, generator=generator)) * torch.tensor([1.0, 1 / 8, 4.0] * n)[:n]
            for n in (heads, case.kv_heads, case.kv_heads)
        )
        q, k, v = (
            (x / s[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            for x, s in ((q, q_scales), (k, k_scales), (v, v_scales))
        )
        by = Quantised(q_scales, k_scales, v_scales, case.dtype)
        tables = tables_of(AttentionArgs(problem, q, k, v, None, offsets, scale, True, False, ()), by)
    mask = None
    if case.masked:
        longest = max(case.q_lengths, default=case.q_len), max(case.lengths)
        mask = torch.rand(batch, *map(blocks_of, longest), generator=generator) < 0.6
    largest = scale * case.spread * case.key_spread * case.dim if case.key_spread > 1 else 0.0
    exact = [x.double() for x in (q, k, v)]
    if case.quantised:
        exact = [x * s.double()[:, None] for x, s in zip(exact, by[:3], strict=True)]
    queries = queries_of(case, exact[0])
    outs, lses, spreads = reference(case, queries, *exact[1:], offsets.tolist(), scale, mask)
    k[tokens:], v[tokens:] = math.nan, math.nan
    if case.q_lengths:
        q[sum(case.q_lengths) :] = math.nan
    out = torch.full((out_rows, heads, case.value_dim), math.nan, dtype=case.dtype)
    if case.q_lengths:
        lse = torch.full((out_rows, heads), math.nan)
        steps = (0, lse.stride(0), lse.stride(1))
    else:
        lse = torch.full((batch, heads, case.q_len), math.nan)
        steps = (lse.stride(0), lse.stride(2), lse.stride(1))
    tiles, worker_offsets, *listed = plan_forward(
        problem, layout, q_layout, rows, len(q), mask, select=lambda _: config
    )
    if case.backwards and not config.answers:
        for begin, end in pairwise(worker_offsets.tolist()):
            tiles[begin:end] = tiles[begin:end].flip(0)
    flags = torch.full((tiles.shape[0], 2), 7, dtype=torch.int32) if config.anchored else None
    per_query = (configuration.ROWS // config.group, config.group)
    per_key = (config.block_n, 1, config.block_d)
    blocks = ((q, *per_query, config.block_d), (k, *per_key), (v, *per_key))
    log2_scale = scale * math.log2(math.e)

    def launched(config):
        report = emulate(
            forward_kernel,
            (tiles.shape[0] if config.answers else worker_offsets.shape[0] - 1,),
            *(ragged(*block)[1]() for block in (*blocks, (out, *per_query, config.out_columns))),
            out,
            lse,
            *steps,
            None,
            None,
            flags,
            tiles,
            worker_offsets,
            listed[0] if listed else None,
            q_offsets,
            offsets,
            problem.q_len or 0,
            log2_scale,
            2.0 ** round(math.log2(log2_scale)),
            *tables,
            problem.left,
            problem.right,
            config,
            num_warps=4,
            target="sm100",
            order=order,
            seed=seed,
        )
        report.raise_if_bad()
        reports.append(report)
        return report

    report = launched(config)
    if config.anchored:
        redone = sum(flags[: worker_offsets[-1]].amax(1).tolist())
        assert case.redone is None or redone == case.redone, f"{redone} tiles are to be done again"
        launched(configuration.select(problem, redoes=1))
    assert report.shared_peak <= configuration.SHARED_MEMORY
    assert report.tensor_peak == config.tensor_columns
    begin = 0
    for b, (wanted, wanted_lse, spread) in enumerate(zip(outs, lses, spreads, strict=True)):
        n = len(wanted)
        got = out[begin : begin + n].double()
        got_lse = (lse[begin : begin + n] if case.q_lengths else lse[b].T).double()
        begin += n
        if not case.lengths[b]:  # no tile: the launcher fills what the kernel must not touch
            assert got.isnan().all()
            assert got_lse.isnan().all()
            continue
        blind = wanted_lse == -math.inf
        written = ~got_lse.isnan()
        assert (written | blind).all(), f"sequence {b}: lse is not written"
        assert (got[blind & written] == 0).all()
        assert (got_lse[blind & written] == -math.inf).all()
        error = (got - wanted).masked_fill(blind[..., None], 0)
        tolerance = 4e-3 * (4 if case.dtype == torch.bfloat16 else 1)
        if case.quantised:  # weights are rounded to 4 bits: by 1 / 16 at most, by 0.026 on average
            assert error.norm() <= 0.04 * spread[1].norm() + tolerance * wanted.norm(), f"out of {b}"
            tolerance = tolerance * (1 + spread[0]) + spread[0] / 16
        else:  # each weight is rounded once, as O is not kept relative to the row's own peak, and so is O
            rounding = torch.finfo(case.dtype).eps / 2
            tolerance = (rounding * (spread[0] + 1.01 * wanted.abs())).clamp(min=tolerance)
        assert (error.abs() < tolerance).all(), f"out of {b}"
        error = (got_lse - wanted_lse)[~blind].abs()
        assert (error < 1e-3 + 1e-6 * largest).all(), f"lse of {b}"  # scores cancel, their errors do not
    assert out[begin:].isnan().all(), "rows past the last sequence were written"
    return report


LONG: dict[str, Any] = dict(kind=J, dtype=torch.bfloat16, processors=1)
RING = {"anchored": 1, "kv_stages": 3}
# Small, for mutants: tiles of one block to five, on one CTA, which keeps or changes its query between them.
MUTATED = (
    (Case((260, 1, 140, 0), q_lengths=(140, 130, 257, 3), **LONG, quiet=(0, 128), growth=60.0), RING),
    (Case((300, 3), q_lengths=(140, 3), kind=J, left=60, right=30, processors=1, backwards=True), {"anchored": 1}),
    (Case((227, 3), q_lengths=(100, 130), **LONG, right=0, negative=True, spread=9.0, redone=1), {"anchored": 1}),
    (Case((160, 3), q_lengths=(100, 130), **LONG, right=0, negative=True, spread=9.0, redone=0), {"anchored": 1}),
    (Case((300, 0, 129, 600, 1, 400), kv_heads=2, q_len=3, processors=1), {"kv_stages": 3}),
    (Case((500, 1, 140, 0, 3), kind=P, q_len=2, processors=1, spread=5.0, dtype=torch.bfloat16, backwards=True), {}),
    (Case((260, 1, 390, 0, 130), q_lengths=(5, 140, 130, 3, 257), kind=J, processors=1, spread=5.0), {"kv_stages": 3}),
    (Case((130, 300, 1), q_lengths=(5, 130, 130), kind=J, processors=1, backwards=True), {}),
    (Case((130, 260), q_len=130, kv_heads=3), {}),  # a CTA that keeps its query, then changes it
    (Case((512, 256, 3, 130), q_lengths=(512, 256, 5, 140), kind=J, right=0, processors=1), {"kv_stages": 3}),
    (Case((64, 1, 0, 300, 200), kv_heads=2, q_len=3, dim=256, processors=1, spread=5.0), {"kv_stages": 3}),
    (Case((65, 1, 140, 200), kind=P, q_len=3, value_dim=136, processors=1, backwards=True), {}),
    (Case((130, 1, 0, 300, 7), q_lengths=(5, 130, 130, 9, 300), kind=J), {"answers": 2}),
    (Case((300, 0, 129, 5), kv_heads=2, group=3, q_len=5, spread=3.0, quantised=True, processors=1), {}),
)
EARLIER = "a step earlier, past what only computes"
EQUIVALENT = {
    f"correct_{name}_role: move up mbarrier.arrive(lanes[0].weighted, count=1)": EARLIER
    for name in ("streams", "tiles")
} | {
    "finish_anchored: move down mbarrier.wait(lane.summed, phase)": "behind another wait",
    "finish_wide: next staging.index(i % 2) in buffer = staging.index(i % 2)": "the buffers only change their turns",
}


def run_all(order: str, seed: int) -> None:
    for case, chosen in MUTATED:
        run(case, order, seed, **chosen)


MODULES = ("walk", *(f"attention_fwd.{name}" for name in ("device", "lanes", "softmax", "anchored", "correction")))
FAMILY = Family(
    "blackwell forward",
    runner=run_all,
    modules=[f"jaggedtensor.kernels.blackwell.{name}" for name in MODULES],
    equivalent=EQUIVALENT,
)
