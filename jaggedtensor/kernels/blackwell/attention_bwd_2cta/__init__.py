"""Backward of queries that each sequence has its own of, by pairs of CTAs: config, device (roles, entry), launch."""
