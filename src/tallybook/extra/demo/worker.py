"""One of the demo's worker processes, like `tallybook worker -A tallybook.extra.demo.app:app --queues webhooks=50`.

`Worker` is the demo's handle on the process, in which this module is the program.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import IO

from tallybook.errors import TallybookError
from tallybook.extra.demo.app import app

_SLOTS = 50
_SECONDS_TO_STOP = 8.0


class Worker(subprocess.Popen[bytes]):
    """A worker in its own process and session, so that only the demo receives Ctrl-C.

    It stops when its standard input closes, also if the demo is killed with SIGKILL. Its output goes to an unnamed
    file.
    """

    stdin: IO[bytes]

    def __init__(self, name: str, dsn: str, url: str) -> None:
        self.name = name
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed at its end
        # -P: a file like http.py in the current directory must not be imported.
        command, pipe = [sys.executable, "-P", "-m", __name__, name], subprocess.PIPE
        env = {**os.environ, "TALLYBOOK_DSN": dsn, "WEBHOOK_URL": url}
        super().__init__(command, stdin=pipe, stdout=self.log, stderr=self.log, env=env, start_new_session=True)

    def check(self) -> None:
        """Raise an error with the last lines that it wrote if the process has ended."""
        if (code := self.poll()) is not None:
            self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 4000))
            said = "\n".join(self.log.read().decode(errors="replace").splitlines()[-15:])
            raise TallybookError(f"{self.name} ended unexpectedly with status {code}", detail=said or None)


def stop(workers: Collection[Worker]) -> None:
    """Ask these to stop, all at the same time; kill them after 8 s."""
    until = time.monotonic() + _SECONDS_TO_STOP
    for worker in workers:
        worker.terminate()
        worker.send_signal(signal.SIGCONT)
        worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        worker.log.close()


def _stop_when_alone() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run until SIGTERM. The only argument is the worker's name."""
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    # By default a worker looks for lost jobs every 5 s, which is too long for a demo.
    asyncio.run(app.run_worker(queues={"webhooks": _SLOTS}, name=sys.argv[1], rescue_look=timedelta(seconds=1)))


if __name__ == "__main__":
    main()
