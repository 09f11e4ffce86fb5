"""What one of several ranks checks of training: gradients are those of one process, and a resumed run ends the same."""

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jaggedtensor import JaggedTensor
from jaggedtensor.distributed import fully_shard
from jaggedtensor.nn import JaggedTransformerLayer

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import train_distributed as example

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
F64 = torch.float64
# Words of the sequences of each rank; of one word none follows, and nothing is to be said.
UNEVEN = {
    "one rank has most": ((9, 1, 30, 0, 4), (2,)),
    "one rank has only empty and single": ((5, 7), (0, 1, 0)),
    "one rank has no sequence": ((), (3, 12)),
    "nobody has a word": ((0, 1), ()),
}


def batch_of(lengths, seed):
    words = torch.randint(example.WORDS, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return JaggedTensor.from_lengths(words, torch.tensor(lengths, dtype=torch.int64))


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check_gradients_are_those_of_one_process(folder):
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(0)
        alone = example.Model(32, 2, 0.0, dtype=F64)
        spread = example.Model(32, 2, 0.0, dtype=F64)
        spread.load_state_dict(alone.state_dict())
        spread = example.parallel(spread, kind, torch.device("cpu"))
        for label, lengths in UNEVEN.items():
            batches = [batch_of(part, seed) for seed, part in enumerate(lengths)]
            loss, count = example.backward(spread, batches[RANK])
            words = sum(max(n - 1, 0) for part in lengths for n in part)
            wanted = alone(JaggedTensor.cat(batches)) / max(words, 1)
            wanted.backward()
            assert count == words
            assert abs(loss - wanted.item()) < 1e-12
            # The loss of a few words is about 4, and so are the largest gradients: errors are of rounding alone.
            for (name, mine), right in zip(spread.named_parameters(), alone.parameters(), strict=True):
                where = f"{kind}, {label}, {name}: "
                torch.testing.assert_close(whole(mine.grad), right.grad, rtol=1e-12, atol=1e-14, msg=where.__add__)
            spread.zero_grad()
            alone.zero_grad()


def check_sharded_layers_keep_the_layout(folder):
    layers = [fully_shard(JaggedTransformerLayer(16, 2, dtype=F64)) for _ in range(2)]
    x = JaggedTensor.from_lengths(torch.randn(6, 16, dtype=F64, requires_grad=True), torch.tensor([2, 0, 4]))
    y = layers[1](layers[0](x), x)
    assert isinstance(y, JaggedTensor)
    assert y.layout is x.layout
    y.values().square().sum().backward()
    assert x.values().grad.abs().sum() > 0


def check_resumed_training_ends_bit_for_bit_the_same(folder):
    for kind in ("ddp", "fsdp"):
        out = folder / kind
        args = [*sys.argv[2:], "--parallel", kind, "--out", str(out)]
        training = example.Training(example.arguments(args), torch.device("cpu"))
        losses = training.run()
        assert losses[-1] < losses[0]
        assert len(training.sampler) < 5  # more than an epoch
        wanted = [whole(p).clone() for p in training.model.parameters()]
        dist.barrier()
        if RANK == 0:
            (out / "step-000005").rename(folder / f"{kind}-last")
            (out / "step-000004").rename(folder / f"{kind}-fourth")
        dist.barrier()
        again = example.Training(example.arguments(args), torch.device("cpu"))
        again.load()
        assert again.step == 2
        assert again.run() == losses[2:]
        for mine, right in zip(again.model.parameters(), wanted, strict=True):
            assert torch.equal(whole(mine), right)
    other = example.Training(example.arguments([*args, "--seed", "1"]), torch.device("cpu"))
    with pytest.raises(ValueError, match="seed of the state must be 1, got 0"):
        other.load()


def main():
    store = dist.FileStore(os.environ["STORE"], WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=30))
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            print(name, flush=True)
            check(Path(sys.argv[1]))
            gc.collect()  # DDP must not outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
