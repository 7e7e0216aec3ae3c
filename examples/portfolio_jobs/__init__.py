"""Portfolios that are valued when their market closes, and what their owners ask for: one queue, one worker program."""
