"""Backward: config (which of three kernels, and blocks for them), device, launch."""
