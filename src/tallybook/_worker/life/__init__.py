"""From the start of a worker to its stop, and what watches it meanwhile."""
