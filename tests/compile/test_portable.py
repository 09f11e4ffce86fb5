"""The portable kernels compile for GPUs that are not there, and fit into them; `make compile-check` looks at all."""

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase

launches = pytest.importorskip("jaggedtensor.testing.launches", reason="needs triton")

BATCH = dict(k_lengths=(100, 0, 300), q_lengths=(5, 0, 400), q_length=128, heads=2, kv_heads=2, dim=128, value_dim=128)
HALF = AttentionCase(**BATCH, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
@pytest.mark.parametrize("arch", [(8, 0), (9, 0), (10, 0)], ids=lambda arch: f"sm_{arch[0]}{arch[1]}")
@pytest.mark.parametrize(
    "case",
    [
        HALF,
        HALF.with_options(query=QueryKind.JAGGED, causal=True),
        HALF.with_options(q_length=256, dim=64, value_dim=64),
    ],
    ids=["broadcast", "jagged causal", "long broadcast"],
)
def test_kernels_fit_into_registers_and_shared_memory(case, arch):
    device = launches.GPUS[arch]
    for launch in launches.launches_of(case, device):
        tiling = launch.tiling
        if tiling is None or not tiling.shared_memory:  # small kernels of fixed blocks
            continue
        made = launches.compile_launch(launch, arch)
        assert made.shared <= device.shared_memory, made.launch.name
        if arch == (9, 0):
            # Where the blocks were measured nothing to speak of spills; masked loops of a window do, a little.
            assert made.stack <= (512 if case.causal else 64), made.launch.name
            if tiling.block_m >= 64:
                assert "wgmma.mma_async" in made.assembly, made.launch.name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
def test_kernels_compile_for_amd():
    for launch in launches.launches_of(HALF.with_options(q_length=16, dim=64, value_dim=64), launches.AMD):
        if launch.tiling is not None:
            assert launches.compile_launch(launch, "gfx942").assembly
