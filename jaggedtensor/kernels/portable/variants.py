"""Launching a compiled variant of a kernel without binding its arguments anew, which costs as much as all the rest."""

from __future__ import annotations

from typing import Any

import torch

from jaggedtensor import env

_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, programs: int, key: tuple[Any, ...] | None, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """`kernel[(programs,)](*args, **options)`.

    `key` says all that Triton specialises on (types, divisible and unit strides, alignment of pointers, constants); the
    variant compiled for it is kept and launched directly. None: Triton looks for itself.
    """
    if key is None or env.INTERPRETING:
        kernel[(programs,)](*args, **options)
        return
    key = (kernel, torch.cuda.current_device(), *key)
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(programs,)](*args, **options)
    else:
        compiled[(programs, 1, 1)](*args)
