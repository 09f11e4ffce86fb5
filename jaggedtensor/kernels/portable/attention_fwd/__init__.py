"""Forward: config (blocks for a problem), device (the kernel), launch."""
