"""At home in frameworks: one package each, which needs that framework and is imported by nobody else here."""

"""Tallybook in frameworks: one module each, which needs that framework installed."""
