"""The Hopper backward for queries of each sequence's own on the emulator: values, races, deadlocks, in many orders."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.emulator import ORDERS, emulate
from jaggedtensor.kernels.hopper.attention_bwd import config as configuration
from jaggedtensor.kernels.hopper.attention_bwd.device import backward_kernel
from jaggedtensor.kernels.hopper.attention_bwd.parts import scratch
from jaggedtensor.kernels.hopper.attention_bwd.total import blocks_of, workspace
from jaggedtensor.kernels.hopper.plan import plan_general_backward
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.ops.reference import visible_keys
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import schedules

SEEDS = 2


@dataclass(frozen=True)
class Case:
    k_lengths: tuple[int, ...]
    q_lengths: tuple[int, ...]
    jagged: bool = True
    kv_heads: int = 1
    group: int = 1
    dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.float16
    left: int = -1
    right: int = -1
    processors: int = 2
    slack: int = 3
    deterministic: bool = False
    packed: bool = False
    parts: int = 0  # of tiles of the last round, which are cut along their blocks of rows
    waves: bool = False  # dQ is stored, added to and finished by a launch for each wave of tiles
    scale: float | None = None


def reference(case, q, k, v, grad_out, q_offsets, k_offsets, scale):
    """lse and delta `[rows, Hq]`, dq, dk and dv in float64."""
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    delta, dq, dk, dv = torch.zeros_like(lse), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b in range(len(case.k_lengths)):
        rows, keys = slice(*q_offsets[b : b + 2]), slice(*k_offsets[b : b + 2])
        seen = visible_keys(case.q_lengths[b], case.k_lengths[b], case.left, case.right, q.device)
        some = seen.any(1)
        if not some.any():
            continue
        for h in range(q.shape[1]):
            key, value = k[keys, h // case.group], v[keys, h // case.group]
            score = (scale * q[rows, h] @ key.T).masked_fill(~seen, -math.inf)
            lse[rows, h] = score.logsumexp(1)
            p = (score - lse[rows, h, None]).exp().masked_fill(~some[:, None], 0)
            dp = grad_out[rows, h] @ value.T
            delta[rows, h] = (p * dp).sum(1)
            ds = p * (dp - delta[rows, h, None])
            dv[keys, h // case.group] += p.T @ grad_out[rows, h]
            dk[keys, h // case.group] += scale * ds.T @ q[rows, h]
            dq[rows, h] += scale * ds @ key
    return lse, delta, dq, dk, dv


def as_columns(lse, delta, scale):
    """-lse / scale and -delta in three bf16 each, which begin at column 0 and 8; a row that sees nothing has P = 0."""
    columns = torch.zeros(*lse.shape, configuration.COLUMNS, dtype=torch.bfloat16)
    for first, x in ((0, torch.where(lse == -math.inf, math.copysign(3e38, -scale), -lse / scale)), (8, -delta)):
        for n in range(first, first + 3):
            columns[..., n] = x
            x = x - columns[..., n].double()
    return columns


def take_out(case, held, total, offsets, config):
    """dQ of a workspace as threads hold it."""
    columns = config.block_d
    held = held.view(case.kv_heads, -1, 2, 4, columns // 16, 8, 4, 2, 2).permute(0, 1, 3, 7, 5, 2, 4, 6, 8)
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        first = (begin * case.group + 63 * (b + 1)) // 64
        for head in range(case.kv_heads):
            rows = held[head, first:].reshape(-1, case.group, columns)[: end - begin, :, : case.dim]
            total[begin:end, head * case.group : (head + 1) * case.group] = rows


def add_parts(case, merges, parts, got_dk, got_dv, ends, scale, config):
    """Rows of dK and dV whose tiles are cut, of which the kernel itself has written none."""
    for sequence, head, block, _, slot, count in merges.tolist():
        begin = ends[sequence] + 128 * block
        rows = slice(begin, min(begin + 128, ends[sequence + 1]))
        total = parts[slot : slot + count].sum(0).split([128 * config.block_d, 128 * config.block_dv])
        total_k, total_v = (
            x.view(8, -1, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(128, -1)[: rows.stop - begin] for x in total
        )
        assert count == case.parts
        assert got_dk[rows, head].isnan().all()
        assert got_dv[rows, head].isnan().all()
        got_dk[rows, head] = (scale * total_k[:, : case.dim]).to(case.dtype)
        got_dv[rows, head] = total_v[:, : case.value_dim].to(case.dtype)


def run(case: Case, order: str, seed: int, small: float = 0.0):
    """`small`: an error of each number that is let pass, for gradients that are 0."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype)

    heads, batch = case.kv_heads * case.group, len(case.k_lengths)
    kind = QueryKind.JAGGED if case.jagged else QueryKind.PER_SEQUENCE
    q_len = None if case.jagged else case.q_lengths[0]
    device = Device("cuda", (9, 0), case.processors, 227 << 10)
    problem = AttentionProblem(
        kind,
        q_len,
        heads,
        case.kv_heads,
        case.dim,
        case.value_dim,
        case.dtype,
        device,
        case.left,
        case.right,
        case.deterministic,
    )
    assert not configuration.lacks(problem)
    config = replace(configuration.select(problem), packed=case.packed, cut=bool(case.parts))
    keys, queries = (JaggedLayout.from_lengths(torch.tensor(x)) for x in (case.k_lengths, case.q_lengths))
    if case.q_lengths == case.k_lengths:
        queries = keys
    q_tokens, k_tokens = sum(case.q_lengths), sum(case.k_lengths)
    q_rows, k_rows = q_tokens + case.slack * case.jagged, k_tokens + case.slack
    q, grad_out = normal(q_rows, heads, case.dim), normal(q_rows, heads, case.value_dim)
    k, v = normal(k_rows, case.kv_heads, case.dim), normal(k_rows, case.kv_heads, case.value_dim)
    scale = 1 / math.sqrt(case.dim) if case.scale is None else case.scale
    lse, delta, dq, dk, dv = reference(
        case, q, k, v, grad_out, queries.offsets().tolist(), keys.offsets().tolist(), scale
    )
    for x in (q[q_tokens:], grad_out[q_tokens:], k[k_tokens:], v[k_tokens:]):
        x.fill_(math.nan)
    columns = as_columns(lse, delta, scale)
    columns[q_tokens:] = math.nan
    written = math.nan if case.parts else 0.0  # keys that no query sees have no tile
    got_dq = torch.zeros_like(q)  # nor have queries that see no key
    if all(case.k_lengths):
        got_dq.fill_(math.nan)
    got_dk, got_dv, total = torch.full_like(k, written), torch.full_like(v, written), torch.zeros(q.shape)
    schedule = plan_general_backward(
        problem, keys, queries if case.jagged else None, k_rows, q_rows, least=1, in_waves=case.waves
    )
    waves, merges = list(zip(schedule[::2], schedule[1::2], strict=False)), schedule[-1] if len(schedule) % 2 else None
    assert len(waves) == (3 if case.waves else 1)
    assert config.cut == (merges is not None)
    parts = torch.full_like(scratch(case.processors, config, k.device), math.nan) if config.cut else None
    rows, group = configuration.ROWS // case.group, case.group
    blocks = (
        (q, rows, group, config.block_d),
        (k, 64, 1, config.block_d),
        (v, 64, 1, config.block_dv),
        (grad_out, rows, group, config.block_dv),
        (columns, rows, group, configuration.COLUMNS),
        (got_dk, 64, 1, config.half),
        (got_dv, 64, 1, 64),
        (got_dq, rows, group, config.half),
    )
    most_blocks = q_rows // rows + batch + 1
    added = ragged(total, rows, group, config.half)
    if case.packed:
        most_blocks = blocks_of(q_rows * group, batch)
        held, added = workspace(case.kv_heads, most_blocks, config, total.device, not case.waves)
        if case.waves:
            held.fill_(math.nan)
    turns = torch.zeros(case.kv_heads * most_blocks, dtype=torch.int32)
    reports = []
    for number, (tiles, worker_offsets) in enumerate(waves):
        mine = replace(config, cut=False, last=True) if number == 2 else config
        report = emulate(
            backward_kernel,
            (worker_offsets.shape[0] - 1,),
            *(ragged(*block)[1]() for block in blocks),
            added[1](),
            turns,
            most_blocks,
            int(case.waves and number == 0),
            parts if mine.cut else None,
            tiles,
            worker_offsets,
            queries.offsets() if case.jagged else None,
            keys.offsets(),
            q_len or 0,
            scale * math.log2(math.e),
            scale,
            case.left,
            case.right,
            mine,
            num_warps=4,
            order=order,
            seed=seed,
        )
        report.raise_if_bad()
        assert report.shared_peak <= configuration.SHARED_MEMORY
        reports.append(report)
    if case.deterministic:
        assert int(turns.sum()) == sum(int(tile[3] - tile[2]) for tile in tiles), "not each tile has told of each block"
    if case.packed and not case.waves:
        take_out(case, held, total, queries.offsets().tolist(), config)
    if case.waves:
        untouched = got_dq[q_tokens:]
        assert (untouched.isnan() if all(case.k_lengths) else untouched == 0).all()
        got_dq, total, dq = got_dq[:q_tokens], got_dq[:q_tokens].float() / scale, dq[:q_tokens]
    if merges is not None:
        add_parts(case, merges, parts, got_dk, got_dv, keys.offsets().tolist(), scale, config)
        assert got_dk[k_tokens:].isnan().all()
        got_dk, got_dv, dk, dv = (x[:k_tokens] for x in (got_dk, got_dv, dk, dv))
    for name, got, wanted in (("dq", total * scale, dq), ("dk", got_dk, dk), ("dv", got_dv, dv)):
        error, size = (got.double() - wanted).norm(), wanted.norm()
        assert error < 2e-2 * size + small * math.sqrt(got.numel()), f"{name}: {error} of {size}"
    return reports[0]


CASES = {
    "tiles of one block and of several": Case((150, 0, 64, 1, 300), (100, 3, 0, 65, 200), packed=True),
    "causal": Case((150, 20, 290), (150, 64, 200), right=0),
    "a window, two heads in groups of two": Case(
        (300, 5), (290, 9), kv_heads=2, group=2, left=40, right=70, packed=True
    ),
    "queries per sequence": Case(
        (65, 130, 0), (70,) * 3, jagged=False, dim=72, value_dim=104, dtype=torch.bfloat16, packed=True
    ),
    "64 columns": Case((150, 0, 70), (100, 5, 130), dim=64, value_dim=64, right=0, packed=True),
    "more CTAs than tiles": Case((70,), (5,), processors=4),
    "parts of tiles": Case((200,) * 3, (150,) * 3, processors=4, packed=True, parts=2),
    "waves": Case((150, 0, 64, 1, 390, 129), (100, 3, 0, 65, 200, 129), packed=True, waves=True),
    "waves, two heads in groups of two": Case(
        (300, 5, 128), (70, 9, 65), kv_heads=2, group=2, packed=True, waves=True, dtype=torch.bfloat16
    ),
}
ONCE = {
    "three heads": Case((300, 0, 140, 20), (30, 9, 70, 64), kv_heads=3, processors=3),
    "40 and 128 columns": Case((200, 5), (130, 9), kv_heads=2, group=2, dim=40, dtype=torch.bfloat16),
    "parts, two heads in groups of two": Case(
        (130,) * 2, (130,) * 2, kv_heads=2, group=2, processors=7, dtype=torch.bfloat16, parts=5
    ),
    "parts of 72 and 40 columns": Case((129,), (257,), dim=72, value_dim=40, processors=8, parts=4),
    "parts, queries per sequence": Case((250,), (300,), jagged=False, dim=64, value_dim=64, processors=11, parts=5),
    "waves of 64 columns": Case((150, 0, 70, 400), (100, 5, 130, 64), dim=64, value_dim=64, packed=True, waves=True),
    "waves of 40 and 128 columns, queries per sequence": Case(
        (300, 5, 130), (70,) * 3, jagged=False, dim=40, packed=True, waves=True, slack=0
    ),
    "waves, from tile to tile of many blocks": Case(
        (300, 300, 200), (300, 400, 250), dim=64, value_dim=64, packed=True, waves=True, processors=1
    ),
    "waves of 72 columns and parts of tiles": Case(
        (384,) * 3, (150,) * 3, dim=72, value_dim=104, processors=7, packed=True, waves=True, parts=2
    ),
    "a negative scale": Case((140, 20), (70, 64), right=0, scale=-0.3),
    "a scale next to none": Case((140, 20), (70, 64), right=0, scale=1e-35, dtype=torch.bfloat16),
    "128 and 64 columns": Case((140, 3), (70, 9), value_dim=64),
    "turns": Case((200, 5), (130, 9), kv_heads=2, group=2, right=70, deterministic=True, processors=1),
    "turns and a window": Case((300, 70), (190, 9), left=40, right=0, deterministic=True, processors=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_are_right_under_every_order(case):
    for order, seed in schedules(SEEDS):
        run(case, order, seed)


@pytest.mark.parametrize("case", ONCE.values(), ids=ONCE.keys())
def test_values_are_right_of_more_heads_and_in_turns(case):
    run(case, "round_robin", 0)


@st.composite
def drawn_cases(draw):
    """Sequences of other lengths, so that no tile is cut, with an empty one and one of a token among them."""
    lengths = draw(st.permutations([0, 1, draw(st.sampled_from((2, 127, 128, 129))), draw(st.integers(3, 200))]))
    group = draw(st.sampled_from((1, 2, 8)))
    jagged = draw(st.booleans())
    rows = st.one_of(st.sampled_from((0, 1, 64 // group, 64 // group + 1)), st.integers(2, 200 // group))
    q_lengths = [draw(rows) for _ in lengths] if jagged else [draw(rows.filter(bool))] * len(lengths)
    dim, value_dim = draw(st.sampled_from(((64, 64), (128, 128), (40, 128), (128, 64))))
    window = st.sampled_from((-1, -1, 0, 1, 60, 200))
    left, right = draw(window), draw(window)
    deterministic = draw(st.booleans())
    waves = draw(st.booleans()) and not deterministic and left == right == -1
    return Case(
        tuple(lengths),
        tuple(q_lengths),
        jagged=jagged,
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        dim=dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from((torch.float16, torch.bfloat16))),
        left=left,
        right=right,
        processors=draw(st.integers(1, 3)),
        deterministic=deterministic,
        packed=waves or (draw(st.booleans()) and not deterministic),
        waves=waves,
    )


# CTAs run one after the other: with more than one, a tile might wait for another CTA's turn.
@settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate])
@given(drawn_cases(), st.sampled_from(ORDERS), st.integers(0, 100))
def test_any_batch(case, order, seed):
    # Where each row sees one key, dQ and dK are 0.
    run(replace(case, processors=1) if case.deterministic else case, order, seed, small=1e-3)


@pytest.mark.parametrize(("left", "right", "group"), [(-1, -1, 1), (-1, 0, 1), (-1, 90, 2), (70, -1, 1), (200, 0, 2)])
def test_no_two_tiles_wait_for_each_other(left, right, group):
    """A tile adds to dQ of a block of rows after all that have fewer keys, and a CTA comes to its tiles one by one."""
    random = torch.Generator().manual_seed(1)
    device = Device("cuda", (9, 0), 1, 227 << 10)
    for processors in (1, 3, 7, 132):
        lengths = torch.randint(0, 2000, (6,), generator=random) * torch.randint(0, 2, (6,), generator=random)
        keys, others = JaggedLayout.from_lengths(lengths), JaggedLayout.from_lengths(lengths.flip(0))
        problem = AttentionProblem(
            QueryKind.JAGGED, None, 3 * group, 3, 128, 128, torch.float16, replace(device, processors=processors),
            left, right, deterministic=True,
        )  # fmt: skip
        for query in (keys, others):
            rows = int(lengths.sum())
            tiles, offsets = plan_general_backward(problem, keys, query, rows, rows)
            hands = [tiles[a:b, :5].tolist() for a, b in itertools.pairwise(offsets.tolist())]
            turns: dict[tuple[int, int, int], list[int]] = {}
            for sequence, head, begin, end, block in sorted(itertools.chain(*hands), key=lambda tile: tile[4]):
                for row in range(begin, end):
                    turns.setdefault((sequence, head, row), []).append(block)
            to_do = [[(*tile, row) for tile in hand for row in range(tile[2], tile[3])][::-1] for hand in hands]
            moved = True
            while moved:
                moved = False
                for mine in to_do:
                    while mine and turns[mine[-1][0], mine[-1][1], mine[-1][5]][0] == mine[-1][4]:
                        sequence, head, _, _, _, row = mine.pop()
                        turns[sequence, head, row].pop(0)
                        moved = True
            assert not any(to_do), f"{processors} CTAs wait for each other"


def run_some(order, seed):
    for name in (
        "tiles of one block and of several",
        "a window, two heads in groups of two",
        "parts of tiles",
        "waves",
    ):
        run(CASES[name], order, seed)
    if order == "round_robin":
        run(CASES["64 columns"], order, seed)
        run(CASES["waves, two heads in groups of two"], order, seed)
        run(ONCE["turns and a window"], order, seed)


ONE_CTA = "CTAs run one after the other on the emulator, so that turns are tested with a single one"
ONE_THREAD = "one thread of a role waits for its stores, the others for a barrier behind that; here a role is one"
FAMILY = Family(
    "hopper backward",
    runner=run_some,
    modules=tuple(
        f"jaggedtensor.kernels.hopper.attention_bwd.{name}" for name in ("channels", "loads", "reducer", "device")
    ),
    equivalent={
        "reduce_role: delete turns.wait(mine, block, turn)": ONE_CTA,
        **{
            f"reduce_role: {change} tma.store_wait(0, read_only=False)": ONE_CTA
            for change in ("delete", "move down", "one more in")
        },
        "Consumer.step: delete gl.barrier()": "it is never reached, see there",
        "Consumer.step: delete gl.barrier() #2": ONE_THREAD,
        "Consumer.step: move down tma.store_wait(0)": ONE_THREAD,
    },
)
