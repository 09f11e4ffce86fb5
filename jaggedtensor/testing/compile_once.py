"""Where processes want the same kernel at the same time, one compiles it, and the others find it in Triton's cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

PATIENCE = 25.0  # seconds to wait for another process; then this one compiles, too


def compile_once(folder: Path) -> None:
    """From now on, kernels that this process compiles are not compiled at the same time by others that said the same.

    To be called before the first launch, as kernels keep the compiler that they met there.

    Args:
        folder: of locks, one for each kernel; the same for all processes, which share Triton's cache.
    """
    import triton.compiler

    folder.mkdir(parents=True, exist_ok=True)
    compile = triton.compiler.compile

    @functools.wraps(compile)
    def waiting(src: Any, target: Any = None, options: dict[str, Any] | None = None, **more: Any) -> Any:
        what = f"{src.hash()} {target} {sorted((options or {}).items())}"
        lock = FileLock(folder / hashlib.sha256(what.encode()).hexdigest())
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=PATIENCE)
        try:
            return compile(src, target=target, options=options, **more)
        finally:
            lock.release()

    triton.compiler.compile = waiting
