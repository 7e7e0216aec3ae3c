"""Form submissions that are answered at once, even if their integrations are slow or fail."""
