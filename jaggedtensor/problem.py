"""One call of attention, seen twice: AttentionProblem, what a choice may look at, and AttentionArgs, what runs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNLIMITED = -1  # a window side without a limit

# Shared memory that one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications per compute capability). Anything else, AMD's 64 KiB of LDS included, gets the smallest.
_SHARED_MEMORY = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10,
    (10, 3): 227 << 10, (12, 0): 99 << 10,
}  # fmt: skip
_LEAST_SHARED_MEMORY = 64 << 10


class QueryKind(enum.Enum):
    """How queries belong to sequences."""

    BROADCAST = "broadcast"  # [Lq, Hq, D]: one query for every sequence
    PER_SEQUENCE = "per sequence"  # [B, Lq, Hq, D]
    JAGGED = "jagged"  # [tokens_q, Hq, D] with its own offsets


@dataclass(frozen=True)
class Device:
    """What of a device matters for kernels."""

    type: str  # "cpu", "cuda"
    arch: tuple[int, int] = (0, 0)  # compute capability; (0, 0) for a CPU and for AMD
    processors: int = 1  # multiprocessors, compute units
    shared_memory: int = _LEAST_SHARED_MEMORY  # bytes that one block may use

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Looked up once for each device."""
        if torch.compiler.is_compiling():
            return cls._look_up(device)
        if device not in _DEVICES:
            _DEVICES[device] = cls._look_up(device)
        return _DEVICES[device]

    @classmethod
    def _look_up(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(device.type)
        properties = torch.cuda.get_device_properties(device)
        arch = (0, 0) if torch.version.hip else (properties.major, properties.minor)
        memory = _SHARED_MEMORY.get(arch, _LEAST_SHARED_MEMORY)
        return cls("cuda", arch, properties.multi_processor_count, memory)


def tf32_allowed() -> bool:
    """Asked through the newer of torch's two interfaces: the older one raises where a user has set the newer."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does, but for its import of dynamo (and with it sympy, numpy and triton).
tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]

_DEVICES: dict[torch.device, Device] = {}
_PROBLEMS: dict[tuple[Any, ...], AttentionProblem] = {}  # by the shapes of a call; a model has a few


@dataclass(frozen=True)
class AttentionProblem:
    """All that the choice and the configuration of a kernel may look at: what stays the same from batch to batch.

    `left` and `right` are the window of the design's contract 3: query i sees key j when
    `i + Lk - Lq - left <= j <= i + Lk - Lq + right`, with -1 for no limit; causal is `right = 0`.
    """

    query: QueryKind
    q_len: int | None  # Lq, None for a jagged query
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: Device
    left: int = UNLIMITED
    right: int = UNLIMITED
    deterministic: bool = False
    tf32: bool = False  # whether torch allows fp32 products in TF32
    masked: bool = False  # whether there is a block mask

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        left: int,
        right: int,
        deterministic: bool,
        masked: bool = False,
    ) -> AttentionProblem:
        """Of one call; the same shapes give the same object, so that a launch does not hash a dozen fields."""
        tf32 = k.dtype == torch.float32 and k.is_cuda and tf32_allowed()
        if torch.compiler.is_compiling():
            return cls._of(q, k, v, q_offsets, left, right, deterministic, tf32, masked)
        queries = q.shape[-3:] if q_offsets is None else q.shape[-2:]
        key = queries, q.dim(), k.shape[1:], v.shape[2], k.dtype, k.device, left, right, deterministic, tf32, masked
        problem = _PROBLEMS.get(key)
        if problem is None:
            problem = _PROBLEMS[key] = cls._of(q, k, v, q_offsets, left, right, deterministic, tf32, masked)
        return problem

    @classmethod
    def _of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        left: int,
        right: int,
        deterministic: bool,
        tf32: bool,
        masked: bool,
    ) -> AttentionProblem:
        # index() makes a size that torch.compile has as a symbol a number, for which it compiles.
        if q_offsets is not None:
            kind = QueryKind.JAGGED
        else:
            kind = QueryKind.PER_SEQUENCE if q.dim() == 4 else QueryKind.BROADCAST
        return cls(
            query=kind,
            q_len=None if q_offsets is not None else index(q.shape[-3]),
            q_heads=index(q.shape[-2]),
            kv_heads=index(k.shape[1]),
            head_dim=index(k.shape[2]),
            value_dim=index(v.shape[2]),
            dtype=k.dtype,
            device=Device.of(k.device),
            left=left,
            right=right,
            deterministic=deterministic,
            tf32=tf32,
            masked=masked,
        )

    def __hash__(self) -> int:
        """Of a few fields that tell most problems apart: equality looks at them all."""
        return hash((self.q_len, self.q_heads, self.head_dim, self.left, self.right))

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int | None:
        """Query rows of a sequence that share a key-value head, None for a jagged query."""
        return None if self.q_len is None else self.q_len * self.group

    @property
    def windowed(self) -> bool:
        """Whether a window hides keys from any query."""
        return self.left != UNLIMITED or self.right != UNLIMITED


class AttentionArgs(NamedTuple):
    """The tensors and numbers of one call, as launchers take them.

    q `[Lq, Hq, D]`, `[B, Lq, Hq, D]` or, with `q_offsets`, `[rows, Hq, D]`; k `[rows, Hkv, D]`; v `[rows, Hkv, Dv]`.
    """

    problem: AttentionProblem
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    scale: float
    slack: bool  # whether q, k or v have, or may have, rows past the last sequence
    complete: bool  # whether every sequence is known to have a key
    schedule: Sequence[Tensor]  # as the implementation's `plan` made it
    block_mask: Tensor | None = None  # bool `[B or 1, q blocks, kv blocks]`, see `jaggedtensor.block_masks`

    @property
    def batch_size(self) -> int:
        """Sequences of the keys."""
        return self.k_offsets.shape[0] - 1

    @property
    def out_shape(self) -> tuple[int, ...]:
        """`[B, Lq, Hq, Dv]` or `[rows, Hq, Dv]`."""
        return out_shape(self.q, self.v, self.q_offsets, self.k_offsets)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """`[B, Hq, Lq]` or `[rows, Hq]`."""
        return lse_shape(self.q, self.q_offsets, self.k_offsets)


class Quantised(NamedTuple):
    """What q, k and v in e4m3 are multiples of: fp32 `[Hq]`, `[Hkv]` and `[Hkv]`, or `[]` for all heads; and what out
    is to be."""

    q: Tensor
    k: Tensor
    v: Tensor
    out_dtype: torch.dtype


def out_shape(q: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> tuple[int, ...]:
    """`[B, Lq, Hq, Dv]` or, for a jagged query, `[rows, Hq, Dv]`."""
    if q_offsets is not None:
        return (*q.shape[:2], v.shape[-1])
    return (k_offsets.shape[0] - 1, *q.shape[-3:-1], v.shape[-1])


def lse_shape(q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> tuple[int, ...]:
    """`[B, Hq, Lq]` or, for a jagged query, `[rows, Hq]`."""
    if q_offsets is not None:
        return tuple(q.shape[:2])
    return (k_offsets.shape[0] - 1, q.shape[-2], q.shape[-3])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
