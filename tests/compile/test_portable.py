"""The portable kernels compile for GPUs that are not there, and fit into them: some configurations, as launched
`make compile-check` looks at all."""

import re
import sys

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

from jaggedtensor.testing.launches import AMD, GPUS, compile_launch, launches_of  # needs Triton

HOPPER = (9, 0)


def case_of(dim, length=None, **options):
    """A broadcast query of some length, or a jagged one."""
    settings = dict(
        query=QueryKind.JAGGED if length is None else QueryKind.BROADCAST,
        q_length=length or 0,
        q_lengths=(5, 0, 400),
        dim=dim,
        value_dim=dim,
        dtype=torch.bfloat16,
        k_slack=1,
    )
    return AttentionCase((100, 0, 300), **settings | options)


CASES = {
    "broadcast 128": ((9, 0), case_of(128, 128), 96),
    "broadcast 64": ((9, 0), case_of(64, 100), 96),  # none of it in the loop
    "broadcast 128, 64 rows": ((9, 0), case_of(128, 60), 256),  # 104 with Triton 3.9, none of it in the loop
    "broadcast in parts": ((9, 0), case_of(128, 256), 96),
    "jagged causal 64": ((9, 0), case_of(64, causal=True), 64),
    "block mask": ((9, 0), case_of(64, causal=True, mask_share=0.5), 64),
    "block mask, broadcast": ((9, 0), case_of(64, 300, mask_share=0.5), 64),
    "rows of 144 bytes": ((9, 0), case_of(72, 32, heads=4), 256),  # 224 with Triton 3.8
    "fp32": ((9, 0), case_of(32, 16, dtype=torch.float32), 64),
    "A100": ((8, 0), case_of(128), 128),
    "RTX 3090": ((8, 6), case_of(128, 64, dtype=torch.float16), 64),
    "A100, in parts": ((8, 0), case_of(64, 256), 64),
    "B200": ((10, 0), case_of(64, 64), 64),
    "B200, in parts": ((10, 0), case_of(64, 256), 64),
    "MI300X": ("gfx942", case_of(64), 64),
    "MI300X, in parts": ("gfx942", case_of(64, 256), 128),
}


@pytest.mark.parametrize(("arch", "case", "stack"), CASES.values(), ids=CASES.keys())
def test_configurations_compile_within_their_budgets(arch, case, stack):
    """TUN-04, TUN-02: registers hold what is hot, shared memory is what was estimated, products run on tensor cores."""
    device = AMD if arch == "gfx942" else GPUS[arch]
    launches = launches_of(case, device)
    assert launches[-1].name in ("broadcast_kernel", "queries_kernel")
    parts = [launch for launch in launches if launch.name == "broadcast_kernel"]
    for launch in launches if len(parts) < 2 else parts:  # the forward pass of parts is that of others
        made = compile_launch(launch, arch)
        assert made.shared <= device.shared_memory, str(made)
        tiling = launch.tiling
        if tiling is None or not tiling.shared_memory:
            continue
        assert made.shared <= tiling.shared_memory, str(made)
        assert made.stack <= stack, str(made)
        products = {
            (8, 0): r"mma\.sync",
            (8, 6): r"mma\.sync",
            (9, 0): r"wgmma\.mma_async" if tiling.block_m >= 64 else r"mma\.sync",
            (10, 0): r"tcgen05\.mma",
            "gfx942": "v_mfma",
        }
        if case.dtype != torch.float32:
            assert re.search(products[arch], made.assembly), str(made)


def test_what_nobody_needs_is_not_in_the_code():
    """AUT-01: without dK and dV, the backward of a broadcast query has three products in its loop; with all, five."""
    products = []
    for needs in ((True, True, True), (True, False, False)):
        launch = launches_of(case_of(64, 64), GPUS[HOPPER], needs)[-1]
        assert launch.name == "broadcast_kernel"
        products.append(compile_launch(launch, HOPPER).assembly.count("wgmma.mma_async"))
    assert products[1] * 5 == products[0] * 3
