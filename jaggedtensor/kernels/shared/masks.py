"""Which keys a query sees, on the device: contract 3 of the design, the same rule in every kernel and both passes.

`shift` is Lk - Lq, `window` is (left, right); C.left and C.right say at compile time which sides have a limit.
"""

import triton
import triton.language as tl


@triton.jit
def visible(i, j, shift, window, C: tl.constexpr):
    """Bool, broadcast of query places `i` and key places `j`."""
    seen = (j >= 0) & (i >= 0)
    if C.left:
        seen = seen & (j >= i + shift - window[0])
    if C.right:
        seen = seen & (j <= i + shift + window[1])
    return seen


@triton.jit
def blocks_seen_by_all(first, last, k_count, shift, window, begin, end, C: tl.constexpr):
    """Within kv blocks begin..end-1, the range of those of which queries first..last see every key."""
    low, high = 0, k_count
    if C.left:
        low = tl.maximum(0, last + shift - window[0])
    if C.right:
        high = tl.maximum(tl.minimum(k_count, first + shift + window[1] + 1), 0)
    full_begin = tl.minimum(tl.maximum((low + C.block_n - 1) // C.block_n, begin), end)
    full_end = tl.maximum(tl.minimum(high // C.block_n, end), full_begin)
    return full_begin, full_end


@triton.jit
def blocks_that_see_all(first, last, q_count, shift, window, begin, end, C: tl.constexpr):
    """Within blocks begin..end-1 of query rows, the range of those that see every key of first..last."""
    low, high = 0, q_count
    if C.right:
        low = tl.maximum(0, last - shift - window[1])
    if C.left:
        high = tl.maximum(tl.minimum(q_count, first - shift + window[0] + 1), 0)
    full_begin = tl.minimum(tl.maximum((low * C.group + C.block_m - 1) // C.block_m, begin), end)
    full_end = tl.maximum(tl.minimum(high * C.group // C.block_m, end), full_begin)
    return full_begin, full_end
