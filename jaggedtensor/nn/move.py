"""Padded modules of torch to jagged ones and back: parameters have the same names, so state dicts pass as they are."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

from torch import nn

from jaggedtensor.errors import fail
from jaggedtensor.nn.attention import JaggedAttention
from jaggedtensor.nn.transformer import JaggedTransformer, JaggedTransformerLayer


def from_torch(module: nn.Module, *, ignore_attention_dropout: bool = False, **attention: Any) -> Any:
    """The jagged counterpart of an `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` or `nn.TransformerEncoder`.

    >>> padded = torch.nn.TransformerEncoderLayer(32, nhead=4, dropout=0.0, batch_first=True)
    >>> jagged = from_torch(padded)
    >>> x = torch.randn(2, 5, 32)
    >>> torch.allclose(padded(x), jagged(JaggedTensor.from_padded(x)).to_padded(), atol=1e-5)
    True

    Weights are copied; dtype, device and training mode are kept. Results are those of the padded module with a padding
    mask, without rows for padding.

    Args:
        ignore_attention_dropout: leave out the dropout of attention weights, which no kernel does. In evaluation it
            makes no difference; the other dropouts stay.
        attention: `causal` or `window`, which torch passes to forward as masks.

    Raises:
        TypeError: another module.
        NotImplementedError: `add_bias_kv`, `add_zero_attn`, or dropout of attention weights not ignored.
    """
    options = {"ignore_attention_dropout": ignore_attention_dropout, **attention}
    if isinstance(module, nn.TransformerEncoder):
        return JaggedTransformer([from_torch(layer, **options) for layer in module.layers], deepcopy(module.norm))
    if isinstance(module, nn.TransformerEncoderLayer):
        return _like(module, _layer_from_torch(module, **options))
    if isinstance(module, nn.MultiheadAttention):
        _check(module, ignore_attention_dropout)
        weight = module.out_proj.weight
        jagged = JaggedAttention(
            module.embed_dim, module.num_heads, key_dim=module.kdim, value_dim=module.vdim,
            bias=module.in_proj_bias is not None, device=weight.device, dtype=weight.dtype, **attention,
        )  # fmt: skip
        return _like(module, jagged)
    fail(
        "module", "nn.MultiheadAttention, nn.TransformerEncoderLayer or nn.TransformerEncoder", module, error=TypeError
    )


def to_torch(module: nn.Module) -> nn.Module:
    """The padded counterpart, batch first, of what `from_torch` gives; causality and windows become masks of forward.

    Raises:
        TypeError: another module.
        NotImplementedError: what torch's modules don't have: fewer key-value heads, another head dimension, norms of
            heads, rotary positions, a scale, a norm that isn't nn.LayerNorm.
    """
    if isinstance(module, JaggedTransformer):
        layers = [to_torch(layer) for layer in module.layers]
        if not layers:
            fail("module", "of one layer at least", "none")
        first, norm = cast(Any, layers[0]), deepcopy(module.norm)
        encoder = nn.TransformerEncoder(first, len(layers), norm, enable_nested_tensor=False)
        encoder.layers = nn.ModuleList(layers)
        return encoder.train(module.training)
    if isinstance(module, JaggedTransformerLayer):
        return _layer_to_torch(module)
    if isinstance(module, JaggedAttention):
        _check_known(module)
        weight = module.out_proj.weight
        padded = nn.MultiheadAttention(
            module.dim, module.num_heads, kdim=module.key_dim, vdim=module.value_dim, batch_first=True,
            bias=module.in_proj_bias is not None, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        return _like(module, padded)
    fail("module", "a JaggedAttention, JaggedTransformerLayer or JaggedTransformer", module, error=TypeError)


def _layer_from_torch(layer: nn.TransformerEncoderLayer, ignore_attention_dropout: bool, **attention: Any) -> nn.Module:
    _check(layer.self_attn, ignore_attention_dropout)
    weight = layer.linear1.weight
    jagged = JaggedTransformerLayer(
        layer.self_attn.embed_dim, layer.self_attn.num_heads, layer.linear1.out_features, dropout=layer.dropout.p,
        norm_first=layer.norm_first, activation=layer.activation, bias=layer.linear1.bias is not None,
        device=weight.device, dtype=weight.dtype, **attention,
    )  # fmt: skip
    jagged.norm1, jagged.norm2 = deepcopy(layer.norm1), deepcopy(layer.norm2)
    jagged.dropout1, jagged.dropout2 = nn.Dropout(layer.dropout1.p), nn.Dropout(layer.dropout2.p)
    return jagged


def _layer_to_torch(layer: JaggedTransformerLayer) -> nn.Module:
    _check_known(layer.self_attn)
    for norm in (layer.norm1, layer.norm2):
        if not isinstance(norm, nn.LayerNorm):
            fail("the norms", "nn.LayerNorm, as torch's layer has", type(norm).__name__, error=NotImplementedError)
    weight = layer.linear1.weight
    padded = nn.TransformerEncoderLayer(
        layer.self_attn.dim, layer.self_attn.num_heads, layer.linear1.out_features, dropout=layer.dropout.p,
        norm_first=layer.norm_first, activation=layer.activation, bias=layer.linear1.bias is not None, batch_first=True,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    padded.self_attn.dropout = 0.0
    padded.norm1, padded.norm2 = deepcopy(cast(Any, layer.norm1)), deepcopy(cast(Any, layer.norm2))
    return _like(layer, padded)


def _like(source: nn.Module, target: nn.Module) -> nn.Module:
    """The target with the weights and the mode of the source."""
    target.load_state_dict(source.state_dict())
    for name, parameter in source.named_parameters():
        target.get_parameter(name).requires_grad_(parameter.requires_grad)
    return target.train(source.training)


def _check(attention: nn.MultiheadAttention, ignore_attention_dropout: bool) -> None:
    if attention.bias_k is not None or attention.add_zero_attn:
        fail("add_bias_kv and add_zero_attn", "False", "True", error=NotImplementedError)
    if attention.dropout and not ignore_attention_dropout:
        fail(
            "the dropout of attention weights",
            "0: no kernel does it",
            attention.dropout,
            "leave it out with from_torch(module, ignore_attention_dropout=True), which changes nothing in evaluation",
            error=NotImplementedError,
        )


def _check_known(attention: JaggedAttention) -> None:
    own = {
        "kv_heads": attention.kv_heads != attention.num_heads,
        "head_dim": attention.head_dim * attention.num_heads != attention.dim,
        "qk_norm": attention.q_norm is not None,
        "rotary": attention.rotary is not None,
        "scale": attention.scale is not None,
    }
    found = [name for name, is_used in own.items() if is_used]
    if found:
        fail(
            "attention", "what nn.MultiheadAttention can do", f"one with {', '.join(found)}", error=NotImplementedError
        )
