"""The chaos harness: real processes, real faults, and a judge that believes nobody. See __main__.py."""
