"""Kernels in Gluon for NVIDIA's SM90 (H100, H200): TMA, warpgroup MMA, roles for groups of warps.

`plan` needs torch alone; `launch` imports Triton.
"""
