"""Tallybook in frameworks: one module each, which needs that framework installed."""
