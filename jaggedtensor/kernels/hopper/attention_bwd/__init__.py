"""Backward of queries that each sequence has its own of: config (blocks, budgets), device (roles, entry), launch."""
