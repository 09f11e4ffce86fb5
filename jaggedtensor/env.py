"""Every environment variable that the library reads, in one place, read when it is used."""

from __future__ import annotations

import os


def forced_backend() -> str | None:
    """JAGGEDTENSOR_BACKEND: the backend for calls that name none, as if each had `backend=` set to it."""
    return os.environ.get("JAGGEDTENSOR_BACKEND") or None
