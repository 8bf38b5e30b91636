"""Endpoints in Redis: declarations (JSON), and the targets of requests that may be repeated.

One script compares and sets each change, and wakes the gateways, which read everything again.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from qinfer.errors import Conflict, EndpointNotFound
from qinfer.models.pins import Pin
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, load_script, run_script, ttl_ms
from qinfer.queue.stored_records import StoredRecords, translated
from qinfer.traffic.endpoints import Endpoint
from qinfer.wire.versions import encode_document

PIN_REASON = "endpoint"

PIN_TTL_S = 120.0
"""Targets stay loaded for this time without a gateway."""

_PUT = load_script("put", package="qinfer.traffic")
_KEEP = load_script("keep", package="qinfer.traffic")


class DeclaredEndpoints(NamedTuple):
    """All endpoints, and the revision of the last change."""

    endpoints: Mapping[str, Endpoint]
    revision: int


class EndpointStore:
    """The declarations of endpoints."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._records = StoredRecords()
        self._last: Mapping[str, Endpoint] = {}

    async def read(self) -> DeclaredEndpoints:
        """Returns all endpoints; a damaged endpoint is returned as it was last read."""
        with translated():
            found = await self._control.client.hgetall(keys.endpoints())
        values = {name.decode(errors="replace"): value for name, value in found.items()}
        counter = values.pop("", b"0")
        known = {name: endpoint for name, endpoint in self._last.items() if name in values}
        self._last = known | self._records.all(values, Endpoint)
        return DeclaredEndpoints(self._last, int(counter) if counter.isdigit() else 0)

    async def put(self, endpoint: Endpoint, seen: int | None, least: int = 0) -> Endpoint:
        """Writes a checked declaration with its revision, or raises `Conflict`.

        `seen` is the revision that it replaces: 0 = none, `None` = any. The new one must exceed `least`, from before a
        loss.
        """
        document = encode_document(msgspec.structs.replace(endpoint, revision=0))
        revision = await self._change(endpoint.name, seen, document, least)
        return msgspec.structs.replace(endpoint, revision=revision)

    async def delete(self, name: str, seen: int | None) -> int:
        """Returns the revision, or raises `Conflict` or `EndpointNotFound`."""
        return await self._change(name, seen, b"")

    async def _change(self, name: str, seen: int | None, document: bytes, least: int = 0) -> int:
        words = (name, "" if seen is None else seen, document, least)
        with translated():
            is_done, revision = await self._control.client.eval(_PUT.text, 2, keys.endpoints(), keys.trials(), *words)
        if not is_done:
            if not revision:
                raise unknown(name)
            raise Conflict(f"endpoint '{name}' now has revision {revision}, not {seen}; read it again and change that")
        await self._control.wake()
        return int(revision)

    async def wait(self, timeout_s: float) -> None:
        """Waits for a change; may return early."""
        await self._control.wait(timeout_s)

    async def pin(self, endpoint: Endpoint, now_s: float) -> None:
        """Keeps targets loaded for a while, against version policies."""
        for pin in _pins_of(endpoint, now_s + PIN_TTL_S):
            await self._control.put_pin(pin, PIN_TTL_S)

    async def unpin(self, before: Endpoint, after: Endpoint | None) -> None:
        """Removes the pins of former targets."""
        kept = set() if after is None else {pin.id for pin in _pins_of(after, 0.0)}
        for pin in _pins_of(before, 0.0):
            if pin.id not in kept:
                await self._control.put_pin(pin, 0.0)


def _pins_of(endpoint: Endpoint, expires_at: float) -> list[Pin]:
    return [
        Pin(model=target.model, version=target.number, reason=PIN_REASON, holder=endpoint.name, expires_at=expires_at)
        for target in endpoint.targets
        if target.number
    ]


def unknown(name: str) -> EndpointNotFound:
    """Returns the error for an unknown endpoint."""
    return EndpointNotFound(f"there is no endpoint '{name[:128]}'; GET /v1/endpoints lists them")


class Kept(NamedTuple):
    """The model version of a request's first attempt."""

    model: str
    version: int


class KeptTargets:
    """The first targets of requests that callers may repeat, by the caller's id and the idempotency key."""

    def __init__(self, queue: Queue) -> None:
        self._router = queue.router

    async def keep(
        self, endpoint: str, tenant: str, names: Sequence[str], target: Kept, ttl_s: float, gone: Kept | None = None
    ) -> Kept:
        """Keeps a target unless one other than `gone` is kept; returns the kept one."""
        wanted = [keys.kept_target(endpoint, tenant, name).encode() for name in names]
        return _decode_target(await _store_target(self._call_of_slot(wanted[0]), wanted, target, ttl_s, gone))

    async def find(self, endpoint: str, tenant: str, names: Sequence[str]) -> Kept | None:
        """Returns the first kept target."""
        for name in names:
            key = keys.kept_target(endpoint, tenant, name).encode()
            found = await self._call_of_slot(key)(b"GET", key)
            if found is not None:
                return _decode_target(found)
        return None

    def _call_of_slot(self, key: bytes) -> Call:
        self._router.check_up(keys.slot(key))  # an immediate refusal tells the caller when to try again
        return partial(self._router.call, keys.slot(key))


def names_of(request_id: str, key_hash: str = "") -> list[str]:
    """Returns the idempotency key, then the caller's id."""
    return [f"key:{key_hash}"] * bool(key_hash) + [f"id:{request_id}"] * bool(request_id)


async def _store_target(call: Call, names: Sequence[bytes], target: Kept, ttl_s: float, gone: Kept | None) -> bytes:
    words = _written(target), ttl_ms(ttl_s), b"" if gone is None else _written(gone)
    return bytes(await run_script(call, _KEEP, names, *words))


def _written(target: Kept) -> bytes:
    return f"{target.version}:{target.model}".encode()


def _decode_target(value: bytes) -> Kept:
    version, _, model = value.decode().partition(":")
    return Kept(model, int(version))
