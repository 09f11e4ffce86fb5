"""The example as one of several ranks, without torchrun."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import train_distributed as example

store = dist.FileStore(os.environ["STORE"], int(os.environ["WORLD_SIZE"]))
original = dist.init_process_group
dist.init_process_group = lambda backend, **options: original(
    backend, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), **options
)
example.main()
