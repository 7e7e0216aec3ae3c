"""Form submissions that are answered at once, whatever their integrations do."""
