"""What the handlers of one process share, whichever nodes their jobs are from."""

from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

from tallybook._worker.run.children import Children
from tallybook._worker.run.context import Context
from tallybook._worker.run.served import ServedApp
from tallybook._worker.run.threads import DaemonThreads
from tallybook._worker.settings import WorkerSettings


class Common:
    """The threads (one per slot), the child processes, and the state that the app's lifespans opened."""

    def __init__(self, app: ServedApp, settings: WorkerSettings) -> None:
        self._app = app
        self.threads = DaemonThreads(settings.slots, "tallybook-job")
        self.children = Children(settings.name, min(settings.children or settings.slots, settings.slots))
        self.state = SimpleNamespace()
        self._lifespan = AsyncExitStack()

    async def open(self, context: Context) -> None:
        await enter_lifespans(self._app, context, self._lifespan)

    async def close(self) -> None:
        """Close the children and the lifespans; leave running threads behind."""
        await self.children.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        await self._lifespan.aclose()


async def enter_lifespans(app: ServedApp, context: Context, stack: AsyncExitStack) -> None:
    """Enter the app's lifespans in the order of declaration; the stack closes them in reverse."""
    for hook in app._lifespans:
        await stack.enter_async_context(asynccontextmanager(hook)(context))
