"""The worker: how it takes jobs (claim), runs them (run), ends them (finish), and lives (life). It begins in entry.py."""
