"""Hashes of what model versions execute, as workers report them. Pure."""

from collections.abc import Iterable

from qinfer.models.state import State, WorkerRecord

EXECUTED = "sha256:"
"""The beginning of an executed hash; that of a plan of an earlier qinfer, which has none, is a `content_hash`."""


def is_executed(content_hash: str) -> bool:
    """Tells whether a hash is of what is executed, and not of the model's whole directory and its times."""
    return content_hash.startswith(EXECUTED)


def executed_hash(workers: Iterable[WorkerRecord], model: str, version: int) -> str:
    """Returns the hash of what live workers execute of a version, at its newest generation.

    Returns:
        Empty while no worker has the version READY, while they do not agree, and while one does not report any.
    """
    states = [state for worker in workers if (state := worker.state_of(model, version)) is not None]
    ready = [state for state in states if state.state is State.READY]
    newest = max((state.generation for state in ready), default=0)
    hashes = {state.executed_hash for state in ready if state.generation == newest}
    return hashes.pop() if len(hashes) == 1 else ""
