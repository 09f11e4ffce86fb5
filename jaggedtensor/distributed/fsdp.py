"""FSDP2 for modules that take and give JaggedTensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from jaggedtensor.layout import JaggedLayout
from jaggedtensor.tensor import JaggedTensor


class Opened(NamedTuple):
    """A JaggedTensor as FSDP sees it: of tensors it looks for, a NamedTuple is walked, another class is not."""

    values: Tensor
    layout: JaggedLayout


def fully_shard(module: nn.Module, **options: Any) -> Any:
    """`torch.distributed.fsdp.fully_shard` for modules whose inputs or outputs may be JaggedTensors.

    >>> fully_shard(JaggedTransformerLayer(64, 4), mesh=mesh)  # doctest: +SKIP

    FSDP gathers parameters for the backward pass when a gradient reaches an output of the module, and looks for outputs
    in tuples, dicts and dataclasses alone (torch 2.13): behind a JaggedTensor it finds none, and backward fails with
    "setStorage: ... out of bounds". So hooks before and after those of FSDP open each JaggedTensor and close it again,
    on the same layout.

    Args:
        options: of `torch.distributed.fsdp.fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard as torch_fully_shard  # with its DTensors it takes a second to import

    # Hooks run in order of registration, but for those that are put first.
    module.register_forward_pre_hook(lambda module, args, kwargs: (_closed(args), _closed(kwargs)), with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: _opened(output))
    sharded = torch_fully_shard(module, **options)
    module.register_forward_pre_hook(
        lambda module, args, kwargs: (_opened(args), _opened(kwargs)), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(lambda module, args, output: _closed(output))
    return sharded


def _opened(x: Any) -> Any:
    if isinstance(x, JaggedTensor):
        return Opened(x.values(), x.layout)
    return _walked(x, _opened)


def _closed(x: Any) -> Any:
    if isinstance(x, Opened):
        return JaggedTensor._of(*x)
    return _walked(x, _closed)


def _walked(x: Any, function: Any) -> Any:
    if type(x) in (tuple, list):
        return type(x)(function(part) for part in x)
    return {name: function(part) for name, part in x.items()} if type(x) is dict else x
