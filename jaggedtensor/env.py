"""Every environment variable that the library reads, in one place."""

from __future__ import annotations

import os
from pathlib import Path

# TRITON_INTERPRET=1: Triton runs kernels on the CPU, slowly; Triton reads it when it is imported, and so do we.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def forced_backend() -> str | None:
    """JAGGEDTENSOR_BACKEND: the backend for calls that name none, as if each had `backend=` set to it."""
    return os.environ.get("JAGGEDTENSOR_BACKEND") or None


DOCTOR = "JAGGEDTENSOR_DOCTOR"  # 0: kernels that have not been examined on this GPU are not examined unasked


def doctor_may_run() -> bool:
    """Whether the first attention that would choose an unexamined kernel may examine it."""
    return os.environ.get(DOCTOR) != "0"


def cache_directory() -> Path:
    """Where verdicts on kernels are kept: JAGGEDTENSOR_CACHE, else a folder of the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("JAGGEDTENSOR_CACHE") or home / "jaggedtensor")
