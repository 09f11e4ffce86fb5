"""Backward in a pass for each gradient, for wide heads: config (blocks and budgets for a problem), device, launch."""
