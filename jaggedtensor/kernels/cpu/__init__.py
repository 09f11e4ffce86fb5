"""Attention on the CPU: sequences grouped by length, a few large matrix products for each group."""

from jaggedtensor.kernels.cpu.attention import backward as backward, forward as forward
