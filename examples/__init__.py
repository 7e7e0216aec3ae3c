"""Whole applications on Tallybook, small enough to be read in ten minutes each. `make example-NAME` runs one."""
