"""Measure one peer by hand: `python -m bench.peers drain graphile --dsn DSN`."""

from __future__ import annotations

import argparse
import sys

from bench.peers import PEERS, PeerError, available, drain, latency


def main() -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers")
    parser.add_argument("what", choices=["available", "drain", "latency"])
    parser.add_argument("peer", nargs="?", choices=PEERS)
    parser.add_argument("--dsn", help="any database of the server; a fresh one is made beside it")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-analyze", dest="analyze", action="store_false")
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    if given.what == "available":
        for peer, reason in available().items():
            print(f"{peer:14} {reason or 'ready'}")
        return 0
    if not given.peer or not given.dsn:
        parser.error("pass a peer and --dsn")
    try:
        if given.what == "drain":
            rate = drain(given.peer, given.dsn, given.count, given.processes, analyze=given.analyze)
            print(f"{given.peer}: {rate:,.0f} jobs/s")
        else:
            p50, p99 = latency(given.peer, given.dsn, given.rate, given.seconds)
            print(f"{given.peer}: commit to start p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    except PeerError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
