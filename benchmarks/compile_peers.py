"""Compile FlashAttention-4's kernels for a GPU that need not be there, for `compile_check.py` to read.

    PYTHON benchmarks/compile_peers.py FOLDER sm_100 sm_103

PYTHON is an interpreter that has flash-attn-4 and what it imports, which need not have this project (`make peers` makes
one). It prints one JSON object: versions, and for each kernel the GPU, the pass, the head dimension and the file in
FOLDER with the machine code. Nothing runs: tensors are torch's fake ones. About 20 s for each GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

PROCESSORS = "148"
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")
DIMS = (128, 64)


def compile_kernels(folder: Path, arch: str) -> list[dict[str, object]]:
    """Forward and backward for each head dimension, jagged and without a mask, and a forward in e4m3; in this process,
    for one GPU."""
    os.environ |= {
        "FLASH_ATTENTION_ARCH": arch,
        "FLASH_ATTENTION_NUM_SMS": PROCESSORS,
        "CUTE_DSL_ARCH": f"{arch}a",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
    }
    import cutlass.utils
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class HardwareInfo:
        """Asks no driver."""

        def __init__(self, *args: object, **options: object) -> None: ...

        def __getattr__(self, name: str) -> object:
            return lambda *args, **options: int(PROCESSORS)

    cutlass.utils.HardwareInfo = HardwareInfo
    from flash_attn.cute import interface

    kernels: list[dict[str, object]] = []

    def note(which: str, dim: int, dtype: str = "") -> None:
        """The new file of this pass gets a name of its own, as the next one would overwrite it."""
        (made,) = folder.glob(f"*flash_{which}_sm*.cubin")
        kept = made.rename(folder / f"fa4-{arch}-{which}-{dim}{dtype}.cubin")
        name = {"fwd": "forward", "bwd": "backward"}[which]
        kernels.append({"arch": arch, "pass": name, "dim": f"{dim}{dtype and ' '}{dtype}", "file": str(kept)})

    with FakeTensorMode(allow_non_fake_inputs=True):
        for dim in DIMS:
            q, k, v = (torch.empty(2048, 16, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            ends = torch.empty(5, device="cuda", dtype=torch.int32)
            ragged = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=512, max_seqlen_k=512)
            out, lse = interface._flash_attn_fwd(q, k, v, return_lse=True, **ragged)[:2]
            note("fwd", dim)
            interface._flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, **ragged)
            note("bwd", dim)
        q, k, v = (torch.empty(2048, 16, 128, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(3))
        interface._flash_attn_fwd(q, k, v, **ragged)
        note("fwd", 128, "e4m3")
    return kernels


def main() -> None:
    folder, *arches = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    if len(arches) == 1:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernels = compile_kernels(Path(folder), arches[0])
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        print(json.dumps({"versions": versions, "kernels": kernels}))
        return
    # The GPU is read from the environment at import: a process for each.
    found: dict[str, object] = {}
    kernels = []
    for arch in arches:
        command = [sys.executable, __file__, str(Path(folder) / arch), arch]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        kernels += found["kernels"]  # type: ignore[arg-type]
    print(json.dumps(found | {"kernels": kernels}))


if __name__ == "__main__":
    main()
