"""The queues that Tallybook is compared with, each configured as its own documentation advises. See README.md here."""

from bench.peers.env import available
from bench.peers.run import PEERS, PeerError, drain, latency

__all__ = ["PEERS", "PeerError", "available", "drain", "latency"]
