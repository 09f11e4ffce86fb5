"""What makes a JaggedTensor at home in torch: pytrees, safe loading, collation in a DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from jaggedtensor.layout import JaggedLayout
from jaggedtensor.tensor import JaggedTensor, _rebuild

# -- pytree: the leaves are values and offsets -------------------------------------------------------------------------


def _flatten(jt: JaggedTensor) -> tuple[list[Any], None]:
    offsets = (
        jt._layout._offsets if isinstance(jt._layout, JaggedLayout) else jt._layout
    )  # whatever a tree_map put there
    return [jt._values, offsets], None


def _flatten_with_keys(jt: JaggedTensor) -> tuple[list[tuple[Any, Any]], None]:
    (values, offsets), context = _flatten(jt)
    return [(pytree.GetAttrKey("values"), values), (pytree.GetAttrKey("offsets"), offsets)], context


def _unflatten(leaves: Any, context: None) -> JaggedTensor:
    values, offsets = leaves
    # A tree_map may put anything into the leaves: no checks, and no reading of a GPU.
    layout = JaggedLayout(offsets, validate=False) if isinstance(offsets, Tensor) else offsets
    return JaggedTensor._of(values, layout)


pytree.register_pytree_node(
    JaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="jaggedtensor.JaggedTensor",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda context: None,
    from_dumpable_context=lambda dumped: None,
)

torch.serialization.add_safe_globals([_rebuild, JaggedTensor, JaggedLayout])


# -- collation ---------------------------------------------------------------------------------------------------------


def collate(batch: Sequence[Any]) -> Any:
    """For `DataLoader(collate_fn=jaggedtensor.collate)`: tensors of rank 1 or more become a JaggedTensor, of whatever
    lengths; scalars are stacked, and dicts, tuples and lists of them are walked as torch's `default_collate` does.

    >>> batch = collate([{"history": torch.arange(3), "label": 1}, {"history": torch.arange(1), "label": 0}])
    >>> batch["history"].lengths(), batch["label"]
    (tensor([3, 1]), tensor([1, 0]))
    """
    return torch_collate(batch, collate_fn_map={**default_collate_fn_map, Tensor: _collate_ragged})


def _collate_ragged(batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
    if batch[0].dim() == 0:
        return torch.stack(list(batch))
    return JaggedTensor.from_list(batch)


def _collate_jagged(batch: Sequence[JaggedTensor], *, collate_fn_map: Any = None) -> JaggedTensor:
    return JaggedTensor.cat(batch)


_collate_equal = default_collate_fn_map[Tensor]


def _collate_tensors(batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
    """torch's own where tensors have equal shapes; where it would raise for unequal lengths, a JaggedTensor."""
    first = batch[0]
    ragged = first.dim() > 0 and any(x.shape[0] != first.shape[0] for x in batch[1:] if x.dim())
    if ragged and all(x.shape[1:] == first.shape[1:] for x in batch):
        return JaggedTensor.from_list(batch)
    return _collate_equal(batch, collate_fn_map=collate_fn_map)


# torch's documented extension point for default_collate: only cases that raised before change.
default_collate_fn_map[Tensor] = _collate_tensors
default_collate_fn_map[JaggedTensor] = _collate_jagged
