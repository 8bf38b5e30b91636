"""Pins, which keep model versions loaded for their holders, and hashes of executed content. Pure.

Workers load a pinned version even if the version policy has dropped it, but offer it only to callers who name it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord

EXECUTED = "sha256:"
"""The prefix of an executed hash."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A model version that its holder still needs.

    Attributes:
        content_hash: The hash when the version was pinned (`is_executed`); empty = any content.
        expires_at: Seconds on Redis' clock.
    """

    model: str
    version: int
    content_hash: str = ""
    reason: str
    holder: str
    expires_at: float

    @property
    def id(self) -> str:
        """The id of the pin."""
        return f"{self.reason}/{self.holder}/{self.model}/{self.version}"


class ExecutedVersion(msgspec.Struct, frozen=True, array_like=True):
    """A model version and the hash of its content; `asked` is the version in a step's configuration."""

    model: str
    version: int
    content_hash: str
    asked: int = 0


def is_executed(content_hash: str) -> bool:
    """Tells whether a hash is of executed content."""
    return content_hash.startswith(EXECUTED)


def executed_hash(workers: Iterable[WorkerRecord], model: str, version: int) -> str:
    """Returns a version's hash on live workers; empty while they disagree or lack it."""
    hashes = {state.executed_hash for state in _newest(workers, model, version)}
    return hashes.pop() if len(hashes) == 1 else ""


def _newest(workers: Iterable[WorkerRecord], model: str, version: int) -> list[VersionState]:
    states = [state for worker in workers if (state := worker.state_of(model, version)) is not None]
    ready = [state for state in states if state.state is State.READY]
    newest = max((state.generation for state in ready), default=0)
    return [state for state in ready if state.generation == newest]


def executed(workers: Sequence[WorkerRecord], model: str, version: int) -> tuple[ExecutedVersion, ...]:
    """Returns the content of a version and its steps; empty as for `executed_hash`."""
    own = executed_hash(workers, model, version)
    steps = {state.steps for state in _newest(workers, model, version)}
    if not own or len(steps) != 1:
        return ()
    found = [ExecutedVersion(model, version, own)]
    found += [
        ExecutedVersion(step.model, step.version, executed_hash(workers, step.model, step.version), step.asked)
        for step in steps.pop()
    ]
    return tuple(found) if all(one.content_hash for one in found) else ()


def joint_hash(executes: Sequence[ExecutedVersion]) -> str:
    """Returns one hash of a version and its steps."""
    if len(executes) == 1:
        return executes[0].content_hash
    text = "\n".join([f"{one.model}/{one.asked}/{one.version}\t{one.content_hash}" for one in executes])
    return f"{EXECUTED}{hashlib.sha256(text.encode()).hexdigest()}"


def kept_by_pins(pins: Iterable[Pin], stored: StoredModel) -> Mapping[int, frozenset[str]]:
    """Returns allowed contents of versions that only pins keep."""
    kept: dict[int, frozenset[str]] = {}
    for pin in pins:
        if pin.model == stored.model and pin.version not in stored.versions:
            kept[pin.version] = kept.get(pin.version, frozenset()) | {pin.content_hash}
    return kept


def why_lost(pin: Pin, workers: Iterable[WorkerRecord], wish: DesiredState | None = None) -> str:
    """Returns why no worker can keep a version; empty = one may."""
    if wish is not None and not wish.load:
        return f"version {pin.version} of model '{pin.model}' can't be kept: the model was unloaded"
    states = [state for worker in workers if (state := worker.state_of(pin.model, pin.version)) is not None]
    if any(_may_be(pin, state) for state in states):
        return ""
    reasons = sorted({state.reason or "its files or configuration have changed" for state in states})
    return f"version {pin.version} of model '{pin.model}' can't be kept: {reasons[0]}" if reasons else ""


def _may_be(pin: Pin, state: VersionState) -> bool:
    if state.state is not State.READY:
        return state.state is not State.UNAVAILABLE
    is_known = state.executed_hash and is_executed(pin.content_hash)
    return not is_known or state.executed_hash == pin.content_hash
