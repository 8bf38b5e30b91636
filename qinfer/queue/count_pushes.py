"""Two short streams: readers of statistics ask workers to push their counts, and workers answer.

An answer also has the requests under way. Without questions, workers push every second. Both streams have ids from one
Redis clock, so that a reader skips older answers.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from qinfer.queue import keys
from qinfer.queue.stored_records import decode_text, entries_of, translated

ALL = ""

_KEPT = 256
_MAX_BLOCK_S = 2.0  # below the client's socket timeout
_Id = tuple[int, ...]


def concerns(models: Collection[str], hosted: Collection[str]) -> bool:
    """Tells whether a worker must answer."""
    return bool(hosted) and (ALL in models or any(model in hosted for model in models))


class CountQuestions(NamedTuple):
    """The id of the newest question, and all models in question."""

    id: str
    models: frozenset[str]


class Underway(msgspec.Struct, frozen=True):
    """`busy` and `direct` of a `WorkerRecord`."""

    busy: dict[str, dict[int, int]]
    direct: dict[str, dict[int, int]]


class CountPushes:
    """Questions and answers in Redis."""

    def __init__(self, client: Any) -> None:  # Any: the two clients share no typed interface
        self._client = client

    async def ask(self, models: Collection[str]) -> str:
        """Asks the models' workers; returns the question's id."""
        fields = {"models": msgspec.json.encode(sorted(models))}
        with translated():
            return decode_text(await self._client.xadd(keys.counts_asked(), fields, maxlen=_KEPT, approximate=False))

    async def asked(self, last: str) -> CountQuestions:
        """Waits a while for questions after the id `last`; `0-0` = all."""
        found = await self._read_stream(keys.counts_asked(), last, _MAX_BLOCK_S)
        names = (name for _, fields in found for name in _names(fields.get(b"models", b"")))
        return CountQuestions(found[-1][0] if found else last, frozenset(names))

    async def send_answer(self, worker: str, question: str, underway: Underway) -> None:
        """Reports pushed counts and requests under way."""
        fields = {"worker": worker, "question": question, "underway": msgspec.json.encode(underway)}
        with translated():
            await self._client.xadd(keys.counts_added(), fields, maxlen=_KEPT, approximate=False)

    async def answers(self, question: str, workers: Collection[str], within_s: float) -> dict[str, Underway | None]:
        """Waits for answers; returns requests under way, if known."""
        found: dict[str, Underway | None] = {}
        last, end_s = _just_before(question), time.monotonic() + within_s
        while not found.keys() >= set(workers) and (left_s := end_s - time.monotonic()) > 0:
            for entry, fields in await self._read_stream(keys.counts_added(), last, left_s):
                last = entry
                if _order(decode_text(fields.get(b"question", b""))) >= _order(question):
                    found[decode_text(fields.get(b"worker", b""))] = _underway(fields.get(b"underway", b""))
        return found

    async def _read_stream(self, key: str, last: str, block_s: float) -> list[tuple[str, Mapping[bytes, bytes]]]:
        with translated():
            streams = await self._client.xread({key: last}, block=max(int(block_s * 1000), 1))
        return [(decode_text(entry), fields) for entry, fields in entries_of(streams)]


def _names(text: bytes) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [ALL]


def _underway(text: bytes) -> Underway | None:
    try:
        return msgspec.json.decode(text, type=Underway)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _order(text: str) -> _Id:
    try:
        return tuple(map(int, text.split("-")))
    except ValueError:
        return ()


def _just_before(question: str) -> str:
    """Returns an id before the question's millisecond, which an answer may have, too."""
    return str(_order(question)[0] - 1)
