"""Dead letters: entries that were given up, kept with their bytes for inspection and replay."""

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from qinfer.core.messages import InferRequest
from qinfer.errors import BrokerUnavailable, CorruptEntry, InvalidRequest
from qinfer.queue import keys
from qinfer.queue.entries import MARGIN_S, Entry, Lane, undivided
from qinfer.queue.router import Router, Script, load_script
from qinfer.queue.values import Reference, Values
from qinfer.wire.frame import PayloadApart, decode_request

logger = logging.getLogger(__name__)

MAX_AGE_S = 7 * 86400.0

LETTER_OBJECT_S = 2 * MAX_AGE_S
"""Letters' objects expire: letters are trimmed only when the next one arrives."""

MAX_BYTES = 256 * 2**20
"""The most bytes of a partition's dead letters; the newest is always kept."""

_LETTERS = load_script("lanes/letters")
_REPLAY = load_script("lanes/replay", "now_ms", "drop", "operations/count")
_PURGE = load_script("operations/purge", "operations/count")
_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_PAYLOAD_MARGIN_S = 300.0
_LONGEST_TIMEOUT_S = 86400.0
_PARTITION = 0
_PAGE = 100
_BYTES = (b"frame", b"payload")
NOT_KEPT = (
    "the tensors of dead letter {} were in the memory of a gateway and are gone; its caller has an error, so remove it "
    "with `qinfer dlq purge`"
)
GONE = "the tensors of dead letter {} are gone, so that it can't be replayed; remove it with `qinfer dlq purge`"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that was given up; listings have neither frame nor payload.

    `buried_at` is in Redis' time, `size` the bytes of frame and payload. `tenant` is empty if the frame is unreadable.
    """

    id: str
    lane: Lane
    request_id: str
    code: str
    reason: str
    deliveries: int
    buried_at: float
    size: int = 0
    tenant: str = ""
    frame: bytes = b""
    payload: bytes = b""


class _Found(NamedTuple):
    letter: DeadLetter
    payload: Reference | None


class DeadLetters:
    """Dead letters, bounded by age and bytes, oldest first. `bury.lua` writes them."""

    def __init__(self, router: Router, values: Values) -> None:
        self._router = router
        self._values = values

    async def keep_payload(self, entry: Entry) -> Reference | None:
        """Copies a payload for its dead letter, if it is an object in reach."""
        lane = entry.lane
        key = keys.payload(lane.model, lane.partition, entry.payload_id)
        reference = await self._values.reference(keys.lane_slot(lane), key)
        if reference is None:
            return None
        try:
            return await self._values.copy_object(reference, key, LETTER_OBJECT_S)
        except (BrokerUnavailable, CorruptEntry) as error:
            about = {"request_id": entry.payload_id, "reason": error.message}
            logger.warning("the tensors of a dead letter are not kept beyond its request's time", extra=about)
            return None

    async def list(self, model: str, *, after: str = "", count: int = 100) -> "list[DeadLetter]":
        """Lists dead letters behind the id `after`, without their bytes."""
        millisecond, number = place_after(after)
        return [found.letter for found in await self._read_letters(model, f"({millisecond}-{number}", count, _BYTES)]

    async def count(self, model: str) -> int:
        """Returns the number of dead letters."""
        key = _letters_key(model)
        return int(await self._router.call(keys.slot(key), b"XLEN", key))

    async def find(self, model: str, letter_id: str) -> DeadLetter | None:
        """Returns a dead letter without its bytes."""
        found = await self._one(model, letter_id, _BYTES)
        return found and found.letter

    async def show(self, model: str, letter_id: str) -> DeadLetter | None:
        """Returns a dead letter with its bytes."""
        found = await self._one(model, letter_id, ())
        if found is None or found.payload is None:
            return found and found.letter
        payload = await self._values.read_object(found.payload)
        return msgspec.structs.replace(found.letter, payload=payload or b"")

    async def replay(self, model: str, letter_id: str, operation: bytes = b"") -> bool:
        """Moves a dead letter to the end of its lane atomically; returns false if it is gone.

        An asynchronous request becomes `queued`, with its timeout counted from now. An `operation` (its key) counts it.
        """
        found = await self._one(model, letter_id, (b"payload",))
        if found is None:
            return False
        letter = found.letter
        if (request := head_of(letter.frame)) is not None and request.memory is not None:
            raise CorruptEntry(NOT_KEPT.format(letter_id))
        partition = letter.lane.partition
        payload = keys.payload(model, partition, letter.request_id).encode()
        record = keys.request(model, partition, letter.request_id).encode()
        names = [
            *(_letters_key(model), keys.lane(letter.lane), payload, record),
            keys.result(model, partition, letter.request_id).encode(),
            keys.due(model, partition).encode(),
            keys.stored_responses(model, partition, letter.request_id).encode(),
            *([operation] if operation else []),
        ]
        ttl_s = payload_ttl_s(letter.frame)
        copied: tuple[int, str, int] | tuple[()] = ()
        if found.payload is not None:
            copy = await self._values.copy_object(found.payload, payload, max(ttl_s, await self._known_s(record)))
            if copy is None:
                raise CorruptEntry(GONE.format(letter_id))
            copied = (copy.version, copy.name, copy.size)
        arguments = (letter_id, letter.request_id, int(ttl_s * 1000), letter.lane.name, int(MARGIN_S * 1000), *copied)
        replayed = await self._run_script(model, _REPLAY, names, *arguments)
        if replayed is None:
            self._values.delete_objects([copied[1].encode()] if copied else [])
            return False
        self._values.delete_objects(replayed[1])
        return True

    async def purge(self, model: str, letter_ids: "Sequence[str] | None" = None) -> int:
        """Removes the named dead letters, or all; returns how many it removed."""
        key = _letters_key(model)
        ids = None if letter_ids is None else [each for each in letter_ids if id_of(each) is not None]
        objects = await self._objects(model, ids) if self._values.objects is not None else []
        if ids is None:
            count = await self._router.call(keys.slot(key), b"XTRIM", key, b"MAXLEN", 0)
        else:
            count = await self._router.call(keys.slot(key), b"XDEL", key, *ids) if ids else 0
        self._values.delete_objects(objects)
        await self._values.wait_for_deletions()
        return int(count)

    async def purge_counted(self, model: str, letter_ids: "Sequence[str]", operation: bytes) -> None:
        """Removes dead letters, which an operation (its key) counts."""
        objects = await self._objects(model, letter_ids) if self._values.objects is not None else []
        await self._run_script(model, _PURGE, [_letters_key(model), operation], *letter_ids)
        self._values.delete_objects(objects)

    async def _objects(self, model: str, ids: "Sequence[str] | None") -> Sequence[bytes]:
        if ids is not None:
            chosen = [await self._one(model, letter_id, _BYTES) for letter_id in ids]
            return [found.payload.name.encode() for found in chosen if found and found.payload]
        names = []
        start = "-"
        while page := await self._read_letters(model, start, _PAGE, _BYTES):
            names += [found.payload.name.encode() for found in page if found.payload]
            start = f"({page[-1].letter.id}"
        return names

    async def _known_s(self, record: bytes) -> float:
        words = (b"HMGET", record, b"timeout_ms", b"result_ttl_ms", b"tombstone_ttl_ms")
        times = await self._router.call(keys.slot(record), *words)
        return sum(map(int, times)) / 1000 + MARGIN_S if times[0] else 0.0

    async def _one(self, model: str, letter_id: str, left_out: Sequence[bytes]) -> _Found | None:
        found = await self._read_letters(model, letter_id, 1, left_out) if id_of(letter_id) is not None else []
        return found[0] if found and found[0].letter.id == letter_id else None

    async def _read_letters(self, model: str, start: str, count: int, left_out: Sequence[bytes]) -> Sequence[_Found]:
        found = await self._run_script(model, _LETTERS, [_letters_key(model)], start, count, *left_out)
        return [_found(model, letter_id, fields) for letter_id, fields in found]

    async def _run_script(self, model: str, script: Script, names: Sequence[bytes], *arguments: Any) -> Any:
        return await self._router.run(keys.slot(_letters_key(model)), script, names, *arguments)


def _letters_key(model: str) -> bytes:
    return keys.dead_letters(model, _PARTITION).encode()


def _found(model: str, letter_id: bytes, fields: Sequence[bytes]) -> _Found:
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    version, _, name = values[b"lane"].decode().partition(":")
    letter = DeadLetter(
        id=letter_id.decode(),
        lane=Lane(model, int(version), undivided(name), _PARTITION),
        request_id=values[b"request_id"].decode(),
        code=values[b"code"].decode(),
        reason=values[b"reason"].decode(),
        deliveries=int(values[b"deliveries"]),
        buried_at=int(letter_id.partition(b"-")[0]) / 1000,
        size=int(values[b"size"]),
        tenant=values.get(b"tenant", b"").decode(),
        frame=values.get(b"frame", b""),
        payload=values.get(b"payload", b""),
    )
    if b"object" not in values:
        return _Found(letter, None)
    return _Found(letter, Reference(values[b"object"].decode(), int(values[b"object_size"]), int(values[b"v"])))


def id_of(text: str) -> tuple[int, int] | None:
    """Returns a dead letter's id as comparable numbers; `None` = malformed."""
    found = _ID.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def place_after(text: str) -> tuple[int, int]:
    """Returns the id behind which a listing begins."""
    place = id_of(text or "0-0")
    if place is None:
        raise InvalidRequest(f"'{text[:60]}' is not a dead letter's id; expected one such as 1700000000123-0")
    return place


def head_of(frame: bytes) -> InferRequest | None:
    """Returns a frame's request without stored tensors, if it can be decoded."""
    try:
        return decode_request(frame)
    except PayloadApart as apart:
        return apart.request
    except CorruptEntry:
        return None


def payload_ttl_s(frame: bytes) -> float:
    """Returns how long a replayed request needs its payload."""
    request = head_of(frame)
    return ((request.timeout_s if request else 0.0) or _LONGEST_TIMEOUT_S) + _PAYLOAD_MARGIN_S
