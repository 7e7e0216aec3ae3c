"""Portfolios that are valued when their market closes, and requests of their owners: one queue, one worker program."""
