"""What scores and values count for: one number for all, or of quantised operands one for each head."""

from jaggedtensor.kernels.blackwell.attention_fwd.lanes import ROWS
from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon


@aggregate
class Units:
    """Raw scores to log2 units, of the rows of a lane: a number for all of them, or [128]."""

    exact: gl.tensor
    coarse: gl.tensor  # a power of two near it

    grown: gl.tensor  # raw scores by which a peak may pass the one that O is relative to
    steep: gl.tensor  # a peak past which a row takes the coarse unit: a product with another would be rounded by more
    # than scores differ by, see shared.softmax; e4m3, which has less room for that factor of P, takes it earlier

    @gluon.jit
    def of_rows(self, base):
        """[128]: the unit of rows with these peaks."""
        return gl.where(gl.abs(base) < self.steep, self.exact, self.coarse)


@gluon.jit
def make_units(exact, coarse, C: gl.constexpr):
    return Units(exact, coarse, C.limit / exact, 2.0**C.steep / exact)


@aggregate
class Scales:
    """What raw scores and quantised values are multiplied by."""

    exact: gl.tensor  # raw scores to log2 units
    coarse: gl.tensor  # the power of two nearest to it
    units: gl.tensor | gl.constexpr  # fp32 [Hq], each head's in place of these two; None unless q and k are quantised
    values: gl.tensor | gl.constexpr  # fp32 [Hkv], None unless v is quantised

    @gluon.jit
    def of_tile(self, tile, layout: gl.constexpr, C: gl.constexpr):
        """Of a tile's rows in a layout, each with the head that is packed there."""
        if self.units is None:
            return make_units(self.exact, self.coarse, C)
        else:
            head = gl.minimum(gl.arange(0, ROWS, layout) % C.group, C.heads - 1)
            exact = gl.load(self.units + tile.head * C.heads + head)
            return make_units(exact, near_power(exact), C)

    @gluon.jit
    def of_values(self, tile):
        """Of a tile's values."""
        if self.values is None:
            return 1.0
        else:
            return gl.load(self.values + tile.head)


@gluon.jit
def near_power(x):
    """A power of two within a factor of 3 / 2 of x > 0."""
    bits = x.to(gl.int32, bitcast=True) + (1 << 22)
    return (bits & (0xFF << 23)).to(gl.float32, bitcast=True)
