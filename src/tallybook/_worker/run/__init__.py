"""How a job runs: on the loop, on a thread, in a process of its own, or inside a transaction."""
