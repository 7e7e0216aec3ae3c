"""Benchmarks: `make bench BENCH=name` prints one JSON line per figure on stdout and a table for people on stderr."""
