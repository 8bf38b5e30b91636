"""Control records in Redis: redis-py's errors as `BrokerUnavailable`, and unreadable records skipped."""

import asyncio
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from qinfer.errors import BrokerUnavailable
from qinfer.queue.connection import mapped
from qinfer.wire.versions import NewerVersion, decode_document

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

SettingValue = bool | int | str | list[str] | None

_MAX_DIGITS = 20
_MOST_REASONS = 1000


@contextmanager
def translated() -> Iterator[None]:
    """Turns redis-py's connection errors into `BrokerUnavailable`."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError) as error:  # redis-py lets some through
        _check_cancelled()
        raise _unreachable(error) from error
    except (AttributeError, RuntimeError) as error:
        if not _is_raised_by_redis_py(error):
            raise
        _check_cancelled()
        raise _unreachable(error) from error
    _check_cancelled()


def _check_cancelled() -> None:
    """Raises a cancellation that redis-py has lost, without which a loop would never end.

    On Python 3.11, its `asyncio.wait_for` loses one if the send completes at the same time
    (https://github.com/python/cpython/issues/86296); an error during the close of a connection replaces one.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _unreachable(error: Exception) -> BrokerUnavailable:
    text = str(error).rpartition("caused error: ")[2]  # a pipeline puts the command before it
    if isinstance(meant := mapped(ResponseError(text)), BrokerUnavailable):
        return meant
    return BrokerUnavailable(f"the control store can't be reached: {type(error).__name__}")


def _is_raised_by_redis_py(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("redis.") for frame, _ in frames)


class StoredRecords:
    """Reads stored records; logs and skips unreadable ones."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}

    def one(self, value: bytes, kind: type[T], whose: str) -> T | None:
        """Returns a record, if it can be read."""
        try:
            record = decode_document(value, kind)
        except (NewerVersion, msgspec.DecodeError) as error:
            self._log_unusable(kind.__name__, whose, str(error))
            return None
        self._is_well(kind.__name__, whose)
        return record

    def all(self, values: Mapping[K, bytes | None], kind: type[T]) -> dict[K, T]:
        """Returns the readable records."""
        read = {whose: self.one(value, kind, str(whose)) for whose, value in values.items() if value is not None}
        return {whose: record for whose, record in read.items() if record is not None}

    def counts(self, values: Mapping[bytes, bytes] | Exception, whose: str) -> dict[str, int]:
        """Returns the numeric fields of a hash."""
        if isinstance(values, Exception):
            self._log_unusable("counts", whose, str(values))
            return {}
        self._is_well("counts", whose)
        found = {}
        for field, value in values.items():
            name = decode_text(field)
            try:
                found[name] = _number(value)
            except ValueError:
                self._log_unusable("counts", f"{whose}: {name}", "it is not a number")
            else:
                self._is_well("counts", f"{whose}: {name}")
        return found

    def is_setting(self, value: bytes, name: str) -> bool:
        """Tells whether a setting's value is valid."""
        try:
            msgspec.json.decode(value, type=SettingValue)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._log_unusable("setting", name, str(error))
            return False
        self._is_well("setting", name)
        return True

    def _is_well(self, kind: str, whose: str) -> None:
        if self._reasons:
            self._reasons.pop((kind, whose), None)

    def _log_unusable(self, kind: str, whose: str, reason: str) -> None:
        if self._reasons.get((kind, whose)) == reason:
            return
        if len(self._reasons) >= _MOST_REASONS:  # damaged records may have arbitrary names
            self._reasons.clear()
        self._reasons[kind, whose] = reason
        logger.error("stored record unusable", extra={"kind": kind, "whose": whose, "error": reason})


def _number(value: bytes) -> int:
    if len(value) > _MAX_DIGITS:
        raise ValueError("it has too many digits")
    return int(value)


def entries_of(streams: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """Returns the entries of the one stream in a reply to XREAD, which is a map with RESP3."""
    if not streams:
        return []
    return list(next(iter(streams.values()))[0] if isinstance(streams, dict) else streams[0][1])


def decode_text(value: bytes | str) -> str:
    """Returns a name that either client has read."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
