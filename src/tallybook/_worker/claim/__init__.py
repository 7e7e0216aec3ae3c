"""How a worker takes jobs: it claims them, checks which may start, and sleeps while there are none."""
