"""How a layout splits a block over the CTAs of a cluster: bases for each bit of the rank, in shares of a dimension."""


def split_bases(layout, rank: int) -> tuple:
    """The bases that split a layout over CTAs, for the last dimensions of `rank`; () where there is one CTA."""
    bases = getattr(layout, "cga_layout", None) or ()
    return tuple((0,) * (rank - len(basis)) + tuple(basis) for basis in bases)


def split_shape(shape, bases) -> list[int]:
    """One CTA's share of a shape."""
    shares = list(shape)
    for dim in range(len(shape)):
        largest = max((basis[dim] for basis in bases), default=0)
        if largest:
            shares[dim] //= 2 * largest
    return shares


def split_place(shape, bases, rank: int) -> list[int]:
    """Where CTA `rank`'s share begins, in elements of each dimension."""
    share = split_shape(shape, bases)
    place = [0] * len(shape)
    for bit, basis in enumerate(bases):
        if rank >> bit & 1:
            place = [p + b * s for p, b, s in zip(place, basis, share, strict=True)]
    return place


def split_slices(shape, bases, rank: int) -> tuple:
    """CTA `rank`'s share of a block."""
    place, share = split_place(shape, bases, rank), split_shape(shape, bases)
    return tuple(slice(p, p + s) for p, s in zip(place, share, strict=True))
