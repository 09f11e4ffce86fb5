"""The doctor tells kernels that hang, crash, lie or waver from good ones, and dispatch listens to it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from jaggedtensor import doctor
from jaggedtensor.kernels import dispatch, toolchain
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

# What each case's kernel does instead of its work, in the child that runs the case.
FAULTS = """
import os, signal, sys, time
import torch
from jaggedtensor.kernels.cpu import attention

case = sys.argv[sys.argv.index("--child") + 1]
forward, calls = attention.forward, []

def faulty(*args, **options):
    out, lse = forward(*args, **options)
    calls.append(case)
    if case == "one short query for all":
        time.sleep(600)
    if case == "few rows, grouped heads":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "a query for each" or (case == "jagged, in any order" and len(calls) == 3):
        out[(0,) * out.dim()] += 0.5
    if case == "one long query for all" and len(calls) == 3 or case == "jagged, in any order" and len(calls) == 2:
        out[(0,) * out.dim()] = out[(0,) * out.dim()].nextafter(torch.zeros((), dtype=out.dtype))
    return out, lse

attention.forward = faulty
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAGGEDTENSOR_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_PASSED", {})
    return tmp_path


def test_each_fault_is_named_and_a_good_kernel_passes(tmp_path):
    plug = tmp_path / "faults.py"
    plug.write_text(FAULTS)
    cases = ["few rows, grouped heads", "a query for each", "one long query for all", "jagged", "jagged, in any order"]
    verdicts = doctor.examine("cpu", "cpu", cases=cases, limit=300, plug=plug)
    verdicts += doctor.examine("cpu", "cpu", cases=["one short query for all"], limit=8, plug=plug)
    found = {v.case: v for v in verdicts}
    assert {name: v.word for name, v in found.items()} == {
        "one short query for all": "hangs",
        "few rows, grouped heads": "crashes",
        "a query for each": "wrong",
        "one long query for all": "differs",
        "jagged": "right",
        "jagged, in any order": "wrong",  # the third time; other bits the second time were not
    }
    assert "out of AttentionCase" in found["a query for each"].said
    assert "status -11" in found["few rows, grouped heads"].said
    assert [v.is_well for v in found.values()] == [name == "jagged" for name in found]


def test_8_bits_are_held_to_what_rounding_the_weights_may_do(monkeypatch):
    name = "in 8 bits, jagged, causal, grouped heads"
    assert doctor.run_case(name, "cpu", "cpu").word == "not served"  # but dequantised
    monkeypatch.setattr(doctor, "by_name", lambda name: SimpleNamespace(lacks=lambda problem: []))
    assert doctor.run_case(name, "cpu", "cpu").word == "right"
    attend_fp8, calls = doctor.attend_fp8, []

    def lies(out=1.0, lse=0.0, later=0.0):
        def attend(*args, **options):
            calls.append(args)
            good, good_lse = attend_fp8(*args, **options)
            return good.map_values(lambda x: x * (out + later * len(calls))), good_lse + lse

        monkeypatch.setattr(doctor, "attend_fp8", attend)
        return doctor.run_case(name, "cpu", "cpu")

    assert lies(out=1.1).said.endswith("of its norm")
    assert lies(lse=0.1).said == "lse is wrong"
    assert lies(out=1.0 - 0.01 * len(calls), later=0.01).word == "differs"


def test_what_a_backend_does_not_serve_is_no_fault_but_no_pass_either(cache):
    unserved = [doctor.Verdict(name, "not served", "runs on cuda") for name in doctor.CASES]
    assert not doctor.record("blackwell", "cpu", unserved)
    assert doctor.record("blackwell", "cpu", [*unserved[1:], doctor.Verdict("jagged", "right")])
    assert doctor.recorded("blackwell", "cpu") is True
    assert not doctor.record("blackwell", "cpu", [doctor.Verdict("jagged", "right"), doctor.Verdict("a", "hangs")])
    assert doctor.recorded("blackwell", "cpu") is False
    assert doctor.recorded("hopper", "cpu") is None


def test_verdicts_hold_for_one_gpu_driver_and_versions(cache, monkeypatch):
    doctor.record("cpu", "cpu", [doctor.Verdict("jagged", "right")])
    monkeypatch.setattr(doctor, "__version__", "another")
    assert doctor.recorded("cpu", "cpu") is None
    (cache / "doctor.json").write_text("not JSON")
    assert doctor.recorded("cpu", "cpu") is None


@pytest.fixture
def b200(cache, monkeypatch):
    """A machine that seems to have one, whose kernels get the verdicts of a list, and a count of examinations."""
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_capability": (10, 0), "get_device_name": "NVIDIA B200",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    examined = []

    def examine(backend, device):
        examined.append((backend, device))
        return [doctor.Verdict("jagged", examine.word)]

    monkeypatch.setattr(doctor, "examine", examine)
    examine.count = examined
    return examine


PROBLEM = AttentionProblem(
    QueryKind.BROADCAST, 128, 4, 4, 128, 128, torch.bfloat16, Device("cuda", (10, 0), 148, 227 << 10)
)


@pytest.mark.skipif(toolchain.triton_version() < toolchain.GLUON_NEEDS, reason="needs Gluon")
def test_a_kernel_that_passes_is_chosen_and_examined_once(b200, cache):
    b200.word = "right"
    for _ in range(3):
        assert dispatch.choose(PROBLEM).implementation.name == "blackwell"
    doctor._PASSED.clear()  # as in another process
    assert dispatch.choose(PROBLEM).implementation.name == "blackwell"
    assert b200.count == [("blackwell", "cuda:0")]
    (entry,) = json.loads((cache / "doctor.json").read_text()).values()
    assert entry["blackwell"]["passed"]


@pytest.mark.skipif(toolchain.triton_version() < toolchain.GLUON_NEEDS, reason="needs Gluon")
def test_a_kernel_that_does_not_pass_is_passed_over_which_is_said_once(b200):
    b200.word = "hangs"
    with pytest.warns(UserWarning, match="'blackwell' has not passed its examination on this GPU") as said:
        choice = [dispatch.choose(PROBLEM) for _ in range(3)][-1]
    assert len(said) == 1
    assert choice.implementation.name == "portable"
    assert "doctor" in choice.passed_over["blackwell"][0]
    assert dispatch.choose(PROBLEM, "blackwell").implementation.name == "blackwell"  # who asks for it gets it


def test_nothing_is_examined_unasked_where_that_is_turned_off(b200, monkeypatch):
    monkeypatch.setenv("JAGGEDTENSOR_DOCTOR", "0")
    with pytest.warns(UserWarning, match="has not been examined"):
        assert not doctor.has_passed("blackwell", 10)
    assert b200.count == []


def test_without_such_a_gpu_there_is_nothing_to_examine(cache):
    assert not doctor.has_passed("blackwell", 10)


def test_the_command_tells_and_fails_where_a_kernel_does(cache, capsys, monkeypatch):
    verdicts = {"cpu": "right", "hopper": "not served", "blackwell": "not served", "portable": "wrong"}
    monkeypatch.setattr(doctor, "examine", lambda backend, *args, **options: [doctor.Verdict("a", verdicts[backend])])
    assert doctor.main(["--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert "cpu passed" in told
    assert "hopper serves nothing here" in told
    assert "portable FAILED" in told
    verdicts["portable"] = "right"
    assert doctor.main(["--device", "cpu"]) == 0


def test_the_case_whose_peaks_grow_strays_from_its_anchors():
    """By more than weights in fp16 hold, in the rows of some sequence, and another case does not."""
    assert grows("as of much work, peaks that grow") > 15
    assert grows("as of much work, jagged") < 15


def grows(name):
    """log2 of the largest row sum relative to the row's peak in the block of keys that a kernel begins with."""
    query, keys, _ = doctor.CASES[name].inputs()
    largest = 0.0
    for q, k in zip(query.unbind(), keys.unbind(), strict=True):
        if len(q) and len(k):
            score = torch.einsum("ihd,jhd->hij", q.double(), k.double()).detach() * q.shape[-1] ** -0.5
            first = score[:, :, (len(k) - 1) // 128 * 128 :].amax(2, keepdim=True)
            largest = max(largest, float((score - first).logsumexp(2).max()) / math.log(2))
    return largest
