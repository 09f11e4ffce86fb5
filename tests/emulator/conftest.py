"""What tests of launchers share."""

import pytest


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
