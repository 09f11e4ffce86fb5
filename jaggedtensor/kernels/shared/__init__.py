"""Device functions that kernel families share."""
