"""How a job runs: on the loop, on a thread, in its own process, or inside a transaction."""
