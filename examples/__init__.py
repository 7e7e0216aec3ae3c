"""Whole applications on Tallybook; you can read each in ten minutes. `make example-NAME` runs one."""
