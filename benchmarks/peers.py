"""The contenders of the attention benchmark: this library, and what else computes attention of packed sequences.

None of the peers has a query that all sequences share: they get an expanded one, and its gradient is summed afterwards,
both as part of the call. What describes the batch and not its values, as masks and padded copies of the inputs do, is
made beforehand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workloads import Inputs

from jaggedtensor import JaggedLayout, JaggedTensor, attend
from jaggedtensor.kernels.dispatch import BACKENDS

Gradients = tuple[Tensor, ...]


def _same(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Bound:
    """An implementation with one set of inputs.

    `forward` gives the output, of which `grad_out` is the gradient, in whatever shape the implementation has;
    `pack_out` and `pack_gradients` bring outputs and gradients of `leaves` to `[tokens, H, D]`.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]  # q, k, v
    grad_out: Tensor
    pack_out: Callable[[Tensor], Tensor] = _same
    pack_gradients: Callable[[Gradients], Gradients] = _same

    def infer(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, out: Tensor, *, retain_graph: bool = True) -> Gradients:
        return torch.autograd.grad(out, self.leaves, self.grad_out, retain_graph=retain_graph)

    def train(self) -> Gradients:
        """Forward and backward, end to end."""
        return self.backward(self.forward(), retain_graph=False)


class Contender:
    """An implementation that can be measured. One object serves one workload."""

    name: str
    forward_only = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, None if it can."""
        return None

    def bind(self, inputs: Inputs) -> Bound:
        raise NotImplementedError

    def _bound(self, inputs: Inputs, forward: Callable[[], Tensor], **packing: Any) -> Bound:
        grad_out = packing.pop("grad_out", inputs.grad_out)
        return Bound(forward, (inputs.q, inputs.k, inputs.v), grad_out, **packing)


class Ours(Contender):
    """`jaggedtensor.attend` with one of its backends."""

    def __init__(self, backend: str) -> None:
        self.name = backend

    def bind(self, inputs: Inputs) -> Bound:
        keys = JaggedTensor(inputs.k, JaggedLayout(inputs.k_offsets))
        values = keys.with_values(inputs.v)
        if not inputs.shared:
            queries = keys.with_values(inputs.q)
            return self._bound(inputs, lambda: attend(queries, keys, values, backend=self.name).values())
        return self._bound(
            inputs,
            lambda: attend(inputs.q, keys, values, backend=self.name),
            grad_out=inputs.grad_out.unflatten(0, (inputs.batch, -1)),
            pack_out=lambda out: out.flatten(0, 1),
        )


class _OnGpu(Contender):
    module: str

    def missing(self, device: torch.device) -> str | None:
        if not _is_installed(self.module):
            return "not installed"
        return None if device.type == "cuda" else "needs a GPU"


class FlashAttention2(_OnGpu):
    """The FlashAttention-2 that torch brings."""

    name = "fa2"
    module = "torch.nn.attention.varlen"

    def bind(self, inputs: Inputs) -> Bound:
        from torch.nn.attention.varlen import varlen_attn

        q_offsets, k_offsets, max_q, max_k = _in_flash_terms(inputs)

        def forward() -> Tensor:
            query = inputs.expanded_query()
            return _first(varlen_attn(query, inputs.k, inputs.v, q_offsets, k_offsets, max_q, max_k))

        return self._bound(inputs, forward)


class FlashAttention3(_OnGpu):
    """The package fa3-fwd, which has no backward."""

    name = "fa3"
    module = "fa3_fwd_interface"
    forward_only = True

    def bind(self, inputs: Inputs) -> Bound:
        from fa3_fwd_interface import flash_attn_varlen_func

        q_offsets, k_offsets, max_q, max_k = _in_flash_terms(inputs)

        def forward() -> Tensor:
            query = inputs.expanded_query()
            return _first(flash_attn_varlen_func(query, inputs.k, inputs.v, q_offsets, k_offsets, max_q, max_k))

        return self._bound(inputs, forward)


class FlashAttention4(_OnGpu):
    """The package flash-attn-4."""

    name = "fa4"
    module = "flash_attn.cute"

    def bind(self, inputs: Inputs) -> Bound:
        from flash_attn.cute import flash_attn_varlen_func

        q_offsets, k_offsets, max_q, max_k = _in_flash_terms(inputs)
        batch = {
            "cu_seqlens_q": q_offsets,
            "cu_seqlens_k": k_offsets,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
        }

        def forward() -> Tensor:
            return _first(flash_attn_varlen_func(inputs.expanded_query(), inputs.k, inputs.v, **batch))

        return self._bound(inputs, forward)


class Flex(Contender):
    """FlexAttention, compiled, over one long sequence with a mask that keeps the documents of a batch apart."""

    name = "flex"

    def __init__(self) -> None:
        self._prepared: tuple[Callable[..., Any], Any] | None = None

    def bind(self, inputs: Inputs) -> Bound:
        from torch._functorch import config
        from torch.nn.attention.flex_attention import flex_attention

        config.donated_buffer = False  # else its backward writes over what a kept graph needs, and torch refuses
        if self._prepared is None:
            torch._dynamo.reset()  # past a few shapes of one function, torch would run it without compiling
            self._prepared = torch.compile(flex_attention, dynamic=False), document_mask(inputs)
        compiled, mask = self._prepared
        k, v = (x.transpose(0, 1)[None] for x in (inputs.k, inputs.v))  # [1, H, tokens, D]

        def forward() -> Tensor:
            q = inputs.expanded_query().transpose(0, 1)[None]
            return compiled(q, k, v, block_mask=mask)[0].transpose(0, 1)

        return self._bound(inputs, forward)


class Nested(Contender):
    """torch's own jagged nested tensors, in scaled_dot_product_attention."""

    name = "nested"

    def bind(self, inputs: Inputs) -> Bound:
        def nested(values: Tensor, offsets: Tensor, shortest: int, longest: int) -> Tensor:
            # With 0 for the shortest, torch would leave its fused kernels, though they are right for empty sequences.
            x = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=max(1, shortest), max_seqlen=longest)
            return x.transpose(1, 2)  # [B, H, j, D]

        shortest, longest = int(inputs.lengths.min()), inputs.max_k

        def forward() -> Tensor:
            k, v = (nested(x, inputs.k_offsets, shortest, longest) for x in (inputs.k, inputs.v))
            if inputs.shared:
                q_len = inputs.q.shape[0]
                q = nested(inputs.expanded_query(), inputs.q_offsets, q_len, q_len)
            else:
                q = nested(inputs.q, inputs.k_offsets, shortest, longest)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

        return self._bound(inputs, forward)


class Padded(Contender):
    """scaled_dot_product_attention of padded inputs with a mask. The inputs come padded, and stay so."""

    name = "padded"

    def bind(self, inputs: Inputs) -> Bound:
        self._check_memory(inputs)
        device = inputs.k.device
        lengths = inputs.lengths.to(device)
        present = torch.arange(inputs.max_k, device=device) < lengths[:, None]  # [B, Lk]

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(*present.shape, *x.shape[1:])
            padded[present] = x.detach()
            return padded

        def unpad(x: Tensor) -> Tensor:
            return x[present]

        k, v = (pad(x).requires_grad_() for x in (inputs.k, inputs.v))
        mask = None
        if not present.all():
            # An empty sequence sees one row of padding. As that is 0, so is what it gives; seeing none it might be NaN.
            seen = present.clone()
            seen[:, 0] |= lengths == 0
            mask = seen[:, None, None, :]

        if inputs.shared:
            q, grad_out = inputs.q, inputs.grad_out.unflatten(0, (inputs.batch, -1))
        else:
            q, grad_out = pad(inputs.q).requires_grad_(), pad(inputs.grad_out)

        def forward() -> Tensor:
            query = q.expand(inputs.batch, *q.shape) if inputs.shared else q
            q_, k_, v_ = (x.transpose(1, 2) for x in (query, k, v))
            return F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask).transpose(1, 2)  # [B, Lq, H, D]

        def pack_gradients(gradients: Gradients) -> Gradients:
            dq, dk, dv = gradients
            return dq if inputs.shared else unpad(dq), unpad(dk), unpad(dv)

        return Bound(
            forward, (q, k, v), grad_out, lambda out: out.flatten(0, 1) if inputs.shared else unpad(out), pack_gradients
        )

    @staticmethod
    def _check_memory(inputs: Inputs) -> None:
        """Refuses what would leave no memory to the others."""
        row = inputs.k[0].nbytes if inputs.k.shape[0] else 0
        needed = 4 * inputs.batch * (inputs.max_k + inputs.max_q) * row  # q, out and k, v with all four gradients
        if inputs.k.is_cuda:
            free, _ = torch.cuda.mem_get_info(inputs.k.device)
            if needed > 0.7 * free:
                raise MemoryError(f"padding takes {needed / 1e9:.0f} GB")


PEERS: dict[str, type[Contender]] = {
    peer.name: peer for peer in (FlashAttention2, FlashAttention3, FlashAttention4, Flex, Nested, Padded)
}


def contender(name: str) -> Contender:
    """A peer, or this library with the backend of that name."""
    return Ours(name) if name in BACKENDS else PEERS[name]()


def document_mask(inputs: Inputs, block: int = 128) -> Any:
    """The BlockMask that lets queries see the keys of their own sequence.

    As create_block_mask makes it, but from offsets alone: that one looks at every pair of a query and a key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device, q_offsets, k_offsets = inputs.k.device, inputs.q_offsets, inputs.k_offsets
    q_tokens, k_tokens = int(q_offsets[-1]), int(k_offsets[-1])
    q_sequence, k_sequence = (
        torch.repeat_interleave(torch.arange(inputs.batch, device=device), offsets.diff())
        for offsets in (q_offsets, k_offsets)
    )

    def same_sequence(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q_sequence[q] == k_sequence[k]

    rows, columns = -(-q_tokens // block), -(-k_tokens // block)
    starts = torch.arange(rows, device=device) * block
    first, last = q_sequence[starts], q_sequence[(starts + block - 1).clamp(max=q_tokens - 1)]
    begin, end = k_offsets[first], k_offsets[last + 1]  # the keys that a block of queries sees, [rows]
    low = begin // block
    high = torch.where(end > begin, -(-end // block), low)
    whole = (first == last) & (starts + block <= q_tokens)  # all of its queries see the same keys
    full_low = -(-begin // block)
    full = torch.where(whole, (end // block - full_low).clamp(min=0), 0)
    before = torch.where(full > 0, full_low - low, high - low)  # blocks that need the mask, left of the full ones

    column = torch.arange(columns, device=device)
    partial = low[:, None] + column + torch.where(column >= before[:, None], full[:, None], 0)
    counts = (high - low - full, full)
    indices = (partial, full_low[:, None] + column)
    kv_num_blocks, full_kv_num_blocks = (x.to(torch.int32)[None, None] for x in counts)
    kv_indices, full_kv_indices = (x.clamp(max=columns - 1).to(torch.int32)[None, None] for x in indices)
    return BlockMask.from_kv_blocks(
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        BLOCK_SIZE=block,
        mask_mod=same_sequence,
        seq_lengths=(q_tokens, k_tokens),
    )


def _in_flash_terms(inputs: Inputs) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of queries and keys, int32, and the longest of each."""
    return inputs.q_offsets.int(), inputs.k_offsets.int(), inputs.max_q, inputs.max_k


def _first(result: Any) -> Tensor:
    """The output, of functions that may give the logarithm of the sum of exponentials too."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is part of
        return False
