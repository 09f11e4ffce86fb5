"""One batch on several ranks: `keys.attend(query, group=mesh)`, `batch.shard(mesh)`, `.gather()`; and `fully_shard`.

Parts of a batch follow one rule. What is the same on every rank before stays the same after: a query, a result, and
what is computed from it, the loss included. So a rank's gradient of something replicated is the whole gradient, summed
over the ranks once where it must be, and the gradient of a part is that of the part. A process group, or a
one-dimensional `DeviceMesh`, says which ranks.

Before data moves, the ranks compare what they are about to do (shapes, dtypes, whether gradients are wanted, a failure
of one of them), so that a mistake on one rank is an error on all and not a wait without end. On GPUs the comparison is
an assert on the device, as nothing here waits for one; under `torch.compile` and in CUDA graphs there is none.
"""

from jaggedtensor.distributed.attention import attend_over as attend_over
from jaggedtensor.distributed.fsdp import fully_shard as fully_shard
from jaggedtensor.distributed.shards import Sharding as Sharding
from jaggedtensor.distributed.shards import gather as gather
from jaggedtensor.distributed.shards import shard as shard
