"""Whether long sequences are cut between the CTAs of a forward kernel; what that costs, each backend has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout


@dataclass(frozen=True)
class Cuts:
    """When they pay."""

    blocks: int  # of KV of a tile, at least: below, a cut costs more than it saves
    percent: int  # of a CTA's share that whole tiles would keep it busy for, at least
    rounds: bool = False  # also where the last round of tiles, all about as long as each other, is not full

    def pay(self, keys: JaggedLayout, *, workers: int, lines: int, block_n: int) -> bool:
        """Whether the host knows that they do, for so many CTAs and for `lines` tiles of each sequence."""
        if torch.compiler.is_compiling():  # which would compile anew for each batch
            return False
        longest, tokens = keys.longest_on_host, keys.known_num_tokens
        if longest is None or tokens is None or longest < self.blocks * block_n:
            return False
        rounds = 1
        if self.rounds and 4 * longest * keys.batch_size <= 5 * tokens:
            rounds = -(-keys.batch_size * lines // workers)
        return 100 * rounds * longest * workers >= self.percent * tokens * lines
