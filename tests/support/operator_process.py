"""A uvicorn process that serves the operator API: `python -m support.operator_process DSN KEYS [BREAK]`.

It prints its port. BREAK adds a fault that a test must find: `answer` sends an undocumented answer, `error` has a
defect, `unsigned` does not check signatures.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.paths import TESTS


def _broken(what: str) -> None:
    from tallybook.extra.operator import routes, serve

    async def wrong(*_: Any) -> dict[str, Any]:
        return {"queues": [{"name": 7}]}

    async def defect(*_: Any) -> dict[str, Any]:
        raise RuntimeError("a defect")

    def anybody(signed: Any, ring: Any, *_: Any) -> Any:
        return ring.get("ops")[0]

    def trusting(headers: Any) -> Any:
        from datetime import UTC, datetime
        from secrets import token_hex

        return serve.Signed("ops", str(int(datetime.now(UTC).timestamp())), token_hex(16), "")

    if what == "unsigned":
        serve.proved, serve.signed_by = anybody, trusting
    else:
        (listed,) = (one for one in routes.OPERATIONS if one.name == "list_queues")
        object.__setattr__(listed, "reads", wrong if what == "answer" else defect)


def main(dsn: str, keys: str, broken: str = "") -> None:
    """Serve until the process is stopped."""
    import socket

    import uvicorn

    from tallybook import App
    from tallybook.web import operator_api

    if broken:
        _broken(broken)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(operator_api(App("shop", dsn=dsn), keys=keys), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def serving(dsn: str, keys: Path, broken: str = "", *, log: Path | None = None) -> Iterator[str]:
    """Run such a process for the block and yield its base URL; stderr goes to `log`."""
    words = [sys.executable, "-m", "support.operator_process", dsn, str(keys), broken]
    pipes: dict[str, Any] = {"cwd": TESTS, "stdout": subprocess.PIPE, "text": True}
    with (log or Path("/dev/null")).open("w") as err, subprocess.Popen(words, stderr=err, **pipes) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, "it has not started"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError("it does not end") from None


if __name__ == "__main__":
    main(*sys.argv[1:])
