"""A thousand histories of very different lengths, and one learned query that reads them all, without padding."""

import time

import torch
import torch.nn.functional as F
from torch import nn

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
first = "zeros" if not users[0].any() else "NOT zeros"
print(f"2. One query attends to all {len(history)} histories, and gives user vectors of shape {list(users.shape)};")
print(
    f"   the user without a history gets {first}. Backward fills query.grad, of norm {model.query.grad.norm():.1e}.\n"
)

even = (history % 2 == 0).float()  # arithmetic goes token by token, and sum(1), mean(1), amax(1) over each history
print(f"3. The part of even items in the first histories: {[round(x, 2) for x in even.mean(1)[:5].tolist()]};")
print(f"   history[:, -20:], the last 20 items of each, has {history[:, -20:].num_tokens} items.\n")


def milliseconds(attention) -> float:
    ticks = [time.perf_counter() for _ in range(6) if attention() is not None]
    return 1000 * torch.tensor(ticks).double().diff().min().item()


keys, query = model.keys(history).detach(), model.query.detach()
rectangle, mask = keys.to_padded().transpose(1, 2), keys.mask()[:, None, None]
queries = query.transpose(0, 1).expand(len(keys), -1, -1, -1)
packed = lambda: keys.attend(query)
padded = lambda: F.scaled_dot_product_attention(queries, rectangle, rectangle, mask).transpose(1, 2)
print(f"4. Padding would make {mask.numel()} tokens of {keys.num_tokens}, and {rectangle.nbytes >> 20} MiB of keys")
print(
    f"   of {keys.values().nbytes >> 20}. Attention takes {milliseconds(packed):.1f} ms; padded, {milliseconds(padded):.1f} ms."
)
print(f"   Where there is a history, the results differ by {(packed() - padded())[1:].abs().max():.0e}.")
