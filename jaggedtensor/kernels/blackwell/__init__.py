"""Kernels in Gluon for NVIDIA's SM100 and SM103 (B200, B300): TMA, tcgen05, tensor memory, roles for groups of warps.

`plan` needs torch alone; `launch` imports Triton. Nothing here has run on such a GPU: docs/kernels/blackwell-forward.md
and blackwell-backward.md say what was compiled and what was emulated.
"""
