"""A thousand histories of very different lengths, and one learned query that reads them all, without padding."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from jaggedtensor import JaggedTensor

torch.manual_seed(0)

# Histories have a long tail: most are short, a few are very long, and one user has only just arrived.
lengths = torch.randn(1000).mul(1.2).add(3).exp().long().clamp(max=1000)
lengths[0] = 0
history = JaggedTensor.from_list([torch.randint(5000, (int(n),)) for n in lengths])
print(f"1. The batch, packed one history after the other:\n   {history}\n")


class UserVector(nn.Module):
    """What a learned query finds in each history: attention pooling. Layers of torch take the batch as it is."""

    def __init__(self, items: int, heads: int, dim: int):
        super().__init__()
        self.items, self.norm = nn.Embedding(items, heads * dim), nn.LayerNorm(heads * dim)
        self.query = nn.Parameter(torch.randn(1, heads, dim))

    def keys(self, history: JaggedTensor) -> JaggedTensor:
        return self.norm(self.items(history)).unflatten(-1, self.query.shape[1:])  # (users, j, heads, dim)

    def forward(self, history: JaggedTensor) -> torch.Tensor:
        return self.keys(history).attend(self.query).flatten(1)  # (users, heads * dim)


model = UserVector(items=5000, heads=2, dim=32)
users = model(history)
users.square().mean().backward()
print(f"2. One query, {len(history)} histories: user vectors of shape {list(users.shape)}.")
print(f"   The new user's vector is {'all zeros' if not users[0].any() else 'not zero'}, never NaN.")
print(f"   The query's gradient sums over all users: shape {list(model.query.grad.shape)}, finite: ", end="")
print(f"{bool(model.query.grad.isfinite().all())}.\n")

known = history % 10 == 0  # jagged again: arithmetic goes token by token
print(f"3. Each history on its own: known.float().mean(1) has shape {list(known.float().mean(1).shape)},")
print(f"   history[:, -20:] keeps the last 20 items of each, {history[:, -20:].num_tokens} of {history.num_tokens}.\n")

# What padding would have cost: the same keys as a rectangle, and a mask to ignore most of it.
keys = model.keys(history).detach()
padded, mask, query = keys.to_padded().transpose(1, 2), keys.mask()[:, None, None], model.query.detach()
start = time.perf_counter()
packed_result = keys.attend(query).flatten(1)
middle = time.perf_counter()
padded_result = F.scaled_dot_product_attention(
    query.transpose(0, 1).expand(len(keys), -1, -1, -1), padded, padded, mask
)
end = time.perf_counter()
gap = (packed_result - padded_result.transpose(1, 2).flatten(1))[1:].abs().max()
print(
    f"4. Padded to the longest, {padded.shape[2]}: {padded.shape[0] * padded.shape[2]} tokens, not {keys.num_tokens};"
)
print(f"   the keys {padded.nbytes / 2**20:.1f} MiB, not {keys.values().nbytes / 2**20:.1f} MiB;")
print(
    f"   attention {1000 * (end - middle):.1f} ms, not {1000 * (middle - start):.1f} ms. Results differ by {gap:.0e}."
)
