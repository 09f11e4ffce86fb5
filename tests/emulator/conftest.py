"""What tests of launchers share."""

import pytest
import torch


@pytest.fixture
def emulated(monkeypatch):
    """`reports = emulated(launch)`: the Gluon kernels of a launcher run on the emulator, those that are around them as
    plain torch; the list gets the reports. `together`: all CTAs of a kernel at once."""

    def patched(launch, target="sm100", together=False):
        from jaggedtensor.kernels.emulator import emulate
        from jaggedtensor.kernels.shared import delta, gradients

        reports = []

        def run(kernel, programs, key, descriptors, args, options):
            made = [make() for _, make in descriptors]
            more = dict(target=target, order="late", seed=1, together=programs if together else 1)
            reports.append(emulate(kernel, (programs,), *made, *args, **options, **more))

        def cleared(x, offsets):
            x[offsets[-1] :] = 0
            return x

        def delta_of(out, grad_out, grad_lse):
            return ((out.float() * grad_out.float()).sum(-1).transpose(1, 2) - grad_lse).contiguous()

        monkeypatch.setattr(launch, "launch", run)
        monkeypatch.setattr(gradients, "clear_slack", cleared)
        for module in (launch, delta):
            if hasattr(module, "delta_of"):
                monkeypatch.setattr(module, "delta_of", delta_of)
        return reports

    return patched


@pytest.fixture
def gradients_are_right():
    """`results = gradients_are_right(launch, inputs, case, schedule, reports)`: a backward launcher is given operands
    as users have them (columns apart, rows past the last sequence) and must come to the case's gradients. `inputs` are
    those that the kernel's family makes of the case; the results are what launchers take, without what is needed."""

    def check(launch, inputs, case, schedule, reports):
        from jaggedtensor.problem import AttentionArgs, QueryKind
        from jaggedtensor.testing.guards import poison_free_memory

        k = inputs.k.transpose(1, 2).contiguous().transpose(1, 2)
        apart = torch.full((*inputs.v.shape, 2), float("nan"), dtype=case.dtype)
        apart[..., 0] = inputs.v
        q_offsets = None if inputs.q_layout is None else inputs.q_layout.offsets()
        args = AttentionArgs(
            case.problem, inputs.q, k, apart[..., 0], q_offsets, inputs.k_layout.offsets(), inputs.scale, True, False,
            schedule, block_mask=inputs.mask,
        )  # fmt: skip
        poison_free_memory(1 << 20, "cpu")
        results = args, inputs.grad_out, inputs.grad_lse, inputs.out.to(case.dtype), inputs.lse
        got = launch.backward(*results, (True, True, True))
        for report in reports:
            report.raise_if_bad()
        for name, y, right in zip(("dq", "dk", "dv"), got, inputs.wanted, strict=True):
            assert y.dtype == case.dtype, name
            whole = name == "dq" and case.query is not QueryKind.JAGGED
            y, slack = (y, y[:0]) if whole else (y[: len(right)], y[len(right) :])
            error = (y.double() - right).norm()
            assert error <= 3e-3 * right.norm(), f"{name}: {error}"
            assert (slack == 0).all(), name
        return results

    return check
