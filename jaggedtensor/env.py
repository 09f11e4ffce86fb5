"""Every environment variable that the library reads, in one place."""

from __future__ import annotations

import os

# TRITON_INTERPRET=1: Triton runs kernels on the CPU, slowly; Triton reads it when it is imported, and so do we.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def forced_backend() -> str | None:
    """JAGGEDTENSOR_BACKEND: the backend for calls that name none, as if each had `backend=` set to it."""
    return os.environ.get("JAGGEDTENSOR_BACKEND") or None
