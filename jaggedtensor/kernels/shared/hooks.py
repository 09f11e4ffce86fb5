"""Who listens to launches."""

from triton import knobs


def is_watched() -> bool:
    """Whether a profiler wants to be told of launches: then they go the way that tells it."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)
