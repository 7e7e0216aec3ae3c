"""One of the demo's worker processes, like `tallybook worker -A tallybook.extra.demo.app:app --queues webhooks=50`.

The worker also stops when its standard input closes, for example because the demo itself was killed.
"""

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
    """Run until SIGTERM. The only argument is the worker's name."""
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    # By default a worker looks for lost jobs every 5 s, which is too long for a demo.
    asyncio.run(app.run_worker(queues={"webhooks": SLOTS}, name=sys.argv[1], rescue_look=timedelta(seconds=1)))


if __name__ == "__main__":
    main()
