"""Backward that keeps a block of keys on one CTA: config (blocks and budgets for a problem), device, launch."""
