"""How a worker takes jobs: it claims, asks what may start, and sleeps while there is nothing."""
