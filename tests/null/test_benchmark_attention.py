"""What of the GPU benchmark can be tested without a GPU: its workloads, its judgement and its manners."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, which import each other by name

import attention
import peers
import report
from checks import Reference, sampled_sequences
from supervise import Journal, Story, supervise
from timing import Effort, interleaved
from workloads import WORKLOADS, Inputs

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BRIEF = Effort(bursts=2, burst_ms=0.0, pause_s=0.0, sustained_s=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # workers of a parallel test run would wait for each other's threads
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny():
    return WORKLOADS["pma128-uniform"].tiny()


def measured(workload, names, passes=("fwd", "bwd")):
    return list(attention.measure(workload, attention.Setup(names, CPU, list(passes), BRIEF)))


# -- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batch", "q_len", "heads", "dim", "fwd", "bwd"),
    [
        ("pma128-uniform", 1024, 128, 4, 128, "1.02", "2.03"),
        ("pma256-uniform", 512, 256, 4, 128, "0.70", "1.74"),
        ("pma512-uniform", 256, 512, 4, 128, "0.69", "1.73"),
        ("pma32-uniform", 1024, 32, 4, 128, "0.99", "1.99"),
        ("pma128-lognormal", 4096, 128, 4, 128, "0.92", "1.84"),
        ("pma128-tail", 2048, 128, 4, 128, "0.37", "0.75"),
        ("pma128-d64", 1024, 128, 8, 64, "1.02", "2.03"),
        ("self-uniform", 64, None, 8, 128, "7.15", "17.9"),
        ("self-lognormal", 1024, None, 8, 128, "4.96", "12.4"),
        ("dense-4k", 8, None, 16, 128, "1.39", "3.48"),
    ],
)
def test_floors_are_those_of_the_published_table(name, batch, q_len, heads, dim, fwd, bwd):
    workload = WORKLOADS[name]
    assert (len(workload.draw()), workload.q_len, workload.heads, workload.dim) == (batch, q_len, heads, dim)
    digits = {which: len(text.partition(".")[2]) for which, text in (("fwd", fwd), ("bwd", bwd))}
    assert f"{workload.floor_ms('fwd'):.{digits['fwd']}f}" == fwd
    assert f"{workload.floor_ms('bwd'):.{digits['bwd']}f}" == bwd


def test_suites_are_the_names_of_the_workloads():
    assert {w.suite for w in WORKLOADS.values()} == {"pma", "self", "dense"}
    assert all(name.startswith(w.suite) for name, w in WORKLOADS.items())


def test_flops_and_bytes_of_a_shared_query():
    workload = WORKLOADS["pma128-uniform"]
    tokens, row = 2_067_608, 4 * 128 * 2
    assert int(workload.draw().sum()) == tokens
    assert workload.flops("fwd") == 4 * 128 * tokens * 4 * 128
    assert workload.flops("bwd") == 2.5 * workload.flops("fwd")
    assert workload.least_bytes("fwd") == (128 + 2 * tokens + 1024 * 128) * row
    assert workload.least_bytes("bwd") == (4 * tokens + 2 * 1024 * 128) * row


def test_flops_and_bytes_of_self_attention():
    workload = WORKLOADS["dense-4k"]
    row = 16 * 128 * 2
    assert workload.flops("fwd") == 4 * 8 * 4096**2 * 16 * 128
    assert workload.least_bytes("fwd") == 4 * 8 * 4096 * row
    assert workload.least_bytes("bwd") == 6 * 8 * 4096 * row


def test_both_passes_cost_as_much_as_each_of_them():
    for workload in WORKLOADS.values():
        for cost in (workload.flops, workload.least_bytes, workload.floor_ms):
            assert cost("both") == pytest.approx(cost("fwd") + cost("bwd"))


def test_inputs_are_packed_and_the_same_for_the_same_seed(tiny):
    one, again, other = (Inputs.make(tiny, CPU, seed) for seed in (0, 0, 1))
    tokens = int(one.lengths.sum())
    assert one.q.shape == (8, 2, 16)
    assert one.k.shape == one.v.shape == (tokens, 2, 16)
    assert one.grad_out.shape == one.expanded_query().shape == (8 * one.batch, 2, 16)
    assert one.k_offsets[-1] == tokens
    assert torch.equal(one.k, again.k)
    assert not torch.equal(one.k, other.k)


# -- the float64 reference --------------------------------------------------------------------------------------------


def test_the_slice_has_the_shortest_the_longest_and_an_empty_sequence():
    lengths = torch.tensor([4, 3, 9, 0, 1, 5, 6, 0, 7, 7])
    assert {2, 3, 4} <= set(sampled_sequences(lengths))
    assert sampled_sequences(torch.tensor([0])) == [0]


@pytest.mark.parametrize("name", ["pma128-uniform", "self-uniform"])
def test_reference_accepts_what_is_right(name):
    inputs = Inputs.make(WORKLOADS[name].tiny(), CPU, 0)
    reference = Reference.of(inputs)
    bound = peers.contender("reference").bind(inputs)
    out = bound.forward()
    assert not reference.check_forward(bound.pack_out(out)).wrong
    assert not reference.check_backward(*bound.pack_gradients(bound.backward(out))).wrong


def test_a_single_key_leaves_rounding_where_gradients_cancel():
    inputs = Inputs.make(WORKLOADS["self-uniform"].tiny(), CPU, 0, torch.tensor([1, 5, 0]))
    bound = peers.contender("cpu").bind(inputs)
    assert not Reference.of(inputs).check_backward(*bound.backward(bound.forward())).wrong


@pytest.mark.parametrize("name", ["pma128-uniform", "self-uniform"])
@pytest.mark.parametrize("spoiled", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("how", ["a row is missing", "a value is NaN", "all is off by a tenth"])
def test_reference_notices_what_is_wrong(name, spoiled, how):
    inputs = Inputs.make(WORKLOADS[name].tiny(), CPU, 0)
    reference = Reference.of(inputs)
    bound = peers.contender("reference").bind(inputs)
    out = bound.forward()
    results = dict(zip(("dq", "dk", "dv"), bound.pack_gradients(bound.backward(out)), strict=True))
    results["out"] = bound.pack_out(out)
    result = results[spoiled] = results[spoiled].detach().clone()
    if how == "a row is missing":
        result[1] = 0
    elif how == "a value is NaN":
        result[1, 0, 3] = torch.nan
    else:
        result *= 1.1
    deviations = reference.check_forward(results.pop("out")), reference.check_backward(**results)
    wrong = next(deviation for deviation in deviations if deviation.wrong)
    assert spoiled in wrong.what
    assert [deviation.wrong for deviation in deviations] == ([True, False] if spoiled == "out" else [False, True])


def test_an_empty_sequence_must_give_exactly_zero(tiny):
    inputs = Inputs.make(tiny, CPU, 0)
    reference = Reference.of(inputs)
    bound = peers.contender("reference").bind(inputs)
    out = bound.pack_out(bound.forward()).detach().clone()
    empty = inputs.lengths.tolist().index(0)
    out[inputs.q_offsets[empty], 0, 0] = 1e-6
    assert f"sequence {empty}" in reference.check_forward(out).what
    assert reference.check_forward(out).wrong


# -- measuring --------------------------------------------------------------------------------------------------------


def test_results_have_the_documented_fields(tiny):
    rows = measured(tiny, ["cpu", "padded", "fa2", "fa3"], ("fwd", "bwd", "both"))
    assert [row["pass"] for row in rows] == ["fwd", "bwd", "both"]
    for row in json.loads(json.dumps(rows)):
        assert list(row) == [
            "workload", "pass", "backend", "ms", "sustained_ms", "tflops", "floor_share", "peers", "without"
        ]  # fmt: skip
        assert row["workload"] == "pma128-uniform"
        assert row["backend"] == "cpu"
        assert all(row[number] > 0 for number in ("ms", "sustained_ms", "tflops", "floor_share"))
        assert list(row["peers"]) == ["padded"]
        assert row["peers"]["padded"] > 0
        assert row["tflops"] == pytest.approx(tiny.flops(row["pass"]) / row["ms"] / 1e9)
        assert row["floor_share"] == pytest.approx(tiny.floor_ms(row["pass"]) / row["ms"])


def test_absent_peers_are_named(tiny, monkeypatch):
    monkeypatch.setattr(peers, "_is_installed", lambda module: module.startswith("torch."))
    (row,) = measured(tiny, ["cpu", "fa2", "fa3"], ["fwd"])
    assert row["without"] == {"fa2": "needs a GPU", "fa3": "not installed"}
    assert report.absences([row]) == ["fa2: needs a GPU (everywhere)", "fa3: not installed (everywhere)"]


def test_an_absence_says_where():
    rows = [row_of(name, which, 1.0) for name in ("pma32-uniform", "dense-4k") for which in ("fwd", "bwd")]
    for row in rows[1::2]:
        row["without"]["fa3"] = "forward only"
    rows[0]["without"]["flex"] = "out of memory"
    assert report.absences(rows) == [
        "flex: out of memory (fwd of pma32-uniform)",
        "fa3: forward only (bwd of every workload)",
    ]


class Faulty(peers.Padded):
    """Right but for what `spoil_out` and `spoil_gradients` do."""

    name = "faulty"
    spoil_out = spoil_gradients = staticmethod(lambda x: x)

    def bind(self, inputs):
        bound = super().bind(inputs)
        return replace(
            bound,
            pack_out=lambda out: self.spoil_out(bound.pack_out(out)),
            pack_gradients=lambda gradients: self.spoil_gradients(bound.pack_gradients(gradients)),
        )


def test_a_peer_with_a_wrong_output_gets_no_speed(tiny, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "faulty", Faulty)
    monkeypatch.setattr(Faulty, "spoil_out", staticmethod(lambda out: out * 1.05))
    for row in measured(tiny, ["cpu", "faulty"]):
        assert row["ms"] > 0
        assert row["peers"] == {}
        assert row["without"]["faulty"].startswith("WRONG: ")
        assert "out" in row["without"]["faulty"]


def test_a_peer_with_a_wrong_gradient_keeps_its_forward(tiny, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "faulty", Faulty)
    monkeypatch.setattr(Faulty, "spoil_gradients", staticmethod(lambda grads: (grads[0] * 0, *grads[1:])))
    forward, backward = measured(tiny, ["cpu", "faulty"])
    assert forward["peers"]["faulty"] > 0
    assert backward["peers"] == {}
    assert backward["without"]["faulty"].startswith("WRONG: ")
    assert "dq" in backward["without"]["faulty"]


@pytest.mark.parametrize("name", ["pma128-uniform", "pma128-tail"])  # with an empty sequence, and without
def test_a_wrong_result_of_ours_gets_no_speed(name, monkeypatch):
    monkeypatch.setattr(peers.Ours, "bind", lambda self, inputs: Faulty().bind(inputs))
    monkeypatch.setattr(Faulty, "spoil_out", staticmethod(lambda out: out.clone().index_fill_(0, torch.tensor([0]), 1)))
    for row in measured(WORKLOADS[name].tiny(), ["cpu", "padded"]):
        assert row["ms"] is row["sustained_ms"] is row["tflops"] is row["floor_share"] is None
        assert row["error"].startswith("WRONG: ")
        assert row["peers"]["padded"] > 0
        assert "WRONG" in attention._progress(row)
        assert "-" in report.table([row]).splitlines()[1].split()


def test_a_peer_that_raises_or_runs_out_of_memory_is_recorded(tiny, monkeypatch):
    def explode(inputs):
        raise RuntimeError("no such kernel\nand more")

    def exhaust(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")

    monkeypatch.setattr(peers.Padded, "bind", lambda self, inputs: explode(inputs))
    monkeypatch.setattr(peers.Nested, "bind", lambda self, inputs: exhaust(inputs))
    (row,) = measured(tiny, ["cpu", "padded", "nested"], ["fwd"])
    assert row["ms"] > 0
    assert row["without"] == {"padded": "RuntimeError: no such kernel", "nested": "out of memory"}


def test_a_peer_without_backward_says_so(tiny, monkeypatch):
    monkeypatch.setattr(peers.Padded, "forward_only", True)
    forward, backward = measured(tiny, ["cpu", "padded"])
    assert forward["peers"]["padded"] > 0
    assert backward["without"] == {"padded": "forward only"}


def test_a_contender_that_fails_while_it_is_timed_drops_out_alone():
    calls = iter(range(100))

    def fails_later():
        if next(calls) > 3:
            raise RuntimeError

    def attempt(name, action):
        try:
            return action()
        except RuntimeError:
            return None

    effort = replace(BRIEF, bursts=5)
    times = interleaved({"good": [lambda: None], "bad": [fails_later]}, effort, CPU, attempt)
    assert list(times) == ["good"]


def test_nested_and_padded_peers_compute_attention():
    for name in ("pma128-uniform", "self-uniform"):
        inputs = Inputs.make(WORKLOADS[name].tiny(), CPU, 0)
        reference = Reference.of(inputs)
        for peer in ("nested", "padded"):
            bound = peers.contender(peer).bind(inputs)
            out = bound.forward()
            assert not reference.check_forward(bound.pack_out(out)).wrong
            assert not reference.check_backward(*bound.pack_gradients(bound.backward(out))).wrong


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("pma128-uniform", [300, 0, 5, 700, 128, 256, 0]),
        ("pma32-uniform", [1, 0, 0, 260]),
        ("self-uniform", [300, 0, 5, 700, 128, 256, 0]),
        ("self-uniform", [128, 256, 0, 384]),
    ],
)
def test_the_block_mask_of_flex_attention_is_what_torch_makes(name, lengths):
    from torch.nn.attention.flex_attention import create_block_mask

    inputs = Inputs.make(replace(WORKLOADS[name], heads=1, dim=16), CPU, 0, torch.tensor(lengths))
    mask = peers.document_mask(inputs)
    expected = create_block_mask(mask.mask_mod, None, None, *mask.shape[-2:], device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
        assert torch.equal(counts, getattr(expected, f"{kind}_num_blocks"))
        valid = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[valid], getattr(expected, f"{kind}_indices")[valid])


# -- the child process ------------------------------------------------------------------------------------------------

CHILD = """
import json, os, signal, sys, time
sys.path.insert(0, {path!r})
from supervise import LOST_DEVICE, Journal
order = json.loads(sys.argv[1])
journal = Journal(order["journal"])
for task in order["tasks"]:
    journal.record(task, {{"task": task, "without": order["skip"].get(task, {{}})}})
    for contender in ("ours", "good", "bad"):
        if contender not in order["skip"].get(task, {{}}):
            journal.doing(task, contender)
            if (task, contender) == ("second", {culprit!r}):
                {death}
            journal.doing(task, None)
    journal.done(task)
"""


def outcome_of(tmp_path, culprit, death, patience_s=30):
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(path=str(Path(attention.__file__).parent), culprit=culprit, death=death))
    seen = []
    outcome = supervise(
        lambda journal, tasks, skip: [
            sys.executable, str(script), json.dumps({"journal": str(journal), "tasks": tasks, "skip": skip})
        ],
        ["first", "second", "third"],
        ["good", "bad"],
        patience_s=patience_s,
        progress=lambda records: seen.append([record["task"] for record in records]),
    )  # fmt: skip
    return outcome, seen


@pytest.mark.parametrize(
    ("death", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by signal 11"),
        ("os._exit(LOST_DEVICE)", "its process lost the GPU to an error in a kernel"),
        ("time.sleep(60)", "its process did not stir for 1 s"),
    ],
)
def test_a_peer_that_takes_its_process_with_it_is_left_out_of_that_workload(tmp_path, death, why):
    outcome, seen = outcome_of(tmp_path, "bad", death, patience_s=1)
    assert outcome.given_up == {}
    assert outcome.records == [
        {"task": "first", "without": {}},
        {"task": "second", "without": {"bad": why}},
        {"task": "third", "without": {}},
    ]
    assert seen[-1] == ["first", "second", "third"]


def test_a_workload_that_ours_does_not_survive_is_given_up(tmp_path):
    outcome, _ = outcome_of(tmp_path, "ours", "os._exit(3)")
    assert outcome.given_up == {"second": "ours: its process ended with code 3"}
    assert [record["task"] for record in outcome.records] == ["first", "second", "third"]


def test_a_benchmark_that_does_not_start_raises():
    with pytest.raises(RuntimeError, match="did not start: its process ended with code 5"):
        supervise(lambda *_: [sys.executable, "-c", "raise SystemExit(5)"], ["task"], [], patience_s=30)


def test_half_a_line_of_a_journal_is_no_entry(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.record("task", {"ms": 1.0})
    with path.open("a") as file:
        file.write('{"done": "ta')
    story = Story.read(path)
    assert story.records == [("task", {"ms": 1.0})]
    assert story.done == []


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_measures_and_writes_what_it_is_asked_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    results, page = tmp_path / "results" / "none.json", tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    arguments = "--device cpu --tiny --backend cpu --peers padded,fa3 --workload pma32-uniform --memory --commit abc"
    code = attention.main([*arguments.split(), "--json", str(results), "--markdown", str(page)])
    assert code == 0
    rows = json.loads(results.read_text())
    assert [(row["workload"], row["pass"]) for row in rows] == [("pma32-uniform", "fwd"), ("pma32-uniform", "bwd")]
    assert {row["commit"] for row in rows} == {"abc"}
    assert {row["torch"] for row in rows} == {torch.__version__}
    assert set(json.loads((tmp_path / "results" / "none.costs.json").read_text())["memory"]["beyond_inputs"]) == {
        "cpu", "padded"
    }  # fmt: skip
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| pma32-uniform | fwd |" in text
    assert "- fa3: not installed (everywhere)" in text
    printed = capfd.readouterr().out
    assert "pma32-uniform fwd: cpu" in printed
    assert "padded/ours" in printed


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [
        ("--suite self,dense", ["self-uniform", "self-lognormal", "dense-4k"]),
        ("--workload pma128-d64 dense-4k", ["pma128-d64", "dense-4k"]),
        ("--overhead --memory", ["overhead", "memory"]),
        ("--suite dense --overhead", ["dense-4k", "overhead"]),
        ("", list(WORKLOADS)),
    ],
)
def test_the_command_takes_suites_workloads_or_costs(arguments, tasks):
    assert attention.tasks_of(attention.parse(["--device", "cpu", *arguments.split()])) == tasks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--peers fa5", "must be of fa2, fa3, fa4, flex, nested, padded"),
        ("--suite pma,cross", "must be of pma, self, dense, got 'cross'"),
        ("--backend cpu --peers cpu", "must not name the backend cpu itself"),
    ],
)
def test_the_command_refuses_unknown_names(arguments, message, capsys):
    with pytest.raises(SystemExit):
        attention.parse(["--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err


# -- the report -------------------------------------------------------------------------------------------------------


def row_of(workload, which, ms, **times):
    versions = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}
    result = {"workload": workload, "pass": which, "backend": "portable", "ms": ms, "sustained_ms": ms}
    return result | {"tflops": 500.0, "floor_share": 0.5, "peers": times, "without": {}} | versions


def test_the_bars_are_judged_by_the_worst_workload():
    rows = [
        row_of("pma128-uniform", "fwd", 1.0, fa2=2.0),
        row_of("self-uniform", "fwd", 1.0, fa2=0.95),
        row_of("pma128-uniform", "bwd", 1.0, fa2=1.4),
        row_of("pma128-tail", "bwd", 1.0, fa2=3.0),
        row_of("self-uniform", "bwd", 1.0, fa2=1.0),
        row_of("dense-4k", "bwd", 1.0, fa2=0.1),
    ]
    forward, pooled, own, memory = report.bars(
        rows, {"memory": {"beyond_inputs": {"portable": 2_000_000_000, "fa2": 3_000_000_000}}}
    )
    assert "met (0.95 on self-uniform, the lowest of 2)" in forward
    assert "missed (1.40 on pma128-uniform, the lowest of 2)" in pooled
    assert "met (1.00 on self-uniform, the lowest of 1)" in own
    assert "met (portable 2.00 GB, fa2 3.00 GB" in memory


def test_the_table_has_a_column_for_each_peer_with_a_time():
    rows = [row_of("pma128-uniform", "fwd", 1.0, fa2=1.5, fa3=0.9), row_of("pma128-uniform", "bwd", 2.0, fa2=6.0)]
    head, first, second = report.table(rows).splitlines()
    assert head.split()[-2:] == ["fa2/ours", "fa3/ours"]
    assert first.split()[-3:] == ["50%", "1.50", "0.90"]
    assert second.split()[-3:] == ["50%", "3.00", "-"]


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="must have the lines <!-- results: begin -->"):
        report.write_between_markers(page, "table")


def test_the_plot_is_drawn_and_linked(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row_of("pma128-uniform", which, 1.0, fa2=1.5) for which in ("fwd", "bwd")]
    page, picture = tmp_path / "page.md", tmp_path / "plot.svg"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    report.render(rows, {}, page, picture)
    assert "<svg" in picture.read_text()
    assert "(plot.svg)" in page.read_text()


def test_the_page_in_the_repository_has_the_markers():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.index(report.BEGIN) < page.index(report.END)
