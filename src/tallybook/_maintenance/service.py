"""What all services have: a name, how often they are looked after, and a run that one worker claims."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import ClassVar, Final

REFUSED: Final = "refused"
"""Somebody else is running it just now."""


class Service(ABC):
    """Maintenance that any worker runs, and never two at once; the loop says when."""

    name: ClassVar[str]
    every = 5.0
    """Seconds; out of `tallybook.service`, at each look."""

    def __init__(self) -> None:
        self.look_at = 0.0
        """Of the loop's clock: when to ask whether there is something to do."""
        self.run_at = math.inf
        """When to run without asking: something is known to be due then."""
        self.looked_at = -math.inf

    def pause(self, workers: int) -> float:
        """Seconds to the next look, with so many workers on record; drawn, or workers started together look together."""
        return self.every * random.uniform(0.75, 1.0)

    def asks(self, now: float) -> bool:
        """Whether a look at this time is for this service, too: its own time has come, or has come half."""
        return self.look_at - now <= 0.5 * max(0.0, self.look_at - self.looked_at)

    @abstractmethod
    async def serve(self) -> str | float | None:
        """Claim one run and do it. REFUSED, or in how many seconds the next one is due, if that is known."""
