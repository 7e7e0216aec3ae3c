"""The start, the stop and the monitoring of a worker."""
