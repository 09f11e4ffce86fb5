"""What Gluon kernels take from Triton, and the names that differ between the versions they run on, 3.8 and 3.9.

Every Gluon family imports from here; older versions of Triton don't get this far (`needs_triton` in `dispatch`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout as TensorMemoryLayout
from triton.experimental.gluon.language.nvidia.blackwell import add2 as add2
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory as allocate_tensor_memory
from triton.experimental.gluon.language.nvidia.blackwell import async_store as async_store
from triton.experimental.gluon.language.nvidia.blackwell import clc as clc
from triton.experimental.gluon.language.nvidia.blackwell import fma2 as fma2
from triton.experimental.gluon.language.nvidia.blackwell import mul2 as mul2
from triton.experimental.gluon.language.nvidia.blackwell import sub2 as sub2
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit as tcgen05_commit
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_mma as tcgen05_mma
from triton.experimental.gluon.language.nvidia.blackwell import tensor_memory_descriptor as tensor_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

from jaggedtensor.errors import fail

if TYPE_CHECKING:
    from dataclasses import dataclass as aggregate
else:
    aggregate = gluon.aggregate

REINTERPRETS: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9 on
OLDEST_ASSEMBLER = (12, 9)


def _policy(priority: str) -> Any:
    """How L2 is to keep what a TMA copy touches; None before 3.9, which cannot say."""
    if not hasattr(ampere, "CachePolicy"):
        return None
    return ampere.CachePolicy(l2=ampere.FractionalEvictionPolicy(priority, 1.0))


EVICT_FIRST: gl.constexpr = gl.constexpr(_policy("evict_first"))
EVICT_LAST: gl.constexpr = gl.constexpr(_policy("evict_last"))


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared or tensor memory with another dtype, shape and layout."""
    if REINTERPRETS:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@contextmanager
def assembling(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Around a compilation with the options of a launch: those of them that Triton knows.

    `newest_assembler` is ours: Triton 3.8 then assembles for Hopper by the ptxas that it brings for Blackwell (13.3 and
    not 12.9), as later versions do for all. Whether the driver takes that, `toolchain.newest_assembler_lacks` says.

    Raises:
        RuntimeError: Triton 3.8 has no ptxas of its own, and the one that is configured is too old.
    """
    known = dict(options)
    newest = known.pop("newest_assembler", False)
    if REINTERPRETS.value:
        yield known
    else:
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas = _assembler(newest)
            yield known


def _assembler(newest: bool) -> str:
    """Where a ptxas is that assembles for Hopper: one of Triton's own, whatever TRITON_PTXAS_PATH says. torch.compile
    points that at the ptxas of torch's CUDA, where torch brings it, and what 12.8 makes of the forward is wrong."""
    tools = vars(type(knobs.nvidia))
    for name in ("ptxas_blackwell", "ptxas") if newest else ("ptxas",):
        own = knobs.NvidiaTool.from_path(tools[name].default_path)
        if own is not None:
            return str(own.path)
    found = knobs.nvidia.ptxas
    if tuple(map(int, found.version.split("."))) < OLDEST_ASSEMBLER:
        fail(
            "ptxas",
            "version {}.{} or newer".format(*OLDEST_ASSEMBLER),
            f"{found.version} at {found.path}",
            "point TRITON_PTXAS_PATH at a newer one, or install triton >= 3.9",
            error=RuntimeError,
        )
    return str(found.path)
