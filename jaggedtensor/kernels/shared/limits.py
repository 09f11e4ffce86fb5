"""What backward kernels that multiply halves in whole blocks of rows ask of operands."""

from __future__ import annotations

from jaggedtensor.problem import AttentionProblem


def operand_lacks(problem: AttentionProblem, *, rows: int, least: int = 8, most: int = 128) -> list[str]:
    """What such a kernel does not do: groups that do not divide a block of `rows`, head dimensions that are not
    multiples of 8 from `least` to `most`, other dtypes."""
    reasons = []
    if problem.dtype.itemsize != 2:
        reasons.append(f"does not compute in {problem.dtype}")
    if rows % problem.group:
        reasons.append(f"takes groups of 1, 2, 4, ... {rows} heads, not {problem.group}")
    some = f"up to {most}" if least == 8 else f"of {least} to {most}"
    for dim in dict.fromkeys((problem.head_dim, problem.value_dim)):
        if not least <= dim <= most or dim % 8:
            reasons.append(f"takes head dimensions {some} that are multiples of 8, not {dim}")
    return reasons
