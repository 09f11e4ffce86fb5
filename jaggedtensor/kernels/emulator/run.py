"""`emulate`: one launch of a kernel on a CPU."""

import gc
import inspect
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jaggedtensor.kernels.emulator.checks import join
from jaggedtensor.kernels.emulator.errors import EmulationError, UnknownBuiltin
from jaggedtensor.kernels.emulator.language import arithmetic, blackwell, control, hopper, shared  # noqa: F401  they register
from jaggedtensor.kernels.emulator.language.hopper import TensorMap
from jaggedtensor.kernels.emulator.language.values import FROM_TORCH, Pointer, Scalar, literal_type, wrap
from jaggedtensor.kernels.emulator.memory import GlobalBuffer, GlobalDescriptor, Memory
from jaggedtensor.kernels.emulator.report import Report
from jaggedtensor.kernels.emulator.roles import ORDERS, Cluster, Cta, Role, Stop, current
from jaggedtensor.kernels.emulator.translate import Translator, plain

TARGETS = ("sm90", "sm100")
HERE = str(Path(__file__).parent)
REFUSALS = (TypeError, ValueError, AssertionError, AttributeError)


class Launch:
    """What all clusters of a launch share: grid, order, arguments, and which programs have not started."""

    def __init__(self, grid, target: str, order: str, seed: int, max_steps: int, num_warps: int, num_ctas: int):
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        self.grid = grid + (1,) * (3 - len(grid))
        self.target, self.order, self.max_steps = target, order, max_steps
        self.num_warps, self.num_ctas = num_warps, num_ctas
        self.random = random.Random(seed)
        x, y, z = self.grid
        self.waiting = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        if order != "round_robin":
            self.random.shuffle(self.waiting)
        self.body: Callable[[], Any] = lambda: None
        self.exhausted = False
        self.maxnreg: int | None = None
        self.compiler_fences = False
        self.started = 0  # programs so far
        self.synchronised = False

    def cancel(self) -> tuple | None:
        """A program that has not started, taken over by the asking cluster; None if all have (or as good as)."""
        if self.exhausted or not self.waiting or (self.order != "round_robin" and self.random.random() < 0.3):
            self.exhausted = True
            return None
        return self.waiting.pop(0)

    def kernel_body(self) -> Callable[[], Any]:
        return _guarded(self.body)

    def worker_body(self, function, args) -> Callable[[], Any]:
        return _guarded(lambda: function(*args))


def _guarded(work: Callable[[], Any]) -> Callable[[], Any]:
    """A role's life: what it raises is the cluster's to judge."""

    def run_worker():
        role = current()
        try:
            work()
        except Stop:
            raise
        except (UnknownBuiltin, EmulationError) as error:
            role.cluster.failure = error
        except Exception as error:
            every = traceback.extract_tb(error.__traceback__)
            frames = [f for f in every if not f.filename.startswith(HERE)]
            # What an emulated function refuses by these is what the compiler would refuse.
            kernel = isinstance(error, REFUSALS) or not every[-1].filename.startswith(HERE)
            finding = role.cluster.find(
                "kernel raised" if kernel else "emulator failed",
                f"{type(error).__name__}: {error}",
                role,
                chain=(),
                advice="the kernel's own Python" if kernel else f"{every[-1].filename}:{every[-1].lineno}",
            )
            finding.where = [f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(frames)]
            finding.error = error
            role.cluster.failure = Stop()
        finally:
            role.done = True

    return run_worker


def emulate(
    kernel,
    grid,
    *args,
    num_warps: int,
    num_ctas: int = 1,
    target: str = "sm90",
    order: str = "round_robin",
    seed: int = 0,
    max_steps: int = 5_000_000,
    events: bool = True,
    maxnreg: int | None = None,
    enable_fp_fusion: bool = True,
    compiler_fences: bool = False,
    together: int = 1,
    **kwargs,
) -> Report:
    """Runs a `@gluon.jit` kernel with CPU tensors and host-side tensor descriptors; results are written into them.

    `grid` counts clusters, as Gluon's does. `order` is one of ORDERS, `seed` draws from it. Whatever is wrong with the
    kernel is in the report: `emulate(...).raise_if_bad()`. A name that is not emulated raises `UnknownBuiltin`.
    `maxnreg` counts for the roles' registers, as at a launch; `enable_fp_fusion` is taken and ignored. Where one role
    stores and an engine reads for the same role, the compiler adds the fence (Triton 3.8 and 3.9; not between roles):
    `compiler_fences=True` lets that pass, by default the kernel must have its own. `together` clusters run at the same
    time, which kernels need in which they wait for one another; by default one runs after the other.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    launch = Launch(grid, target, order, seed, max_steps, num_warps, num_ctas)
    launch.maxnreg = maxnreg
    launch.compiler_fences = compiler_fences
    report = Report(getattr(kernel, "__name__", str(kernel)), target, order, seed, keep_events=events)
    translator = Translator()
    function = translator(kernel)
    signature = inspect.signature(kernel.fn)
    options = {"num_warps": num_warps, "num_ctas": num_ctas, "maxnreg": maxnreg}
    kwargs |= {name: value for name, value in options.items() if name in signature.parameters}  # as a launch does
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    constants = {p.name for p in kernel.params if p.is_constexpr}
    buffers: dict[tuple, GlobalBuffer] = {}
    values = {
        name: translator(plain(value)) if name in constants else _argument(name, value, translator, buffers)
        for name, value in bound.arguments.items()
    }
    launch.body = lambda: function(**values)
    memories = [[(Memory("shared", rank), Memory("tensor", rank)) for rank in range(num_ctas)] for _ in range(together)]
    collecting = gc.isenabled()
    gc.disable()  # it would look through all of torch and triton again and again
    try:
        while launch.waiting and not report.findings:
            _run_programs(launch, report, memories)
            for memory in (m for of_one in memories for pair in of_one for m in pair):
                memory.renew()
    finally:
        if collecting:
            gc.enable()
    return report


def _argument(name: str, value, translator: Translator, buffers: dict):
    """A launch argument as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return Pointer(_buffer(name, value, buffers), 0, FROM_TORCH[value.dtype])
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        base = value.base
        layout = getattr(value, "layout", None)
        return TensorMap(
            GlobalDescriptor(
                _buffer(f"{name}.base", base, buffers),
                [int(n) for n in value.shape],
                [int(n) for n in value.strides],
                [int(n) for n in value.block_shape],
                layout,
                FROM_TORCH[base.dtype],
                value.padding,
            )
        )
    if isinstance(value, bool | int | float):
        dtype = literal_type(value)
        return Scalar(wrap(value, dtype), dtype)
    if isinstance(value, tuple):
        items = [_argument(f"{name}[{i}]", v, translator, buffers) for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return translator(plain(value))


def _buffer(name: str, tensor: torch.Tensor, buffers: dict) -> GlobalBuffer:
    key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if key not in buffers:
        buffers[key] = GlobalBuffer(tensor, name)
    return buffers[key]


def _run_programs(launch: Launch, report: Report, memories) -> None:
    """Clusters, as many as there are memories for, from start to end: a few steps of one, a few of another."""
    clusters = [_start_program(launch, report, launch.waiting.pop(0), m) for m in memories[: len(launch.waiting)]]
    running = [(cluster, cluster.run()) for cluster in clusters]
    while running and not report.findings:
        chosen = running[0] if len(running) == 1 else launch.random.choice(running)
        cluster, steps = chosen
        going = True
        while going and (len(running) == 1 or launch.random.random() < 0.95):
            going = next(steps, running) is None
        if not going:
            running.remove(chosen)
            _end_program(cluster, report)
    for _, steps in running:  # somebody else's finding
        steps.close()


def _start_program(launch: Launch, report: Report, program: tuple, memories) -> Cluster:
    launch.started += 1
    ctas = [Cta(rank, *memory) for rank, memory in enumerate(memories)]
    cluster = Cluster(launch, program, ctas, report)
    for cta in ctas:
        Role(cluster, cta, report.kernel, launch.num_warps, launch.kernel_body())
    return cluster


def _end_program(cluster: Cluster, report: Report) -> None:
    if cluster.failure is not None and not isinstance(cluster.failure, Stop):
        raise cluster.failure
    report.programs += 1
    report.roles += [role.stats for role in cluster.roles]
    for cta in cluster.ctas:
        report.shared_peak = max(report.shared_peak, cta.shared.peak)
        report.tensor_peak = max(report.tensor_peak, cta.tensor.peak_columns)
    if not report.findings:
        _check_end(cluster)


def _check_end(cluster: Cluster) -> None:
    """When a CTA ends, no engine may still be at its memory. CTAs of a cluster end together: the compiler puts a
    cluster barrier before the end."""
    end: list = []
    for role in cluster.roles:
        join(end, role.clock)
    for role in cluster.roles:
        for operation in role.unseen:
            if operation.kind == "commit" or operation.seen_by(end):
                continue
            cluster.find(
                "outstanding",
                f"the CTA ends while {operation.label} ({operation.event.name}) may still be at its memory: nobody has "
                "waited for it",
                operation,
                advice="store_wait(0), a wait for the last full or commit barrier, or as many steps in every role",
            )
