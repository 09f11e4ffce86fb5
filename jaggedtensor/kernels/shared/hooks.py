"""Who listens to launches."""

from triton import knobs


def is_watched() -> bool:
    """Whether a profiler wants to be told of launches: then they go the way that tells it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
