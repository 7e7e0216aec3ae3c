"""The app of fleet_app in a worker whose claims keep their slots while a server is silent, for a control."""

from support.fleet_app import app
from tallybook._worker.claim import claimer, shares

__all__ = ["app"]

shares.PATIENCE = claimer.PATIENCE = 1000.0
