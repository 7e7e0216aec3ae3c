"""One of the demo's worker processes: `tallybook worker -A tallybook.extra.demo.app:app --queues webhooks=50`, on a leash.

The leash is its standard input: should the demo itself be killed, that ends, and the worker stops.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from datetime import timedelta

from tallybook.extra.demo.app import app

SLOTS = 50


def _stop_when_alone() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run until SIGTERM; the name is the one argument."""
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    # By default a worker looks for the dead every 5 s; a demo has no time for that.
    asyncio.run(app.run_worker(queues={"webhooks": SLOTS}, name=sys.argv[1], rescue_look=timedelta(seconds=1)))


if __name__ == "__main__":
    main()
