"""Where results go: O by TMA or by pointers, lse by pointers. Row r of a tile is query r // group of head r % group."""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon, tma


@aggregate
class Results:
    """Where O and lse go."""

    desc: tma.tensor_descriptor | gl.constexpr  # of O, ragged; None for kernels that store by pointers alone
    out: gl.tensor  # the same by pointer, [rows, Hq, Dv] without gaps
    lse: gl.tensor
    batch: gl.tensor  # strides of lse
    row: gl.tensor
    head: gl.tensor


@gluon.jit
def store_by_pointers(results, out, tile, span, first, C: gl.constexpr, column: gl.constexpr = 0):
    """Columns of O from `column` on, packed rows from `first` on, where these are not a block that TMA can store."""
    row = first + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    at = column + gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    i, g = row // C.group, row % C.group
    place = ((span.q_start + i).to(gl.int64) * C.q_heads + tile.head * C.heads + g) * C.value_dim
    mask = ((i < span.q_count) & (g < C.heads))[:, None] & (at < C.value_dim)[None, :]
    gl.store(results.out + place[:, None] + at[None, :], out.to(results.out.dtype.element_ty), mask=mask)


@gluon.jit
def store_statistics(results, natural, tile, span, first, C: gl.constexpr):
    """lse [M] of the packed rows from `first` on."""
    row = first + gl.arange(0, natural.shape[0], natural.type.layout)
    i, g = row // C.group, row % C.group
    if C.jagged:
        base = results.lse + span.q_start.to(gl.int64) * results.row
    else:
        base = results.lse + tile.sequence.to(gl.int64) * results.batch
    places = base + i * results.row + (tile.head * C.heads + g) * results.head
    gl.store(places, natural, mask=(i < span.q_count) & (g < C.heads))
