"""Jobs whose args are of another version than the worker's: newer ones are put aside, older ones upgraded in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tallybook._model.contract import LAST_VERSION

if TYPE_CHECKING:
    from tallybook._worker.jobs import Running
    from tallybook._worker.run.served_task import ServedTask

__all__ = ["is_newer", "upgraded"]


def is_newer(options: dict[str, Any], known: ServedTask) -> bool:
    """Whether these options say a version of args that this task does not know yet."""
    version = options.get("version")
    return type(version) is int and known.contract.version < version <= LAST_VERSION


def upgraded(job: Running, known: ServedTask) -> Any:
    """The job's args as the task takes them. PayloadError where they cannot be made so."""
    version = job.options.get("version", 1) if job.options else 1
    if version == known.contract.version and type(version) is int:
        return job.args
    return known.contract.upgraded(known.name, job.args, version)
