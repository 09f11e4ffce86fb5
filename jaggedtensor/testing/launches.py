"""What the portable kernels launch: recorded, counted, and compiled for a GPU that need not be there.

>>> with recorded_launches() as launches:  # doctest: +SKIP
...     keys.attend(query, backend="portable")
>>> [launch.name for launch in launches]  # doctest: +SKIP
['fill_kernel', 'forward_kernel']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.kernels.portable.attention_bwd import launch as backward
from jaggedtensor.kernels.portable.attention_fwd import launch as forward
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.kernels.portable.variants import Place, itself
from jaggedtensor.ops.attention import _window
from jaggedtensor.problem import AttentionArgs, AttentionProblem, Device
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.attention import AttentionCase
from jaggedtensor.testing.machine_code import resources

# By compute capability: A100, RTX 3090, H200, B200, B300; and AMD's MI300X.
GPUS = {
    (8, 0): Device("cuda", (8, 0), 108, 163 << 10),
    (8, 6): Device("cuda", (8, 6), 84, 99 << 10),
    (9, 0): Device("cuda", (9, 0), 132, 227 << 10),
    (10, 0): Device("cuda", (10, 0), 148, 227 << 10),
    (10, 3): Device("cuda", (10, 3), 148, 227 << 10),
}
AMD = Device("cuda", (0, 0), 304, 64 << 10)


@dataclass(frozen=True)
class Launch:
    kernel: Any  # as Triton's decorator made it
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.kernel.__name__

    @property
    def tiling(self) -> Tiling | None:
        """Sizes of its blocks."""
        return next((x for x in self.args if isinstance(x, Tiling)), None)


class _Recorder:
    """Stands in for a kernel in the module that launches it."""

    def __init__(self, kernel: Any, launches: list[Launch], run: bool) -> None:
        self.kernel, self.launches, self.run = kernel, launches, run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.launches.append(Launch(self.kernel, grid, args, options))
            return self.kernel[grid](*args, **options) if self.run else None

        return launch


@contextmanager
def recorded_launches(run: bool = True) -> Iterator[list[Launch]]:
    """A list that gets every launch of a portable kernel; with `run=False` nothing is launched."""
    launches: list[Launch] = []
    kernels = [
        (module, name, kernel)
        for module in (forward, backward)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    through = [(module, module.launch) for module in (forward, backward) if hasattr(module, "launch")]
    for module, name, kernel in kernels:
        setattr(module, name, _Recorder(kernel, launches, run))
    for module, _ in through:
        module.launch = _launch  # type: ignore[attr-defined]
    try:
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
        for module, launch in through:
            module.launch = launch  # type: ignore[attr-defined]


def _launch(kernel: Any, programs: int, key: Any, arguments: Callable[[Place], Any], options: dict[str, Any]) -> None:
    """As `portable.variants.launch`, which keeps what it compiled and would launch it past the recorder."""
    kernel[(programs,)](*arguments(itself), **options)


def arguments_of(
    case: AttentionCase, device: Device, backend: str = "portable", deterministic: bool = False
) -> tuple[AttentionArgs, AttentionArgs]:
    """What the launchers of a forward and of a backward pass are given, as if a case's tensors were on a device."""
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    k, v = keys.values().detach(), values.values().detach()
    q_layout = query.layout if isinstance(query, JaggedTensor) else None
    q_offsets = None if q_layout is None else q_layout.offsets()
    left, right = _window(case.causal, case.window)
    mask = case.block_mask()
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic, mask is not None)
    problem = replace(problem, device=device)
    schedules = by_name(backend).schedules(problem, keys.layout, q_layout, k.shape[0], q.shape[0], True, mask)
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    slack = case.k_slack > 0 or case.q_slack > 0
    operands = (problem, q, k, v, q_offsets, keys.offsets(), scale, slack, keys.layout.is_complete)
    return AttentionArgs(*operands, schedules[0], mask), AttentionArgs(*operands, schedules[1], mask)


def launches_of(
    case: AttentionCase, device: Device, needs: tuple[bool, bool, bool] = (True, True, True)
) -> list[Launch]:
    """What a forward and a backward pass of a case would launch on a device; nothing is computed."""
    forward_args, backward_args = arguments_of(case, device)
    with recorded_launches(run=False) as launches:
        out, lse = forward.forward(forward_args)
        backward.backward(backward_args, torch.zeros_like(out), torch.zeros_like(lse), out, lse, needs)
    return launches


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch."""

    launch: Launch
    shared: int  # bytes of a block
    registers: int  # of a thread
    stack: int  # bytes of local memory of a thread: what did not fit into registers
    assembly: str  # PTX, AMDGCN

    def __str__(self) -> str:
        t = self.launch.tiling
        blocks = "" if t is None else f"{t.block_m} x {t.block_n}, {t.num_warps} warps, {t.num_stages} stages: "
        return f"{self.launch.name} {blocks}{self.registers} registers, {self.stack} stack, {self.shared} shared"


def compile_launch(launch: Launch, arch: tuple[int, int] | str) -> Compiled:
    """Compile a recorded launch for a compute capability, or for an AMD target such as "gfx942", without a GPU."""
    if isinstance(arch, str):
        target = GPUTarget("hip", arch, 64)
    else:
        target = GPUTarget("cuda", 10 * arch[0] + arch[1], 32)
    with compiling_for(target):
        made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    if isinstance(arch, str):
        text = made.asm["amdgcn"]
        usage = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        return Compiled(launch, made.metadata.shared, usage["vgpr_count"], usage["private_segment_fixed_size"], text)
    usage = resources(made.asm["cubin"])
    return Compiled(launch, made.metadata.shared, usage["REG"], usage["STACK"], made.asm["ptx"])


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """A driver that knows its target and nothing else; compiled kernels are kept by the device's number."""
    number = f"{target.backend} {target.arch}"
    driver = SimpleNamespace(
        get_current_device=lambda: number, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        yield
    finally:
        config._active = before
