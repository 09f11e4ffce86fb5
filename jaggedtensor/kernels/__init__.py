"""Kernel families, and the one table that chooses among them."""
