"""Figures: `make bench BENCH=name`, one JSON line a figure on stdout, a table for people on stderr."""
