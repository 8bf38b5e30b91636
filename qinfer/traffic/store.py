"""Endpoints in Redis: declarations (JSON), trials of canaries, and the targets of requests that may be repeated.

One script compares and sets each change, and wakes the gateways, which read everything again. A trial is written by
compare-and-set on its record and its endpoint's revision, in the script that changes the endpoint: of two controllers
at most one changes anything, and nothing is counted twice.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from qinfer.errors import Conflict, CorruptEntry, EndpointNotFound
from qinfer.models.readiness import Pin
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.deliveries import WEBHOOKS
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, load_script, run_script, ttl_ms
from qinfer.queue.stored_records import StoredRecords, translated
from qinfer.traffic.canary import TRIALS, Event, Latencies, Trial, TrialChange
from qinfer.traffic.endpoints import Endpoint
from qinfer.wire.versions import encode_document

PIN_REASON = "endpoint"

PIN_TTL_S = 120.0
"""Targets stay loaded for this time without a gateway."""

DEAF_AFTER_S = 2.0
"""Seconds without a reading of the store, after which only stable targets are used."""

LEASE_S = 5.0

HEARD_S = DEAF_AFTER_S + 1.0
"""The time without news after which a gateway uses only stable targets."""

_KEEP_COUNTS_S = 3600.0
_KEEP_EVENTS_S = 90 * 86400.0
_KEEP_WEBHOOKS_S = 2 * 86400.0
_MOST_EVENTS = 100
_MOST_LATENCIES = 2000

_PUT = load_script("put", package="qinfer.traffic")
_KEEP = load_script("keep", package="qinfer.traffic")
_TRANSIT = load_script("transit", "now_ms", "deliveries", package="qinfer.traffic").text
_COUNT = load_script("count", package="qinfer.traffic").text
_LEASE = load_script("lease", package="qinfer.traffic").text
_EXPIRING = load_script("expiring", "now_ms", package="qinfer.models").text


class DeclaredEndpoints(NamedTuple):
    """All endpoints, and the revision of the last change."""

    endpoints: Mapping[str, Endpoint]
    revision: int


class EndpointStore:
    """The declarations of endpoints, and their `trials`."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self.trials = TrialStore(control)
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
        document = encode_document(replace(endpoint, revision=0))
        revision = await self._change(endpoint.name, seen, document, least)
        return replace(endpoint, revision=revision)

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


class WebhookNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a webhook to a URL."""

    url: str
    endpoint: str
    event: Event


class StoredTrial(NamedTuple):
    """A trial, and its record for compare-and-set."""

    trial: Trial
    raw: bytes


class TrialStore:
    """The trials of all endpoints."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control

    async def _run(self, script: bytes, names: Sequence[str], *words: str | bytes | int) -> Any:
        with translated():
            return await self._control.client.eval(script, len(names), *names, *words)

    async def read(self) -> dict[str, StoredTrial]:
        """Returns each endpoint's last readable trial."""
        with translated():
            found = await self._control.client.hgetall(keys.trials())
        read = {name.decode(errors="replace"): _decode_trial(raw) for name, raw in found.items()}
        return {name: stored for name, stored in read.items() if stored is not None}

    async def find(self, name: str) -> StoredTrial | None:
        """Returns an endpoint's last trial, if any."""
        with translated():
            raw = await self._control.client.hget(keys.trials(), name)
        return None if raw is None else _decode_trial(raw)

    async def change(self, endpoint: Endpoint, seen: StoredTrial | None, change: TrialChange) -> bool:
        """Writes a change, unless endpoint or trial have changed."""
        name, document, event, told = endpoint.name, b"", b"", b""
        if change.endpoint is not None:
            document = encode_document(replace(change.endpoint, revision=0))
        if change.event is not None:
            event = msgspec.json.encode(change.event)
            if endpoint.webhook:
                told = msgspec.json.encode(WebhookNotice(url=endpoint.webhook, endpoint=name, event=change.event))
        webhooks = keys.deliveries(keys.ENDPOINTS, 0, WEBHOOKS)
        names = (keys.endpoints(), keys.trials(), keys.trial_events(name), webhooks)
        before = b"" if seen is None else seen.raw
        words = (name, endpoint.revision, before, TRIALS.encode(change.trial), document, event)
        limits = (_MOST_EVENTS, ttl_ms(_KEEP_EVENTS_S), told, ttl_ms(_KEEP_WEBHOOKS_S))
        written = await self._run(_TRANSIT, names, *words, *limits)
        if written and change.endpoint is not None:
            await self._control.wake()
        return bool(written)

    async def events(self, name: str, count: int = _MOST_EVENTS) -> list[Event]:
        """Returns the latest events, newest first."""
        with translated():
            found = await self._control.client.lrange(keys.trial_events(name), 0, count - 1)
        return [msgspec.json.decode(event, type=Event) for event in found]

    async def count(self, name: str, revision: int, counts: Mapping[str, int], latencies: Sequence[str]) -> None:
        """Adds counts, and stable's latencies."""
        names = (keys.trial_counts(name, revision), keys.trial_latencies(name, revision))
        pairs = [word for pair in counts.items() for word in pair]
        words = (ttl_ms(_KEEP_COUNTS_S), _MOST_LATENCIES, len(counts), *pairs, *latencies)
        await self._run(_COUNT, names, *words)

    async def counted(self, name: str, revision: int) -> dict[str, int]:
        """Returns a trial's counts at a revision."""
        with translated():
            found = await self._control.client.hgetall(keys.trial_counts(name, revision))
        return {field.decode(): int(count) for field, count in found.items()}

    async def latencies(self, name: str, revision: int) -> Latencies:
        """Returns stable's latencies in strata without limits."""
        with translated():
            found = await self._control.client.lrange(keys.trial_latencies(name, revision), 0, -1)
        read: dict[str, dict[str, dict[str, list[float]]]] = {}
        for of, stratum, seconds, *tenant in (text.decode().split("|", 3) for text in found):
            read.setdefault(of, {}).setdefault(stratum, {}).setdefault("".join(tenant), []).append(float(seconds))
        return read

    async def lead(self, owner: str) -> bool:
        """Takes or renews the lease; returns whether `owner` has it."""
        return bool(await self._run(_LEASE, [keys.trial_lease()], owner, ttl_ms(LEASE_S)))

    async def release_lease(self, owner: str) -> None:
        """Gives the lease back."""
        await self._run(_LEASE, [keys.trial_lease()], owner, 0)

    async def confirm(self, gateway: str, revision: int) -> None:
        """Reports the revision that a gateway uses."""
        await self._run(_EXPIRING, [keys.heard_revisions()], gateway, ttl_ms(HEARD_S), str(revision))

    async def heard(self) -> dict[str, int]:
        """Returns the confirmed revision of each live gateway."""
        words = iter(await self._run(_EXPIRING, [keys.heard_revisions()]))
        return {gateway.decode(): int(revision) for gateway, revision in zip(words, words, strict=True)}


def written_latency(of: str, stratum: str, seconds: float, tenant: str = "") -> str:
    """Returns a latency in the form of `TrialStore.count`."""
    return f"{of}|{stratum}|{seconds:.9f}" + (f"|{tenant}" if tenant else "")


def _decode_trial(raw: bytes) -> StoredTrial | None:
    revision, _, record = raw.partition(b":")
    try:
        trial = TRIALS.decode(record)
    except CorruptEntry:
        return None
    return StoredTrial(replace(trial, state=replace(trial.state, revision=int(revision))), raw)


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
        words = _written(target), ttl_ms(ttl_s), b"" if gone is None else _written(gone)
        return _decode_target(bytes(await run_script(self._call_of_slot(wanted[0]), _KEEP, wanted, *words)))

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


def _written(target: Kept) -> bytes:
    return f"{target.version}:{target.model}".encode()


def _decode_target(value: bytes) -> Kept:
    version, _, model = value.decode().partition(":")
    return Kept(model, int(version))
