"""The Blackwell backward of pairs of CTAs compiles for GPUs that are not there: what the emulator cannot see, too."""

import re
import sys
from collections import Counter, defaultdict

import pytest
import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.kernels.toolchain import GLUON_NEEDS, triton_version
from jaggedtensor.problem import AttentionProblem, QueryKind

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

from jaggedtensor.kernels.blackwell.attention_bwd_2cta import config as pair
from jaggedtensor.kernels.blackwell.plan import backward_family, backward_lacks, backward_told, plan_pair_backward
from jaggedtensor.testing.launches import GPUS

COMPILED = [
    ("sm_100", "jagged 128"),
    ("sm_103", "jagged 128, causal, groups of 4"),
    ("sm_100", "per sequence 128, 70 rows"),
]


@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_pairs_compile_within_their_budgets(arch, name, compile_within_rules):
    (kernel,) = compile_within_rules(name, arch, "backward")
    assert kernel.family.endswith("attention_bwd_2cta")
    assert kernel.made.metadata.num_ctas == 2
    assert kernel.tensor_columns == kernel.config.tensor_columns == 512
    compute, (mma,), (reduce,) = (kernel.roles[f"{role}_role"].loops for role in ("compute", "mma", "reduce"))
    assert [loop.counts["MUFU"] for loop in compute] == [64] * 2  # of each thread: no score is computed twice
    # dS in stores of 16 bytes to the CTA that takes it.
    assert [loop.counts["STAS"] for loop in compute] == [64 * 2 // 16] * 2
    assert mma.counts["UTCHMMA"] == 4 * 8 + 16  # sixteen of the inner dimension each, of which dQ has 256
    assert reduce.counts["UTMAREDG"] == 128 // pair.ADDED


def ranked(ptx: str) -> set[str]:
    """Registers whose values come from the rank of a CTA in its cluster, through arithmetic."""
    uses = defaultdict(set)
    for line in ptx.splitlines():
        made = re.match(r"\s*(?:@!?%p\d+\s+)?(?!ld|st|@)[a-z0-9.]+\s+(%\w+), (.*);", line)
        if made:
            for source in re.findall(r"%\w+", made[2]):
                uses[source].add(made[1])
    found, ahead = set(), ["%cluster_ctarank"]
    while ahead:
        for register in uses[ahead.pop()] - found:
            found.add(register)
            ahead.append(register)
    return found


def test_each_cta_moves_its_own_rows_or_columns(compile_within_rules):
    """Triton adds the place of a CTA's half to the last coordinates of a block where its buffer has fewer dimensions:
    then to the head rather than to the row. Coordinates are (column, head, row, end, bound)."""
    (kernel,) = compile_within_rules("jagged 128", "sm_100", "backward")
    ptx = kernel.made.asm["ptx"]
    from_rank = ranked(ptx)
    moves = Counter()
    for kind, box in re.findall(r"cp\.(\S+?)\.tensor\.5d\S* (\[.*?\}\])", ptx):
        coordinates = re.search(r"\{(.*?)\}", box)[1].split(", ")
        moves[kind, tuple(i for i, x in enumerate(coordinates) if x in from_rank)] += 1
    by_rows, by_columns = {(2,)}, {(0,)}
    assert {places for kind, places in moves if kind == "async.bulk"} == by_rows | by_columns
    assert {places for kind, places in moves if kind == "reduce.async.bulk"} == by_rows


def problem_of(query=QueryKind.JAGGED, heads=4, kv_heads=4, dim=128, value_dim=128, dtype=torch.bfloat16, **more):
    q_len = None if query is QueryKind.JAGGED else 300
    return AttentionProblem(query, q_len, heads, kv_heads, dim, value_dim, dtype, GPUS[10, 0], **more)


def test_what_pairs_do_not_take_goes_to_ctas_alone_and_explain_says_why():
    refused = {
        "takes queries of each sequence's own": problem_of(QueryKind.BROADCAST),
        "adds dQ in no order": problem_of(deterministic=True),
        "takes no block mask": problem_of(masked=True),
        "takes groups of 1, 2, 4, ... 64 heads, not 128": problem_of(heads=128, kv_heads=1),
        "72 to 128 that are multiples of 8, not 64": problem_of(dim=64),
    }
    for reason, problem in refused.items():
        assert not backward_lacks(problem)
        assert backward_family(problem) == "general"
        assert reason in backward_told(problem)
    for more in ({}, {"left": 3, "right": 0}, {"heads": 8}, {"query": QueryKind.PER_SEQUENCE}, {"dim": 72}):
        assert backward_family(problem_of(**more)) == "pair"
    lacks = backward_lacks(problem_of(dtype=torch.float32)) + pair.lacks(problem_of(dtype=torch.float32))
    assert lacks == ["does not compute in torch.float32"] * 2


def test_pairs_get_blocks_of_256_keys():
    """One for each pair of multiprocessors, at most; none for what no query sees."""
    keys, queries = (JaggedLayout.from_lengths(torch.tensor(x)) for x in ([300, 0, 5, 256], [100, 7, 0, 260]))
    problem = problem_of(heads=2, kv_heads=2)
    tiles, worker_offsets = plan_pair_backward(problem, keys, queries, 561, 367)
    assert len(worker_offsets) - 1 <= problem.device.processors // 2
    found = sorted(map(tuple, tiles[: int(worker_offsets[-1]), :6].tolist()))
    assert found == [(b, h, 0, q, n, n + 1) for b, h, n, q in [
        (0, 0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (3, 0, 0, 3), (3, 1, 0, 3)
    ]]  # fmt: skip
    blackwell = by_name("blackwell")
    _, planned = blackwell.schedules(problem, keys, queries, 561, 367, True)
    assert all(torch.equal(a, b) for a, b in zip(planned, (tiles, worker_offsets), strict=True))
