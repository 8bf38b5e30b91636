"""The work of `qinfer dlq`; the results are what the commands print as JSON."""

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qinfer.cli.console import CommandFailed
from qinfer.cli.overview import run
from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import CorruptEntry, InvalidRequest, RequestError
from qinfer.models.store import ControlStore
from qinfer.queue.dead_letters import GONE, NOT_KEPT, DeadLetter, DeadLetters, head_of, place_after
from qinfer.queue.lanes import Queue
from qinfer.tensors import Tensor, to_numpy
from qinfer.wire.frame import decode_request

T = TypeVar("T")

_PAGE = 500
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def choose(ids: Sequence[str] | None, *, everything: bool) -> Sequence[str] | None:
    """Returns the ids of the dead letters to process; `None` = all."""
    if bool(ids) == everything:
        raise InvalidRequest("name dead letters by their ids, or give --all; `qinfer dlq list MODEL` lists them")
    for letter_id in ids or ():
        place_after(letter_id)  # refuses a malformed id
    return ids or None


def run_list(settings: RedisSettings, model: str, after: str, count: int) -> list[dict[str, Any]]:
    """Returns a page of a model's dead letters, or the oldest of each model, at most `count` of a model."""

    async def listed(store: ControlStore, queue: Queue) -> list[dict[str, Any]]:
        models = [model] if model else sorted(await store.desired())
        pages = [await queue.dead_letters.list(name, after=after, count=count) for name in models]
        return [_row(letter) for page in pages for letter in page]

    return run(settings, listed)


def run_show(
    settings: RedisSettings, limits: LimitSettings, model: str, letter_id: str, directory: Path | None
) -> dict[str, Any]:
    """Returns a decoded dead letter; writes its tensors to `directory`."""
    place_after(letter_id)
    letter = _with_payloads(settings, limits, lambda letters: letters.show(model, letter_id))
    if letter is None:
        raise _missing(model, letter_id)
    found: dict[str, Any] = {"row": _row(letter), "kind": "unreadable", "timeout_s": 0.0, "tenant": ""}
    found |= {"parameters": {}, "inputs": [], "problem": "", "written": []}
    contents: list[tuple[str, Tensor | bytes]] = [("frame.bin", letter.frame)]
    try:
        request = decode_request(letter.frame, letter.payload)
    except CorruptEntry as error:
        found["problem"] = error.message
        if (head := head_of(letter.frame)) is not None and head.memory is not None:
            found["problem"] = NOT_KEPT.format(letter_id)
        elif head is not None and head.payload and not letter.payload:
            found["problem"] = GONE.format(letter_id)
    else:
        found |= {
            "kind": "synchronous request" if request.reply_to else "asynchronous request",
            "timeout_s": request.timeout_s,
            "tenant": request.tenant,
            "parameters": dict(request.parameters),
            "inputs": [
                {"name": one.name, "datatype": one.datatype, "shape": one.shape, "size": one.nbytes}
                for one in request.inputs
            ],
        }
        # A name must not become a path.
        contents = [(f"{i}-{_UNSAFE.sub('_', one.name)[:100]}", one) for i, one in enumerate(request.inputs)]
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            found["written"] = [str(_write(directory / name, content)) for name, content in contents]
        except OSError as error:
            raise CommandFailed(f"the tensors can't be written to {directory}: {error.strerror or error}") from None
    return found


def run_replay(settings: RedisSettings, limits: LimitSettings, model: str, ids: Sequence[str] | None) -> int:
    """Puts dead letters back; returns their number."""

    async def replay(letters: DeadLetters) -> int:
        count = 0
        for letter_id in await _all_ids(letters, model) if ids is None else ids:
            if await letters.replay(model, letter_id):
                count += 1
            elif ids is not None:
                raise _missing(model, letter_id, f"; {count} were put back")
        return count

    return _with_payloads(settings, limits, replay)


def run_purge(settings: RedisSettings, limits: LimitSettings, model: str, ids: Sequence[str] | None) -> int:
    """Removes dead letters; returns their number."""
    return _with_payloads(settings, limits, lambda letters: letters.purge(model, ids))


def _with_payloads(
    settings: RedisSettings, limits: LimitSettings, operation: Callable[[DeadLetters], Awaitable[T]]
) -> T:
    return run(settings, lambda _, queue: operation(queue.dead_letters), limits)


async def _all_ids(letters: DeadLetters, model: str) -> list[str]:
    """Returns all ids first: a letter that fails again is replayed once."""
    ids: list[str] = []
    while page := await letters.list(model, after=ids[-1] if ids else "", count=_PAGE):
        ids += [letter.id for letter in page]
    return ids


def _missing(model: str, letter_id: str, done: str = "") -> CommandFailed:
    return CommandFailed(f"model '{model}' has no dead letter {letter_id}{done}; list them: qinfer dlq list {model}")


def _row(letter: DeadLetter) -> dict[str, Any]:
    """`buried_at` is UTC, in ISO 8601."""
    names = ("id", "model", "request_id", "version", "lane", "code", "reason", "deliveries", "buried_at", "size")
    own = {"model": letter.lane.model, "version": letter.lane.version, "lane": letter.lane.name}
    own["buried_at"] = datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="milliseconds")
    return {name: own[name] if name in own else getattr(letter, name) for name in names}


def _write(path: Path, content: Tensor | bytes) -> Path:
    """BYTES, or damaged data, become raw bytes, because objects would have to be pickled."""
    if isinstance(content, bytes):
        path.write_bytes(content)
        return path
    try:
        array = to_numpy(content)
    except RequestError:
        array = None
    if array is None or array.dtype.hasobject:
        return _write(path.with_name(f"{path.name}.bin"), bytes(content.data))
    path = path.with_name(f"{path.name}.npy")
    np.save(path, array, allow_pickle=False)
    return path
