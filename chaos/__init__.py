"""The chaos harness: real processes, real faults, and a judge that trusts no process. See __main__.py."""
