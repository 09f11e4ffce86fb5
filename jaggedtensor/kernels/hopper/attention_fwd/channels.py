"""What the roles of the forward share: buffers, turns, which tiles are to be done again, and the way through tiles."""

from jaggedtensor.kernels.shared.anchor import flag, is_flagged
from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon, mbarrier
from jaggedtensor.kernels.shared.pipeline import Channel, Counter
from jaggedtensor.kernels.shared.walk import Tile, my_range


@aggregate
class Channels:
    q: Channel  # [M, D] for each consumer
    k: Channel  # [N, D]
    v: Channel  # [N, Dv]
    out: gl.shared_memory_descriptor | gl.constexpr  # [consumers, 64, Dv]: staging for O; None if it is staged in Q
    turns: gl.shared_memory_descriptor | gl.constexpr  # [2, 1] mbarriers of consumers that take turns, else None


@aggregate
class Ring:
    """A consumer's places."""

    k: Counter
    v: Counter
    turn: gl.tensor  # parity of its next turn to issue products
    part: gl.constexpr

    @gluon.jit
    def take_turn(self, channels):
        """Wait until the other consumer has issued its products; the first has the first turn."""
        if channels.turns is not None:
            mbarrier.wait(channels.turns.index(self.part), self.turn ^ (1 - self.part))

    @gluon.jit
    def give_turn(self, channels):
        """To the other. The parity of the turn after."""
        if channels.turns is not None:
            mbarrier.arrive(channels.turns.index(1 - self.part), count=1)
        return self.turn ^ 1


@aggregate
class Flags:
    """Of tiles that are to be done again, one for each warp of each consumer."""

    places: gl.tensor | gl.constexpr  # int32 [tiles, flags]; None if no tile ever is
    some: gl.tensor | gl.constexpr  # whether there are any in this CTA's range, where these alone are walked

    @gluon.jit
    def range(self, schedule, C: gl.constexpr):
        """The places of this CTA in the schedule, none if it has nothing to do again."""
        begin, end = my_range(schedule)
        if C.redoes:
            end = gl.where(self.some, end, begin)
        return begin, end

    @gluon.jit
    def due(self, tile, place, C: gl.constexpr):
        """A tile of the schedule, without keys if it is not to be done again."""
        end = tile.kv_end
        if C.redoes:
            again = is_flagged(self.places, place, C.flags)
            end = gl.where(again, end, tile.kv_begin)
        return Tile(tile.sequence, tile.head, tile.q_block, tile.kv_begin, end)

    @gluon.jit
    def tell(self, place, part, again, C: gl.constexpr):
        """Whether each warp [4] of a consumer wants a tile to be done again."""
        if C.anchored:
            warp = gl.arange(0, 4, again.type.layout)
            flag(self.places, place, part * 4 + warp, C.flags, again)


@gluon.jit
def goes_back(C: gl.constexpr):
    """Whether this CTA walks its tiles from the shortest to the longest.

    Short tiles leave memory idle, long ones would take more than their share. So that not all CTAs have long ones first
    and short ones last, every second one of a team turns its hand round; teams alike, as they read the same sequences.
    """
    if C.turns:
        back = gl.program_id(0) % C.team % 2 == 1
    else:
        back = gl.to_tensor(False)
    return back
