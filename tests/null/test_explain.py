"""prepare, explain, and python -m jaggedtensor.explain."""

import json
import pickle
import re
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, JaggedTensor, ScheduleKind
from jaggedtensor.explain import main, read_lengths
from jaggedtensor.kernels.dispatch import Choice, Implementation, choose
from jaggedtensor.ops.plan import MACHINES, plan_of, visible_pairs
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.schedules import TileAxis


def batch(lengths=(300, 0, 5, 129), heads=2, dim=16, dtype=torch.float16):
    return JaggedTensor.from_list([torch.zeros(n, heads, dim, dtype=dtype) for n in lengths])


def problem(query=QueryKind.BROADCAST, q_len=4, heads=2, kv_heads=2, dim=16, value_dim=16, **options):
    device = MACHINES["h200"].device
    return AttentionProblem(query, q_len, heads, kv_heads, dim, value_dim, torch.float16, device, **options)


# -- explain -----------------------------------------------------------------------------------------------------------


def plan_two(problem, keys, query, rows, q_rows, train):
    """An implementation's wishes."""
    common = dict(q_len=problem.q_len or query, heads=problem.kv_heads, group=problem.group, workers=132, block_kv=64)
    keys.schedule(ScheduleKind.ZIGZAG, **common)
    if train:
        keys.schedule(ScheduleKind.STREAM_K, axis=TileAxis.KEY, **common)
    return [], []


@pytest.fixture
def stub(monkeypatch):
    implementation = Implementation("stub", "nowhere", ("cuda",), (torch.float16,), plan=plan_two)
    choice = Choice(implementation, {"other": ["runs on elsewhere", "takes head dimensions up to 8"]})
    monkeypatch.setattr("jaggedtensor.ops.plan.choose", lambda problem, backend: choice)


def test_plan_tells_everything(stub):
    plan = batch().explain(torch.zeros(200, 4, 16, dtype=torch.float16), device="h200")
    assert (
        repr(plan)
        == """\
Plan for h200: 4 sequences, 434 tokens, longest 300
  lengths    | ▁▄█| from shortest to longest
             min 0, median 129, mean 108, max 300, 1 empty
  padding    would make 1,200 rows, 2.76 times the tokens
  attention  200 queries, one tensor for all; 4 heads on 2 of keys, D 16, float16
  kernels    stub (passed over: other runs on elsewhere and takes head dimensions up to 8)
  blocks     72 of 128 queries x 64 keys, of the 160 of a padded batch (45 %)
  schedules  forward   zigzag by query: tiles cost 1 to 5 blocks: longest first, dealt back and forth
             backward  stream-k by key: sequences have 0 to 5 KV blocks: everyone gets as many, cut mid-sequence
  balance    blocks for each of 132 workers       min      mean     max   max / mean
               contiguous                           0       0.5       5        9.167
               round robin                          0       0.5       5        9.167
               zigzag (forward)                     0       0.5       5        9.167
               lpt                                  0       0.5       5        9.167
               stream-k                             0       0.5       1        1.833
               dynamic                              0       0.5       5        9.167
  work       forward   22.2 MFLOP, at least 169 kB: bound by memory, 0.04 µs at best
             backward  55.6 MFLOP, at least 324 kB: bound by memory, 0.08 µs at best
                       on one H200: 4.30 TB/s and 790 TFLOP/s from measurements of a copy and a large product"""
    )


def test_plan_says_that_a_last_round_is_cut():
    keys = batch([3000, 3000, 3000], dim=64, dtype=torch.float16)
    told = "backward  zigzag by key: tiles cost 9 to 47 blocks: longest first, dealt back and forth; the last 12 in 60"
    assert told in repr(keys.explain(keys, backend="hopper", device="h200"))


def test_plan_names_a_schedule_that_both_passes_use_for_both(stub, monkeypatch):
    def plan(problem, keys, query, rows, q_rows, train):
        for _ in range(1 + train):
            keys.schedule(ScheduleKind.DYNAMIC, q_len=4, heads=2, workers=1)
        return [], []

    choice = Choice(Implementation("stub", "nowhere", ("cuda",), (), plan=plan), {})
    monkeypatch.setattr("jaggedtensor.ops.plan.choose", lambda problem, backend: choice)
    assert [one.direction for one in plan_of(problem(), torch.tensor([3])).schedules] == ["forward", "backward"]


def test_plan_of_tensors_on_a_cpu_is_for_their_kernels():
    keys = batch(dtype=torch.float32)
    plan = keys.explain(torch.zeros(3, 2, 16))
    assert "kernels    cpu\n" in repr(plan)
    assert plan.schedules == ()
    assert plan.workers == 132  # as an H200 would balance it


def test_plan_says_which_kernels_were_asked_for_and_why_none_serves():
    keys = batch(dtype=torch.float64)
    query = torch.zeros(3, 2, 16, dtype=torch.float64)
    assert keys.explain(query, backend="cpu").choice.implementation.name == "cpu"
    refused = keys.explain(query, backend="portable", device="b200")
    assert refused.choice is None
    assert re.search(r"kernels    none: .*portable: .*does not compute in torch.float64", repr(refused))


def test_plan_says_which_of_its_backward_kernels_blackwell_takes():
    keys, query = batch(dim=128, dtype=torch.float16), torch.zeros(3, 2, 128, dtype=torch.float16)
    wide = batch(dim=256, dtype=torch.float16)
    told = "backward  wide (passed over: broadcast takes a broadcast query and takes head dimensions up to 128"
    assert told in repr(wide.explain(wide, backend="blackwell", device="b200"))
    for asked, told in (
        ((query,), "backward  broadcast\n"),
        ((keys,), "backward  pair (passed over: broadcast takes a broadcast query)\n"),
        ((query.new_zeros(300, 2, 128),), "backward  general (passed over: broadcast takes 1 to 128 query rows"),
    ):
        assert told in repr(keys.explain(*asked, backend="blackwell", device="b200"))


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]], ids=["no sequences", "all empty", "one token"])
def test_degenerate_batches_are_told_and_drawn(lengths, tmp_path):
    keys = batch(lengths) if lengths else JaggedTensor.from_list([]).with_values(torch.zeros(0, 2, 16))
    for q_len in (0, 1):
        plan = keys.explain(torch.zeros(q_len, 2, 16, dtype=keys.dtype), device="b200")
        assert f"Plan for b200: {len(lengths)} sequences, {sum(lengths)} tokens" in repr(plan)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_plan_of_self_attention():
    keys = batch([5, 0, 300])
    plan = keys.explain(keys, causal=True, device="h200")
    assert "attention  305 queries in sequences of their own; 2 heads, D 16, float16, window right 0" in repr(plan)
    assert plan.pairs == 5 * 6 // 2 + 300 * 301 // 2
    assert plan.schedules[0].direction == "forward"


def test_plan_of_one_head_without_an_axis():
    keys = JaggedTensor.from_list([torch.zeros(n, 8) for n in (3, 0, 2)])
    assert keys.explain(torch.zeros(2, 8)).pairs == 10
    assert keys.explain(torch.zeros(3, 2, 8)).problem.query is QueryKind.PER_SEQUENCE


def test_work_is_what_the_definition_costs():
    lengths = torch.tensor([3, 0, 5])
    plan = plan_of(problem(heads=4, value_dim=8), lengths)
    pairs = 4 * 8
    # S and O forward; S, dP, dV, dQ and dK backward
    assert plan.flops == (2 * pairs * 4 * (16 + 8), 2 * pairs * 4 * (16 + 8 + 8 + 16 + 16))
    query, out, lse = 2 * 4 * 4 * 16, 2 * 3 * 4 * 4 * 8, 4 * 3 * 4 * 4
    keys, values = 2 * 8 * 2 * 16, 2 * 8 * 2 * 8
    assert plan.least_bytes == (query + keys + values + out + lse, 2 * (query + keys + values + out) + lse)
    shared = plan_of(problem(), lengths, same_values=True).least_bytes[0]
    assert shared == plan_of(problem(), lengths).least_bytes[0] - keys


def test_what_bounds_follows_from_the_machine():
    lengths = torch.full((64,), 4096)
    few, many = (
        plan_of(problem(q_len=q_len, dim=128, value_dim=128), lengths, machine=MACHINES["h200"]) for q_len in (32, 512)
    )
    assert few.floor() == (few.least_bytes[0] / 4.3e12, "memory")
    assert many.floor() == (many.flops[0] / 790e12, "compute")
    assert plan_of(problem(), lengths).floor() is None


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=4),
    st.integers(-1, 9),
    st.integers(-1, 9),
)
def test_visible_pairs_are_counted(lengths, left, right):
    q, k = (torch.tensor([pair[i] for pair in lengths], dtype=torch.int64) for i in (0, 1))
    expected = [
        sum(
            (left < 0 or j >= i + n - m - left) and (right < 0 or j <= i + n - m + right)
            for i in range(m)
            for j in range(n)
        )
        for m, n in lengths
    ]
    assert visible_pairs(q, k, left, right).tolist() == expected


def test_tiles_are_those_of_the_schedule():
    plan = plan_of(problem(q_len=4), torch.tensor([300, 0, 5]))
    block = plan.blocks[1]
    assert plan.tiles == 2 * sum(-(-n // block) for n in (300, 0, 5))
    assert plan.padded_tiles == 2 * 3 * -(-300 // block)


def test_bad_arguments_of_explain_are_named():
    keys = batch()
    with pytest.raises(ValueError, match="device must be one of 'h200', 'b200', got 'h100'"):
        keys.explain(torch.zeros(3, 2, 16, dtype=torch.float16), device="h100")
    with pytest.raises(ValueError, match="heads of query must be a positive multiple of the 2 heads of key, got 3"):
        keys.explain(torch.zeros(3, 3, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="the batch size of query must be 4, as of key, got 1"):
        keys.explain(batch([3]))


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install jaggedtensor\[plot\]"):
        batch().explain(torch.zeros(3, 2, 16, dtype=torch.float16)).plot(tmp_path / "plan.png")


def test_large_batch_is_drawn(tmp_path):
    lengths = torch.randint(0, 2000, (500,), generator=torch.Generator().manual_seed(0))
    lengths[7] = 50_000
    plan_of(problem(), lengths, machine=MACHINES["h200"]).plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<?xml")


# -- prepare -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(q_len=3, num_heads=2),
        dict(q_len=3, num_heads=4, causal=True),
        dict(q_len=3, num_heads=2, broadcast=False, window=(4, 0)),
        dict(q_len=3, num_heads=2, dtype=torch.float32, value_dim=8),
    ],
)
def test_prepared_schedules_are_those_that_attend_takes(options):
    keys = batch()
    assert keys.prepare(device="h200", **options) is keys
    built = keys.layout._schedules.builds
    assert built == len(keys.layout._schedules) >= 2
    asked = dict(options)
    causal, window = asked.pop("causal", False), asked.pop("window", (-1, -1))
    kind = QueryKind.BROADCAST if asked.pop("broadcast", True) else QueryKind.PER_SEQUENCE
    device = MACHINES["h200"].device
    call = AttentionProblem(
        kind, 3, asked["num_heads"], 2, 16, asked.get("value_dim", 16), asked.get("dtype", torch.float16), device,
        left=window[0], right=0 if causal else window[1],
    )  # fmt: skip
    choose(call).implementation.plan(call, keys.layout, None, keys.values().shape[0], 3, True)
    assert keys.layout._schedules.builds == built


def test_prepare_builds_for_forward_alone_if_told():
    keys = batch().prepare(q_len=3, num_heads=2, device="h200", train=False)
    assert [schedule.axis for schedule in keys.layout._schedules] == [TileAxis.QUERY]


def test_prepare_on_a_cpu_builds_nothing_for_it():
    assert len(batch().prepare(q_len=3, num_heads=2).layout._schedules) == 0


def test_prepared_self_attention_goes_along():
    keys = batch()
    keys.prepare(q_len=keys, num_heads=2, causal=True, device="b200")
    arrived = pickle.loads(ForkingPickler.dumps(keys))
    assert len(arrived.layout._schedules) == len(keys.layout._schedules) >= 2
    arrived.prepare(q_len=arrived.layout, num_heads=2, causal=True, device="b200")
    assert arrived.layout._schedules.builds == 0
    assert len(keys.to("meta").layout._schedules) == len(keys.layout._schedules)


def test_prepare_with_a_query_of_other_lengths():
    keys, query = batch(), batch([1, 2, 3, 4])
    keys.prepare(q_len=query, num_heads=2, device="h200")
    assert all(schedule.request.q_len != 0 for schedule in keys.layout._schedules)
    assert len(keys.layout._schedules) >= 2


def test_prepare_leaves_static_layouts_to_attend():
    static = JaggedTensor(torch.zeros(8, 2, 16, dtype=torch.float16), JaggedLayout.with_capacity(2, 8, 4))
    assert len(static.prepare(q_len=3, num_heads=2, device="h200").layout._schedules) == 0


def test_prepare_asks_no_gpu_for_the_tokens_of_a_query():
    """A meta tensor stands in for offsets that the host has not seen."""
    keys = JaggedTensor._of(torch.zeros(8, 2, 16, device="meta"), unseen := unseen_layout(2))
    query = JaggedTensor._of(torch.zeros(5, 2, 16, device="meta"), unseen_layout(2))
    with pytest.raises(
        ValueError, match="q_len must be a jagged query, as the host does not know the number of tokens"
    ):
        keys.prepare(q_len=query.layout, num_heads=2, device="h200")
    keys.prepare(q_len=query, num_heads=2, device="h200")
    assert keys.layout is unseen


def unseen_layout(batch_size):
    return JaggedLayout(torch.empty(batch_size + 1, dtype=torch.int64, device="meta"), validate=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            dict(q_len=3, num_heads=3),
            ValueError,
            "num_heads must be a positive multiple of the 2 heads of the keys, got 3",
        ),
        (dict(q_len=3, num_heads=0), ValueError, "num_heads must be a positive multiple"),
        (dict(q_len=None, num_heads=2), TypeError, "q_len must be an int, a jagged query or its layout, got None"),
        (dict(q_len=-1, num_heads=2), ValueError, "q_len must be in 0"),
        (dict(q_len=3, num_heads=2, device="cuda"), ValueError, "device must be one of 'h200', 'b200'"),
        (dict(q_len=3, num_heads=2, backend="nothing"), ValueError, "backend must be one of"),
        (dict(q_len=3, num_heads=2, dtype=torch.float64), NotImplementedError, "does not compute in torch.float64"),
        (dict(q_len=3, num_heads=2, window="wide"), TypeError, "window must be an int or a pair"),
    ],
)
def test_bad_arguments_of_prepare_are_named(options, error, message):
    with pytest.raises(error, match=message):
        batch().prepare(**{"device": "h200"} | options)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lengths_in(tmp_path):
    def write(suffix, lengths=(5, 0, 300, 17)):
        path = tmp_path / f"lengths{suffix}"
        if suffix == ".json":
            path.write_text(json.dumps(list(lengths)))
        elif suffix == ".npy":
            import numpy as np

            np.save(path, np.array(lengths, dtype=np.int32))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            histories = pa.array([[1] * n if n else None for n in lengths])
            pq.write_table(pa.table({"user": ["a"] * len(lengths), "history": histories}), path)
        return path

    return write


@pytest.mark.parametrize("suffix", [".json", ".npy", ".parquet"])
def test_lengths_are_read_from_a_file(lengths_in, suffix):
    assert read_lengths(lengths_in(suffix)).tolist() == [5, 0, 300, 17]
    assert read_lengths(lengths_in(suffix)).dtype == torch.int64


def test_lengths_are_read_from_a_named_column(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "two.parquet")
    assert read_lengths(tmp_path / "two.parquet", "b").tolist() == [3, 4]
    (tmp_path / "two.json").write_text('{"lengths": [1], "others": [2, 3]}')
    assert read_lengths(tmp_path / "two.json").tolist() == [1]
    assert read_lengths(tmp_path / "two.json", "others").tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"the column of two.parquet must be one of a, b, got None"):
        read_lengths(tmp_path / "two.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1.5]", "lengths in bad.json must be whole numbers, one for each sequence, got float32"),
        ("[[1], [2]]", "lengths in bad.json must be whole numbers, one for each sequence, got int64"),
        ("[1, -2]", "lengths in bad.json must be at least 0, got -2"),
        ("3", 'must be a list of lengths, or {"lengths": '),
        ("[1,", "Expecting value"),
    ],
)
def test_files_without_lengths_are_refused(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lengths(tmp_path / "bad.json")


def test_command_prints_and_draws(lengths_in, tmp_path, capsys):
    path, picture = lengths_in(".json"), tmp_path / "plan.png"
    arguments = ["--q-len", "128", "--heads", "4", "--head-dim", "128", "--device", "b200", "--plot", str(picture)]
    plan = main(["--lengths", str(path), *arguments])
    assert capsys.readouterr().out == repr(plan) + "\n"
    assert plan.machine.name == "b200"
    assert plan.workers == 148
    assert picture.stat().st_size < 200_000
    assert {ScheduleKind.ZIGZAG, ScheduleKind.STREAM_K} <= set(plan.balance)


def test_command_explains_self_attention(lengths_in):
    arguments = ["--q-len", "self", "--causal", "--heads", "8", "--kv-heads", "2", "--dtype", "fp32"]
    plan = main(["--lengths", str(lengths_in(".npy")), *arguments])
    assert plan.problem.query is QueryKind.JAGGED
    assert plan.pairs == sum(n * (n + 1) // 2 for n in (5, 0, 300, 17))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--q-len", "many"], "--q-len must be a number or self, got many"),
        (["--heads", "3", "--kv-heads", "2"], "--heads must be a positive multiple of --kv-heads 2, got 3"),
        (["--head-dim", "0"], "--head-dim must be at least 1, got 0"),
        (["--window", "-2", "0"], "window must be at least 0 on each side"),
    ],
)
def test_command_names_what_is_wrong(lengths_in, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["--lengths", str(lengths_in(".json")), *arguments])
    assert message in capsys.readouterr().err


def test_command_names_a_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        main(["--lengths", "nowhere.json"])
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--lengths", "nowhere.txt"])
    assert "must be a .json, .npy or .parquet file, got nowhere.txt" in capsys.readouterr().err
