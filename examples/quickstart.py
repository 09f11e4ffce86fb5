"""A thousand histories of very different lengths, and one learned query that reads them all, without padding."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer

from jaggedtensor import JaggedTensor

torch.manual_seed(0)

# Most histories are short, a few are very long, and the first user has none yet.
lengths = torch.randn(1000).mul(1.2).add(3).exp().long().clamp(max=1000)
lengths[0] = 0
history = JaggedTensor.from_list([torch.randint(5000, (int(n),)) for n in lengths])
print(f"1. A batch is packed, one history after the other:\n   {history}\n")


class UserVectors(nn.Module):
    """What one learned query finds in each history. Layers of torch take the jagged batch as it is."""

    def __init__(self, items: int, heads: int, dim: int):
        super().__init__()
        self.items, self.norm = nn.Embedding(items, heads * dim), nn.LayerNorm(heads * dim)
        self.query = nn.Parameter(torch.randn(1, heads, dim))

    def keys(self, history: JaggedTensor) -> JaggedTensor:
        return self.norm(self.items(history)).unflatten(-1, self.query.shape[1:])  # (users, j, heads, dim)

    def forward(self, history: JaggedTensor) -> torch.Tensor:
        return self.keys(history).attend(self.query).flatten(1)  # (users, heads * dim)


model = UserVectors(items=5000, heads=2, dim=32)
users = model(history)
users.square().mean().backward()
print(f"2. One query attends to all {len(history)} histories and gives user vectors of shape {list(users.shape)}.")
print(f"   The largest entry of the user without a history is {users[0].abs().max():.0f}; no NaN appears.")
print(f"   The query's gradient sums over all users: its norm is {model.query.grad.norm():.1e}.\n")

even = (history % 2 == 0).float()  # token by token; mean(1), sum(1), amax(1) go over each history
print(f"3. The part of even items in the first histories: {[round(x, 2) for x in even.mean(1)[:5].tolist()]}.")
print(f"   history[:, -20:], the last 20 of each, holds {history[:, -20:].num_tokens} items.\n")


keys, query = model.keys(history).detach(), model.query.detach()
rectangle, mask = keys.to_padded().transpose(1, 2), keys.mask()[:, None, None]
queries = query.transpose(0, 1).expand(len(keys), -1, -1, -1)
packed = lambda: keys.attend(query)
padded = lambda: F.scaled_dot_product_attention(queries, rectangle, rectangle, mask).transpose(1, 2)
fast, slow = (1000 * Timer("run()", globals={"run": run}).timeit(5).mean for run in (packed, padded))
print(f"4. Padding would make {mask.numel()} tokens of {keys.num_tokens},")
print(f"   {rectangle.nbytes >> 20} MiB of keys where packed ones take {keys.values().nbytes >> 20},")
print(f"   and {slow:.0f} ms of attention on one core where packed takes {fast:.0f}.")
print(f"   Where there is a history, both results agree to {(packed() - padded())[1:].abs().max():.0e}.")
