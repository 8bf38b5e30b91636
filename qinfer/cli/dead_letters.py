"""The work of `qinfer dlq`."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
import numpy as np

from qinfer.cli.console import CommandFailed
from qinfer.cli.overview import connected
from qinfer.core.messages import InferRequest, Scalar
from qinfer.core.settings import RedisSettings, load_settings
from qinfer.errors import CorruptEntry, InvalidRequest, RequestError
from qinfer.queue.dead_letters import DeadLetter, DeadLetters, place_after
from qinfer.queue.lanes import Queue
from qinfer.tensors import Tensor, to_numpy
from qinfer.wire.frame import decode_request

T = TypeVar("T")

_PAGE = 500
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `qinfer dlq list`; `buried_at` is UTC, in ISO 8601."""

    id: str
    model: str
    request_id: str
    version: int
    lane: str
    code: str
    reason: str
    deliveries: int
    buried_at: str
    size: int


class InputRow(msgspec.Struct, frozen=True, kw_only=True):
    """An input of a request; `size` in bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


class DeadLetterDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `qinfer dlq show`."""

    SYNCHRONOUS: ClassVar[str] = "synchronous request"
    ASYNCHRONOUS: ClassVar[str] = "asynchronous request"
    UNREADABLE: ClassVar[str] = "unreadable"

    row: DeadLetterRow
    kind: str
    timeout_s: float = 0.0
    tenant: str = ""
    parameters: dict[str, Scalar] = msgspec.field(default_factory=dict)
    inputs: tuple[InputRow, ...] = ()
    problem: str = ""
    written: tuple[str, ...] = ()


def choose(ids: Sequence[str] | None, *, everything: bool) -> Sequence[str] | None:
    """Returns the ids of the dead letters to process; `None` = all."""
    if bool(ids) == everything:
        raise InvalidRequest("name dead letters by their ids, or give --all; `qinfer dlq list MODEL` lists them")
    for letter_id in ids or ():
        place_after(letter_id)  # refuses a malformed id
    return ids or None


def require_yes(*, yes: bool) -> None:
    """Checks that `--yes` was given."""
    if not yes:
        raise InvalidRequest("purge removes dead letters for good; add --yes to confirm")


def run_list(settings: RedisSettings, model: str, after: str, count: int) -> list[DeadLetterRow]:
    """Returns a page of a model's dead letters."""
    page = _run_operation(settings, lambda letters: letters.list(model, after=after, count=count), needs_payloads=False)
    return [_row(letter) for letter in page]


def run_list_all(settings: RedisSettings, count: int) -> list[DeadLetterRow]:
    """Returns the oldest dead letters of each model, at most `count`."""

    async def listed() -> list[DeadLetterRow]:
        async with connected(settings) as (store, queue):
            models = sorted(await store.desired())
            pages = [await queue.dead_letters.list(model, count=count) for model in models]
        return [_row(letter) for page in pages for letter in page]

    return asyncio.run(listed())


def run_show(settings: RedisSettings, model: str, letter_id: str, directory: Path | None) -> DeadLetterDetails:
    """Returns a decoded dead letter; writes its tensors to `directory`."""
    place_after(letter_id)
    letter = _run_operation(settings, lambda letters: letters.show(model, letter_id))
    if letter is None:
        raise _missing(model, letter_id)
    try:
        request = decode_request(letter.frame, letter.payload)
    except CorruptEntry as error:
        files = {"frame.bin": letter.frame}
        return DeadLetterDetails(
            row=_row(letter),
            kind=DeadLetterDetails.UNREADABLE,
            problem=error.message,
            written=_written(directory, files=files),
        )
    return _letter(letter, request, _written(directory, request.inputs))


def run_replay(settings: RedisSettings, model: str, ids: Sequence[str] | None) -> int:
    """Puts dead letters back; returns their number."""

    async def replay(letters: DeadLetters) -> int:
        count = 0
        for letter_id in await _all_ids(letters, model) if ids is None else ids:
            if await letters.replay(model, letter_id):
                count += 1
            elif ids is not None:
                raise _missing(model, letter_id, f"; {count} were put back")
        return count

    return _run_operation(settings, replay)


def run_purge(settings: RedisSettings, model: str, ids: Sequence[str] | None) -> int:
    """Removes dead letters; returns their number."""
    return _run_operation(settings, lambda letters: letters.purge(model, ids))


def _run_operation(
    settings: RedisSettings, operation: Callable[[DeadLetters], Awaitable[T]], *, needs_payloads: bool = True
) -> T:
    limits = load_settings().limits if needs_payloads else None  # with the payload store

    async def run() -> T:
        delivery = await Queue.connect(settings, limits)
        try:
            return await operation(delivery.dead_letters)
        finally:
            await delivery.close()

    return asyncio.run(run())


async def _all_ids(letters: DeadLetters, model: str) -> list[str]:
    """Returns all ids first: a letter that fails again is replayed once."""
    ids: list[str] = []
    while page := await letters.list(model, after=ids[-1] if ids else "", count=_PAGE):
        ids += [letter.id for letter in page]
    return ids


def _missing(model: str, letter_id: str, done: str = "") -> CommandFailed:
    return CommandFailed(f"model '{model}' has no dead letter {letter_id}{done}; list them: qinfer dlq list {model}")


def _row(letter: DeadLetter) -> DeadLetterRow:
    return DeadLetterRow(
        id=letter.id,
        model=letter.lane.model,
        request_id=letter.request_id,
        version=letter.lane.version,
        lane=letter.lane.name,
        code=letter.code,
        reason=letter.reason,
        deliveries=letter.deliveries,
        buried_at=datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="milliseconds"),
        size=letter.size,
    )


def _letter(letter: DeadLetter, request: InferRequest, written: tuple[str, ...]) -> DeadLetterDetails:
    return DeadLetterDetails(
        row=_row(letter),
        kind=DeadLetterDetails.SYNCHRONOUS if request.reply_to else DeadLetterDetails.ASYNCHRONOUS,
        timeout_s=request.timeout_s,
        tenant=request.tenant,
        parameters=dict(request.parameters),
        inputs=tuple(
            InputRow(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, size=tensor.nbytes)
            for tensor in request.inputs
        ),
        written=written,
    )


def _written(
    directory: Path | None, tensors: Sequence[Tensor] = (), files: dict[str, bytes] | None = None
) -> tuple[str, ...]:
    if directory is None:
        return ()
    paths: list[str] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, tensor in enumerate(tensors):
            # must not become a path
            stem = f"{number}-{_UNSAFE.sub('_', tensor.name)[:100]}"
            paths.append(str(_write_tensor(directory / stem, tensor)))
        for name, data in (files or {}).items():
            (directory / name).write_bytes(data)
            paths.append(str(directory / name))
    except OSError as error:
        raise CommandFailed(f"the tensors can't be written to {directory}: {error.strerror or error}") from None
    return tuple(paths)


def _write_tensor(stem: Path, tensor: Tensor) -> Path:
    """BYTES, or damaged data, become raw bytes."""
    try:
        array = to_numpy(tensor)
    except RequestError:
        array = None
    # Objects would have to be pickled.
    if array is None or array.dtype.hasobject:
        path = stem.with_name(f"{stem.name}.bin")
        path.write_bytes(tensor.data)
    else:
        path = stem.with_name(f"{stem.name}.npy")
        np.save(path, array, allow_pickle=False)
    return path
