"""The worker: how it claims jobs (claim), runs them (run), stores their ends (finish), starts and stops (life)."""
