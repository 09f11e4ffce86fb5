"""Padded modules of torch move over with their weights, and give the same numbers without padding; and back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jaggedtensor.nn import JaggedAttention, JaggedTransformerLayer, from_torch, to_torch
from jaggedtensor.testing import make_jagged

F64 = torch.float64
LENGTHS = (6, 1, 4, 2)


def batch(dim=16):
    jt = make_jagged(LENGTHS, dim)
    return jt, jt.to_padded(), ~jt.mask()


def gradients(module, out):
    module.zero_grad()
    out.square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_same_numbers(padded, jagged, causal=False):
    jt, x, padding = batch()
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=F64) if causal else None
    out = padded(x, mask, src_key_padding_mask=padding.double() * -1e30 if causal else padding)
    wanted, mine = out[~padding], jagged(jt).values()
    torch.testing.assert_close(mine, wanted)
    theirs = gradients(padded, wanted)
    for name, grad in gradients(jagged, mine).items():
        torch.testing.assert_close(grad, theirs[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu], ids=["relu", "gelu", "silu"])
def test_encoder_layer_gives_the_same_numbers(activation, norm_first, causal):
    torch.manual_seed(0)
    padded = nn.TransformerEncoderLayer(
        16, 4, 24, 0.0, activation, layer_norm_eps=1e-3, batch_first=True, norm_first=norm_first, dtype=F64
    )
    assert_same_numbers(padded, from_torch(padded, causal=causal), causal)


def test_encoder_of_several_layers_gives_the_same_numbers_and_returns():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, bias=False, dtype=F64)
    padded = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16, dtype=F64), enable_nested_tensor=False)
    for parameter in padded.parameters():
        nn.init.normal_(parameter, std=0.2)
    jagged = from_torch(padded)
    assert_same_numbers(padded, jagged)
    assert_same_numbers(to_torch(jagged), jagged)


@pytest.mark.parametrize("features", [{}, {"kdim": 8, "vdim": 12}])
@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_gives_the_same_numbers_and_returns(features, bias):
    torch.manual_seed(0)
    padded = nn.MultiheadAttention(16, 4, batch_first=True, bias=bias, dtype=F64, **features)
    jagged = from_torch(padded)
    queries = make_jagged(LENGTHS, 16)
    keys = make_jagged((2, 5, 1, 3), features.get("kdim", 16), seed=1)
    values = keys.with_values(torch.randn(11, features.get("vdim", 16), dtype=F64))
    for module in (padded, to_torch(jagged)):
        q, k, v = (x.to_padded() for x in (queries, keys, values))
        wanted = module(q, k, v, key_padding_mask=~keys.mask())[0][queries.mask()]
        torch.testing.assert_close(jagged(queries, keys, values).values(), wanted)


def test_state_dicts_pass_in_both_directions():
    torch.manual_seed(0)
    padded = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, dtype=F64)
    jagged = JaggedTransformerLayer(16, 4, 24, norm_first=False, activation=F.relu, dtype=F64)
    jagged.load_state_dict(padded.state_dict())
    assert_same_numbers(padded, jagged)
    for parameter in jagged.parameters():
        nn.init.normal_(parameter, std=0.2)
    padded.load_state_dict(jagged.state_dict())
    assert_same_numbers(padded, jagged)


def test_moving_copies_weights_and_keeps_mode_dtype_and_what_is_frozen():
    padded = nn.TransformerEncoderLayer(16, 4, 24, 0.3, dtype=F64).eval()
    padded.linear1.weight.requires_grad_(False)
    jagged = from_torch(padded, ignore_attention_dropout=True)
    assert not jagged.training
    assert jagged.dropout.p == jagged.dropout1.p == jagged.dropout2.p == 0.3
    assert [n for n, p in jagged.named_parameters() if not p.requires_grad] == ["linear1.weight"]
    assert {p.dtype for p in jagged.parameters()} == {F64}
    with torch.no_grad():
        padded.linear1.weight.zero_()
    assert jagged.linear1.weight.any()


REFUSALS = [
    (lambda: from_torch(nn.Linear(2, 2)), TypeError, "module must be nn.MultiheadAttention, .* got Linear"),
    (lambda: to_torch(nn.Linear(2, 2)), TypeError, "module must be a JaggedAttention, .* got Linear"),
    (lambda: from_torch(nn.TransformerEncoderLayer(8, 2)), NotImplementedError,
     r"dropout of attention weights must be 0: no kernel does it, got 0.1; .*ignore_attention_dropout=True"),
    (lambda: from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True)), NotImplementedError, "add_bias_kv"),
    (lambda: to_torch(JaggedAttention(8, 4, kv_heads=2, qk_norm=True)), NotImplementedError,
     "got one with kv_heads, qk_norm"),
    (lambda: to_torch(JaggedTransformerLayer(8, 4, norm=nn.RMSNorm)), NotImplementedError, "got RMSNorm"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[m for _, _, m in REFUSALS])
def test_what_the_other_side_does_not_have_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_padded_batch_is_refused_by_name():
    with pytest.raises(TypeError, match="query must be a JaggedTensor"):
        from_torch(nn.MultiheadAttention(8, 2))(torch.randn(2, 3, 8))
