"""At home in frameworks: one package each, which needs that framework and is imported by nobody else here."""
