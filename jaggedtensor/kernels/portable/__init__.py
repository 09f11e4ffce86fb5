"""Kernels in plain Triton, for any GPU and for its interpreter on a CPU: the fallback of every faster family.

`plan` needs torch alone; `launch` imports Triton.
"""
