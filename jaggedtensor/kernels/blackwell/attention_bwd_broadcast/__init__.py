"""Backward of a broadcast query: config (blocks and budgets for a problem), device (timeline, roles, entry), launch."""
