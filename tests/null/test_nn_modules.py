"""Modules of jaggedtensor.nn say of each sequence what plain torch says of it alone, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.nn import JaggedAttention, JaggedTransformer, JaggedTransformerLayer, PMAPooling, Rotary
from jaggedtensor.testing import LENGTHS, make_jagged
from jaggedtensor.testing.cases import random_tensor

F64 = torch.float64
MIXED = (3, 0, 1, 5, 2)


def turned(x, places, base=10_000.0, interleaved=False):
    """Rotary positions of one sequence `[L, H, D]`, as complex numbers."""
    half = x.shape[-1] // 2
    angles = places.to(F64)[:, None] * base ** (-torch.arange(half, dtype=F64) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def attention_of_one(module, q, k, v, mask=None):
    """A JaggedAttention on one sequence, `[L, features]` each, with torch's own attention."""
    sizes = module.rows
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(sizes)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.split(sizes)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, module.head_dim))
        for x, w, b in zip((q, k, v), weights, biases, strict=True)
    )
    if module.q_norm is not None:
        q, k = module.q_norm(q), module.k_norm(k)
    if module.rotary is not None:
        options = {"base": module.rotary.base, "interleaved": module.rotary.interleaved}
        q = turned(q, torch.arange(len(q)) + len(k) - len(q), **options)
        k = turned(k, torch.arange(len(k)), **options)
    group = module.num_heads // module.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if module.causal:
        seen &= key <= place
    if module.window is not None:
        left, right = module.window
        seen &= (key >= place - left) & (key <= place + right)
    if len(k) == 0:
        out = q.new_zeros(len(q), module.num_heads, module.head_dim)
    else:
        out = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, scale=module.scale
        )[0].transpose(0, 1)
        out = torch.where(seen.any(1)[:, None, None], out, 0)
    return module.out_proj(out.flatten(-2))


def assert_same_gradients(module, mine, wanted, *inputs):
    torch.testing.assert_close(mine, wanted)
    leaves = [*module.parameters(), *inputs]
    weight = random_tensor(*mine.shape, dtype=mine.dtype, seed=9)
    grads = []
    for result in (mine, wanted):
        for leaf in leaves:
            leaf.grad = None
        (result * weight).sum().backward()
        grads.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


SELF = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "grouped heads": {"kv_heads": 2, "head_dim": 6},
    "one kv head, no bias": {"kv_heads": 1, "bias": False},
    "norm of heads": {"qk_norm": True, "scale": 0.3},
    "rotary": {"rotary": True, "causal": True},
    "everything": {
        "kv_heads": 2, "qk_norm": True, "window": (3, 0), "rotary": Rotary(4, base=50.0, interleaved=True),
    },
}  # fmt: skip


@pytest.mark.parametrize("lengths", [MIXED, (0, 0), ()], ids=str)
@pytest.mark.parametrize("options", SELF.values(), ids=SELF)
def test_self_attention_is_attention_of_each_sequence(options, lengths):
    torch.manual_seed(0)
    module = JaggedAttention(16, 4, dtype=F64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    jt = make_jagged(lengths, 16, slack=2, requires_grad=True)
    out = module(jt)
    assert out.layout is jt.layout
    assert not out.values()[sum(lengths) :].any()
    parts = [attention_of_one(module, x, x, x) for x in jt.to_list()]
    wanted = torch.cat(parts) if parts else jt.values()[:0] * 1
    assert_same_gradients(module, out.values()[: sum(lengths)], wanted, jt.values())


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("features", [(16, 16), (10, 12)])
def test_cross_attention_takes_keys_and_values_of_other_lengths_and_features(features, rotary):
    torch.manual_seed(0)
    module = JaggedAttention(
        16, 4, key_dim=features[0], value_dim=features[1], causal=True, rotary=rotary, dtype=F64
    )  # causal and rotary places count from the end of both
    query = make_jagged((2, 3, 0, 1, 2), 16, requires_grad=True, seed=1)
    key = make_jagged((3, 1, 2, 0, 6), features[0], requires_grad=True, seed=2)
    value = key.with_values(random_tensor(12, features[1], seed=3).requires_grad_())
    out = module(query, key, value)
    assert out.layout is query.layout
    parts = zip(query.to_list(), key.to_list(), value.to_list(), strict=True)
    wanted = torch.cat([attention_of_one(module, *part) for part in parts])
    assert_same_gradients(module, out.values(), wanted, query.values(), key.values(), value.values())


def test_dense_queries_ask_every_sequence_or_each_its_own():
    torch.manual_seed(0)
    module = JaggedAttention(16, 4, kv_heads=2, dtype=F64)
    keys = make_jagged(MIXED, 16, requires_grad=True)
    for query in (random_tensor(2, 16, seed=4), random_tensor(5, 2, 16, seed=4)):
        query.requires_grad_()
        each = query if query.dim() == 3 else query.expand(5, -1, -1)
        pairs = zip(each, keys.to_list(), strict=True)
        wanted = torch.stack([attention_of_one(module, q, k, k) for q, k in pairs])
        assert_same_gradients(module, module(query, keys), wanted, query, keys.values())


def test_attention_begins_as_torch_begins():
    def weights(make):
        torch.manual_seed(5)
        return make().state_dict()

    for mine, theirs in (
        (JaggedAttention(16, 4), nn.MultiheadAttention(16, 4)),
        (JaggedAttention(16, 4, key_dim=8, bias=False), nn.MultiheadAttention(16, 4, kdim=8, vdim=8, bias=False)),
        (JaggedTransformerLayer(16, 4, 24), nn.TransformerEncoderLayer(16, 4, 24)),
    ):
        assert {n: x.shape for n, x in mine.state_dict().items()} == {
            n: x.shape for n, x in theirs.state_dict().items()
        }
    mine = weights(lambda: JaggedTransformerLayer(16, 4, 24))
    for name, theirs in weights(lambda: nn.TransformerEncoderLayer(16, 4, 24)).items():
        assert torch.equal(mine[name], theirs), name


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_places_count_from_the_start_of_each_sequence(interleaved):
    rotary = Rotary(6, base=100.0, interleaved=interleaved)
    for name, lengths in LENGTHS.items():
        jt = make_jagged(lengths, 2, 6, slack=1, requires_grad=True)
        out = rotary(jt)
        assert not out.values()[sum(lengths) :].any(), name
        for mine, x in zip(out.to_list(), jt.to_list(), strict=True):
            torch.testing.assert_close(mine, turned(x, torch.arange(len(x)), 100.0, interleaved))


def test_rotary_scores_depend_on_distances_alone_far_out_too():
    rotary, length = Rotary(8), 50_000
    q, k = (random_tensor(1, 8, dtype=torch.float32, seed=s).expand(length, 1, 8) for s in (0, 1))
    layout = JaggedLayout.from_lengths(torch.tensor([length]))
    q, k = (rotary(JaggedTensor(x, layout)).values()[:, 0] for x in (q, k))
    near, far = q[7] @ k[2], q[length - 1] @ k[length - 6]
    torch.testing.assert_close(near, far, rtol=0, atol=2e-6)
    assert (q[7] @ k[3] - near).abs() > 1e-3


def test_layers_share_what_rotary_works_out():
    layers = [JaggedAttention(16, 4, rotary=True) for _ in range(2)]
    jt = make_jagged(MIXED, 16, dtype=torch.float32)
    for layer in layers:
        jt = layer(jt)
    assert sum(isinstance(key, tuple) and key[0] == "rotary" for key in jt.layout._derived) == 1


def pooling_of_one(module, x):
    query = module.norm_query(module.query)
    keys = module.norm_keys(x)
    h = attention_of_one(module.attention, query, keys, keys)
    h = h + module.query if module.residual else h
    if module.norm is None:
        return h
    return h + module.linear2(module.activation(module.linear1(module.norm(h))))


@pytest.mark.parametrize(
    "options", [{}, {"num_queries": 3, "kv_heads": 2, "qk_norm": True}, {"hidden": 0, "norm": nn.RMSNorm}], ids=str
)
def test_pooling_is_learned_queries_that_ask_each_sequence(options):
    torch.manual_seed(0)
    module = PMAPooling(16, 4, dtype=F64, **options)
    jt = make_jagged(MIXED, 16, slack=2, requires_grad=True)
    out = module(jt)
    assert out.shape == (5, module.query.shape[0], 16)
    wanted = torch.stack([pooling_of_one(module, x) for x in jt.to_list()])
    assert_same_gradients(module, out, wanted, jt.values())
    assert module(make_jagged((), 16)).shape == (0, module.query.shape[0], 16)


def test_pooling_without_residual_gives_nothing_for_an_empty_sequence():
    module = PMAPooling(16, 4, hidden=0, residual=False, bias=False, dtype=F64)
    out = module(make_jagged((2, 0, 1), 16))
    assert not out[1].any()
    assert out[0].any()


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_is_attention_and_net_with_residuals(norm_first):
    torch.manual_seed(0)
    layer = JaggedTransformerLayer(
        16, 4, 24, norm=nn.RMSNorm, norm_first=norm_first, activation=F.silu, dtype=F64, causal=True, rotary=True
    )

    def one(x):
        attend = lambda y: attention_of_one(layer.self_attn, y, y, y)
        net = lambda y: layer.linear2(F.silu(layer.linear1(y)))
        if norm_first:
            x = x + attend(layer.norm1(x))
            return x + net(layer.norm2(x))
        x = layer.norm1(x + attend(x))
        return layer.norm2(x + net(x))

    jt = make_jagged(MIXED, 16, slack=1, requires_grad=True)
    wanted = torch.cat([one(x) for x in jt.to_list()])
    assert_same_gradients(layer, layer(jt).values()[:-1], wanted, jt.values())


def test_layer_attends_to_other_keys_and_layers_of_a_stack_share_the_layout():
    layer = JaggedTransformerLayer(16, 4, dtype=F64)
    x, memory = make_jagged((2, 0, 3), 16), make_jagged((1, 4, 0), 16)
    out = layer(x, memory)
    assert out.layout is x.layout
    assert not torch.equal(out.values(), layer(x).values())
    stack = JaggedTransformer([layer, layer], nn.LayerNorm(16, dtype=F64))
    assert stack(x).layout is x.layout
    torch.testing.assert_close(stack(x).values(), stack.norm(layer(layer(x))).values())


def test_block_mask_reaches_every_layer():
    torch.manual_seed(0)
    stack = JaggedTransformer([JaggedTransformerLayer(16, 4, dtype=F64) for _ in range(2)])
    jt = make_jagged((200, 0, 3), 16)
    alone = torch.eye(2, dtype=torch.bool)[None]  # blocks of 128 see themselves: as if they were sequences
    cut = JaggedTensor.from_lengths(jt.values(), torch.tensor([128, 72, 0, 3]))
    torch.testing.assert_close(stack(jt, block_mask=alone).values(), stack(cut).values())
    assert not torch.allclose(stack(jt).values(), stack(cut).values())


def test_torchs_norms_serve_as_they_are():
    jt = make_jagged(MIXED, 16, slack=1)
    for norm in (nn.LayerNorm(16, dtype=F64), nn.RMSNorm(16, dtype=F64)):
        torch.testing.assert_close(norm(jt).values()[:-1], norm(jt.values()[:-1]))


def test_dropout_is_of_training_only():
    torch.manual_seed(0)
    jt = make_jagged((40, 0, 7), 16, dtype=torch.float32)
    for module in (JaggedTransformerLayer(16, 4, dropout=0.5), PMAPooling(16, 4, dropout=0.5)):
        result = lambda module=module: torch.cat(list(module(jt)))
        assert not torch.equal(result(), result())
        module.eval()
        assert torch.equal(result(), result())


class Model(nn.Module):
    """Everything of this package, one after the other."""

    def __init__(self, **factory):
        super().__init__()
        self.layers = nn.ModuleList(
            JaggedTransformerLayer(16, 4, kv_heads=2, causal=True, rotary=True, qk_norm=True, **factory)
            for _ in range(2)
        )
        self.pool = PMAPooling(16, 4, num_queries=2, **factory)

    def forward(self, jt):
        for layer in self.layers:
            jt = layer(jt)
        return self.pool(jt).flatten(1)


def test_autocast_runs_in_half_precision_and_keeps_gradients_in_full():
    torch.manual_seed(0)
    model = Model()
    jt = make_jagged((40, 0, 1, 7), 16, dtype=torch.float32)
    exact = model(jt)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(jt)
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(out, exact)
    out.float().square().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules_stay_in_it(dtype):
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    out = model(make_jagged((5, 0, 1), 16, dtype=dtype))
    assert out.dtype == dtype
    assert out.isfinite().all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_have_the_same_gradients(use_reentrant):
    torch.manual_seed(0)
    model = Model(dtype=F64)
    jt = make_jagged(MIXED, 16, slack=1, requires_grad=True)

    def checkpointed(layer, jt):
        if use_reentrant:  # torch's older way sees tensors alone among the arguments
            return jt.with_values(
                checkpoint(lambda v: layer(jt.with_values(v)).values(), jt.values(), use_reentrant=True)
            )
        return checkpoint(layer, jt, use_reentrant=False)

    x = jt
    for layer in model.layers:
        x = checkpointed(layer, x)
    assert_same_gradients(model, model.pool(x).flatten(1), model(jt), jt.values())


def test_modules_are_copied_and_saved(tmp_path):
    import copy

    torch.manual_seed(0)
    model, jt = Model(), make_jagged(MIXED, 16, dtype=torch.float32)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = Model()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for twin in (copy.deepcopy(model), other):
        assert torch.equal(twin(jt), model(jt))


REFUSALS = [
    (lambda: JaggedAttention(10, 4), ValueError, r"dim must be a multiple of num_heads \(4\), got 10; or name"),
    (lambda: JaggedAttention(12, 4, kv_heads=3), ValueError, r"kv_heads must be a divisor of num_heads \(4\), got 3"),
    (lambda: JaggedAttention(12, 0), ValueError, "dim and num_heads must be at least 1, got 12 and 0"),
    (lambda: JaggedAttention(12, 4, rotary=True), ValueError, "head_dim must be even .* got 3"),
    (lambda: JaggedAttention(16, 4)(torch.randn(2, 16)), TypeError, "query must be a JaggedTensor for self-attention"),
    (lambda: JaggedAttention(16, 4, rotary=True)(torch.randn(2, 16), make_jagged((1,), 16)), ValueError,
     "query must be a JaggedTensor where positions are rotary, .* a learned query has no place"),
    (lambda: PMAPooling(16, 4, num_queries=0), ValueError, "num_queries must be at least 1, got 0"),
    (lambda: PMAPooling(16, 4, causal=True), ValueError, "causal must be left out: a learned query has no place"),
    (lambda: Rotary(8)(make_jagged((1,), 2, 6)), ValueError, "x must be a JaggedTensor whose last dimension is 8, got"),
    (lambda: Rotary(8, base=-1), ValueError, "base must be positive"),
    (lambda: JaggedTransformer([])(torch.randn(2, 3)), TypeError, "use JaggedTensor.from_padded"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=[m for _, _, m in REFUSALS])
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_extremes_of_one_token_and_large_activations_stay_finite():
    torch.manual_seed(0)
    model = Model()
    jt = make_jagged((1, 0, 300), 16, dtype=torch.float32)
    out = model(jt * 1e4)
    assert out.isfinite().all()
