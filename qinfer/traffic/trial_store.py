"""Trials of canaries in Redis: their records, the gateways' counts, the lease to decide, and confirmed revisions.

A trial is written by compare-and-set on its record and its endpoint's revision, in the script that changes the
endpoint: of two controllers at most one changes anything, and nothing is counted twice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from qinfer.errors import CorruptEntry
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.deliveries import WEBHOOKS
from qinfer.queue.router import load_script, ttl_ms
from qinfer.queue.stored_records import translated
from qinfer.traffic.canary import TRIALS, Event, Latencies, Trial, TrialChange
from qinfer.traffic.endpoints import Endpoint
from qinfer.traffic.routing import DEAF_AFTER_S
from qinfer.wire.versions import encode_document

LEASE_S = 5.0

HEARD_S = DEAF_AFTER_S + 1.0
"""The time without news after which a gateway uses only stable targets."""

_KEEP_COUNTS_S = 3600.0
_KEEP_EVENTS_S = 90 * 86400.0
_KEEP_WEBHOOKS_S = 2 * 86400.0
_MOST_EVENTS = 100
_MOST_LATENCIES = 2000

_TRANSIT = load_script("transit", "now_ms", "deliveries", package="qinfer.traffic").text
_COUNT = load_script("count", package="qinfer.traffic").text
_LEAD = load_script("lead", package="qinfer.traffic").text
_LEAVE = load_script("leave", package="qinfer.traffic").text
_EXPIRING = load_script("expiring", "now_ms", package="qinfer.models").text


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
        with translated():
            written = await self._control.client.eval(_TRANSIT, len(names), *names, *words, *limits)
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
        with translated():
            await self._control.client.eval(_COUNT, len(names), *names, *words)

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
        with translated():
            return bool(await self._control.client.eval(_LEAD, 1, keys.trial_lease(), owner, ttl_ms(LEASE_S)))

    async def release_lease(self, owner: str) -> None:
        """Gives the lease back."""
        with translated():
            await self._control.client.eval(_LEAVE, 1, keys.trial_lease(), owner)

    async def confirm(self, gateway: str, revision: int) -> None:
        """Reports the revision that a gateway uses."""
        with translated():
            await self._control.client.eval(
                _EXPIRING, 1, keys.heard_revisions(), gateway, ttl_ms(HEARD_S), str(revision)
            )

    async def heard(self) -> dict[str, int]:
        """Returns the confirmed revision of each live gateway."""
        with translated():
            words = iter(await self._control.client.eval(_EXPIRING, 1, keys.heard_revisions()))
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
