"""Operations: changes of many stored requests or dead letters of a model, made in portions by any gateway.

    create ──▶ running ──save …──▶ done
                  └──────end─────▶ stopped

The guarantees, each with a test in `tests/contract/requests/test_operations.py`:

1. `create` stores an operation before it is `open`; it stays so until it has ended.
2. One gateway at a time leads an operation, until its lease ends. A second one would do no harm: the scripts change a
   request or letter once, and count it in the operation's record in the same step.
3. `save` writes the place behind a portion together with what was found until there, so that a portion that is repeated
   counts once. It changes nothing of an operation that has ended.
4. Records expire a week after their last change.
"""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from qinfer.core.messages import parse_request_id
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.router import Router, load_script, ttl_ms
from qinfer.wire.versions import Record

KEPT_S = 7 * 86400.0
LEASE_S = 5.0
MOST_OPEN = 100

_SAVE = load_script("operations/save")
_LEASE = load_script("lease")


class OperationState(StrEnum):
    """The state of an operation."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"


class OperationProgress(msgspec.Struct, frozen=True, array_like=True):
    """The findings of an operation up to its place.

    Attributes:
        place: The place behind which it continues; opaque here.
        looked: Requests or letters that it has read.
        found: Requests or letters that it chose.
        refused: Letters that could not be changed; `reason` is of the last one.
        sample: Ids of the first ones that it chose.
    """

    place: tuple[str, ...] = ()
    looked: int = 0
    found: int = 0
    refused: int = 0
    reason: str = ""
    sample: tuple[str, ...] = ()


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation; instants are seconds in Redis' time.

    Attributes:
        about: Its description, opaque here.
        changed: Requests or letters that it has changed: exact, even if processes die.
        ended_at: 0 = it runs.
    """

    id: str
    model: str
    about: bytes
    state: OperationState = OperationState.RUNNING
    created_at: float = 0.0
    ended_at: float = 0.0
    total: int = 0
    changed: int = 0
    progress: OperationProgress = OperationProgress()

    @property
    def key(self) -> bytes:
        """The key of its record, for the scripts that count."""
        return _key(self.id)


_PROGRESS = Record(OperationProgress, "the progress of an operation")


class Operations:
    """The operations of all models; ids are made like those of requests, and name their model."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def create(self, operation: Operation) -> None:
        """Stores an operation, which gateways then work on."""
        fields = (b"about", operation.about, b"state", operation.state, b"total", operation.total)
        created_ms = int(operation.created_at * 1000)
        key, slot = operation.key, keys.slot(operation.key)
        await asyncio.gather(  # in one write
            self._router.call(slot, b"HSET", key, *fields, b"created_at", created_ms, b"changed", 0),
            self._router.call(slot, b"PEXPIRE", key, ttl_ms(KEPT_S)),
        )
        expired_ms = created_ms - int(KEPT_S * 1000)
        await self._on(keys.operations(), b"ZREMRANGEBYSCORE", b"-inf", expired_ms)
        await self._on(keys.operations(), b"ZADD", created_ms, operation.id)
        await self._on(keys.open_operations(), b"ZADD", created_ms, operation.id)

    async def find(self, operation_id: str) -> Operation | None:
        """Returns an operation, unless it is unknown or has expired."""
        try:
            key = _key(operation_id)
        except InvalidRequest:
            return None
        found = await self._router.call(keys.slot(key), b"HGETALL", key)
        return _operation(operation_id, dict(zip(found[::2], found[1::2], strict=True))) if found else None

    async def newest(self, count: int) -> list[str]:
        """Returns the ids of the newest operations."""
        return [each.decode() for each in await self._on(keys.operations(), b"ZREVRANGE", 0, count - 1)]

    async def open(self) -> list[str]:
        """Returns the ids of operations that run, the oldest first."""
        return [each.decode() for each in await self._on(keys.open_operations(), b"ZRANGE", 0, MOST_OPEN - 1)]

    async def lead(self, operation_id: str, owner: str, lease_s: float = LEASE_S) -> bool:
        """Takes or renews the lease on an operation; 0 s gives it back. Returns whether `owner` has, or had, it."""
        _, partition, model = parse_request_id(operation_id)
        key = keys.operation_lease(model, partition, operation_id).encode()
        return bool(await self._router.run(keys.slot(key), _LEASE, [key], owner, int(lease_s * 1000)))

    async def save(self, operation: Operation, progress: OperationProgress) -> bool:
        """Writes the progress behind a portion; returns false if the operation has ended."""
        return await self._save(operation.id, {b"progress": _PROGRESS.encode(progress)})

    async def end(self, operation_id: str, state: OperationState, now_s: float) -> bool:
        """Ends an operation; returns false if it had ended."""
        is_first = await self._save(operation_id, {b"state": state, b"ended_at": int(now_s * 1000)})
        await self.close(operation_id)
        return is_first

    async def close(self, operation_id: str) -> None:
        """Removes an operation that has ended, or expired, from the open ones."""
        await self._on(keys.open_operations(), b"ZREM", operation_id)

    async def _save(self, operation_id: str, fields: Mapping[bytes, Argument]) -> bool:
        key = _key(operation_id)
        words = [word for pair in fields.items() for word in pair]
        state = await self._router.run(keys.slot(key), _SAVE, [key], ttl_ms(KEPT_S), *words)
        return bool(state == OperationState.RUNNING.encode())

    async def _on(self, name: str, command: bytes, *words: Argument) -> Any:
        return await self._router.call(keys.slot(name), command, name, *words)


def _key(operation_id: str) -> bytes:
    _, partition, model = parse_request_id(operation_id)
    return keys.operation(model, partition, operation_id).encode()


def _operation(operation_id: str, values: Mapping[bytes, bytes]) -> Operation:
    _, _, model = parse_request_id(operation_id)
    try:
        return Operation(
            id=operation_id,
            model=model,
            about=values[b"about"],
            state=OperationState(values[b"state"].decode()),
            created_at=int(values[b"created_at"]) / 1000,
            ended_at=int(values.get(b"ended_at", b"0")) / 1000,
            total=int(values[b"total"]),
            changed=int(values[b"changed"]),
            progress=_PROGRESS.decode(values[b"progress"]) if b"progress" in values else OperationProgress(),
        )
    except (KeyError, ValueError) as error:
        raise CorruptEntry(f"the record of operation '{operation_id}' is damaged: {error}") from None
