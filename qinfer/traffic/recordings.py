"""Recordings of requests in Redis: what is recorded now, with a time to live, and the copies that gateways append.

A recording ends after its copies, its bytes or its time, whichever comes first. Its copies can be read for
`KEPT_S` longer. No copy names its caller.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from qinfer.core.messages import IdFactory
from qinfer.errors import Conflict, CorruptEntry, InvalidRequest, RequestNotFound
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.router import load_script, ttl_ms
from qinfer.queue.stored_records import StoredRecords, decode_text, entries_of, translated
from qinfer.wire.bodies import RecordedPage, RecordedRequest, Recording
from qinfer.wire.versions import Record

MOST_REQUESTS = 100_000
MOST_BYTES = 256 * 2**20
LONGEST_S = 3600.0

COPY_BYTES = 4 * 2**20
"""Larger requests are not copied."""

KEPT_S = 600.0
NEWS_S = 1.5
"""The longest wait for the next copies, below the client's socket timeout; gateways have written all copies by then."""

_PAGE_BYTES, _PAGE = 4 * 2**20, 256
_PLACE = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")

COPIES = Record(RecordedRequest, "the copy of a request")
_RECORD = load_script("record", package="qinfer.traffic").text
_EXPIRING = load_script("expiring", "now_ms", package="qinfer.models").text


class RecordingStore:
    """The recordings of an installation."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._records = StoredRecords()

    async def running(self) -> list[Recording]:
        """Returns the recordings that run, one for a model at most."""
        words = iter(await self._evaluated(_EXPIRING, [keys.recordings()]))
        read = self._records.all(dict(zip(map(decode_text, words), words, strict=True)), Recording)
        return [read[model] for model in sorted(read)]

    async def wait(self, timeout_s: float) -> None:
        """Waits for a change; may return early."""
        await self._control.wait(timeout_s)

    async def open_recording(self, model: str, requests: int, nbytes: int, seconds: float, now_s: float) -> Recording:
        """Begins a recording, and wakes the gateways.

        Raises:
            InvalidRequest: A bound is not positive, or above the most.
            Conflict: The model is being recorded.
        """
        for name, value, most in (
            ("requests", requests, MOST_REQUESTS),
            ("bytes", nbytes, MOST_BYTES),
            ("seconds", seconds, LONGEST_S),
        ):
            if not 0 < value <= most:
                raise InvalidRequest(f"a recording of {value} {name} is not possible; choose 1 to {most:g}")
        if any(other.model == model for other in await self.running()):
            raise Conflict(f"'{model}' is being recorded; wait for the end, or stop it: DELETE /v1/recordings/<id>")
        recording_id, ends_at = IdFactory().ulid(), now_s + seconds
        made = Recording(
            id=recording_id, model=model, requests=requests, nbytes=nbytes, begins_at=now_s, ends_at=ends_at
        )
        document, counts = msgspec.json.encode(made), keys.recorded_counts(made.id)
        with translated():
            await self._control.client.hset(counts, "recording", document)
            await self._control.client.pexpire(counts, ttl_ms(seconds + KEPT_S))
        await self._evaluated(_EXPIRING, [keys.recordings()], model, ttl_ms(seconds), document)
        await self._control.wake()
        return made

    async def end_recording(self, recording_id: str) -> None:
        """Ends a recording; its copies stay for a while.

        Raises:
            RequestNotFound: There is no such recording.
        """
        made, _ = await self._look(recording_id)
        with translated():
            await self._control.client.hset(keys.recorded_counts(recording_id), "full", 1)
        if any(other.id == recording_id for other in await self.running()):
            await self._evaluated(_EXPIRING, [keys.recordings()], made.model, 0, b"{}")
            await self._control.wake()

    async def append_copies(self, of: Recording, copies: Sequence[bytes], dropped: int) -> bool:
        """Appends encoded copies; returns whether the recording takes no more."""
        names = [keys.recorded(of.id), keys.recorded_counts(of.id)]
        return bool(await self._evaluated(_RECORD, names, of.requests, of.nbytes, dropped, *copies))

    async def page_of_copies(self, recording_id: str, after: str, now_s: float) -> RecordedPage:
        """Returns the copies behind a place, or waits up to `NEWS_S` for the next ones.

        Raises:
            InvalidRequest: The place is none that a page has named.
            RequestNotFound: There is no such recording.
        """
        if after and not _PLACE.fullmatch(after):
            raise InvalidRequest(f"after='{after[:60]}' is no place in a recording; give the 'next' of the page before")
        made, counts = await self._look(recording_id)
        stream, has_ended = keys.recorded(recording_id), b"full" in counts or now_s >= made.ends_at + NEWS_S
        most = max(1, min(_PAGE, _PAGE_BYTES // max(int(counts.get(b"largest", b"0")), 1)))
        block = None if has_ended else int(NEWS_S * 1000)
        with translated():
            reply = await self._control.client.xread({stream: after or "0"}, count=most, block=block)
        entries = entries_of(reply)
        found = []
        for _, fields in entries:
            try:
                found.append(COPIES.decode(fields[b"c"]))
            except (CorruptEntry, KeyError):
                continue
        return RecordedPage(
            recording=made,
            requests=tuple(found),
            next=decode_text(entries[-1][0]) if entries else after,
            ended=has_ended and not entries,
            dropped=int(counts.get(b"dropped", b"0")),
        )

    async def _look(self, recording_id: str) -> tuple[Recording, dict[bytes, bytes]]:
        with translated():
            counts = await self._control.client.hgetall(keys.recorded_counts(recording_id))
        made = self._records.one(counts[b"recording"], Recording, recording_id) if b"recording" in counts else None
        if made is None:
            raise RequestNotFound(
                f"there is no recording '{recording_id[:64]}'; copies are kept for {KEPT_S:g} s after the end"
            )
        return made, counts

    async def _evaluated(self, script: bytes, names: Sequence[str], *words: str | bytes | float) -> Any:
        with translated():
            return await self._control.client.eval(script, len(names), *names, *words)
