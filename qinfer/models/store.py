"""Desired state, configurations, heartbeats and statistics in Redis; nothing here runs once per request.

Values are JSON, readable in `redis-cli`. Values with several writers are guarded by their generation in scripts.
Processes read the desired state at start, on reconnect, when woken, and every 10 s.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from qinfer.errors import BrokerUnavailable
from qinfer.models.pins import Pin
from qinfer.models.state import DesiredState, ScalerRecord, Speed, StoredModel, WorkerRecord
from qinfer.observe.stats import LATEST
from qinfer.queue import keys
from qinfer.queue.connection import mapped
from qinfer.queue.router import load_script
from qinfer.wire.versions import NewerVersion, decode_document, encode_document

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

SettingValue = bool | int | str | list[str] | None
"""`None` = cleared."""

_MAX_BLOCK_S = 2.0  # below the client's socket timeout
_WAKES_KEPT = 16
_METRICS = "metrics"
_MAX_DIGITS = 20
_MOST_REASONS = 1000

_PUT_MODEL = load_script("put_model", package="qinfer.models").text
_SET_DESIRED = load_script("set_desired", package="qinfer.models").text
_EXCHANGE = load_script("exchange", package="qinfer.models").text
_ADD_STATS = load_script("add_stats", package="qinfer.models").text
_LIVENESS = load_script("liveness", "now_ms", package="qinfer.models").text
_EXPIRING = load_script("expiring", "now_ms", package="qinfer.models").text


class ControlStore:
    """Control data in Redis; coroutines raise `BrokerUnavailable` if it is away."""

    def __init__(self, client: Any) -> None:  # Any: the two clients share no typed interface
        self.client = client
        self._records = StoredRecords()
        self._desired: dict[str, DesiredState] = {}
        self._last_wakes: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()

    async def installation(self) -> str:
        """Returns the id of the data, if any."""
        with translated():
            value = await self.client.get(keys.installation())
        return "" if value is None else _decode_text(value)

    async def exchange_installation(self, seen: str, new: str, ttl_s: float = 0.0) -> str:
        """Replaces the id if it is `seen` (empty = none); returns the present id."""
        with translated():
            return _decode_text(await self.client.eval(_EXCHANGE, 1, keys.installation(), seen, new, int(ttl_s * 1000)))

    async def has_model(self, name: str) -> bool:
        """Tells whether a configuration is stored, readable or not."""
        with translated():
            return await self.client.hget(keys.config(name), "model") is not None

    async def wished(self) -> set[str]:
        """Returns the desired models, readable or not."""
        with translated():
            return {_decode_text(name) for name in await self.client.hgetall(keys.desired())}

    async def desired(self) -> dict[str, DesiredState]:
        """Returns all wishes; damaged records keep their last."""
        with translated():
            values = await self.client.hgetall(keys.desired())
        read = {_decode_text(model): value for model, value in values.items()}
        known = {model: desired for model, desired in self._desired.items() if model in read}
        self._desired = known | self._records.all(read, DesiredState)
        return dict(self._desired)

    async def set_desired(self, desired: DesiredState) -> None:
        """Writes a desired state, unless a newer generation is stored."""
        with translated():
            await self.client.eval(
                _SET_DESIRED, 1, keys.desired(), desired.model, desired.generation, encode_document(desired)
            )

    async def model(self, name: str) -> StoredModel | None:
        """Returns a model's stored configuration."""
        with translated():
            value = await self.client.hget(keys.config(name), "model")
        return None if value is None else self._records.one(value, StoredModel, name)

    async def models(self, names: Collection[str]) -> dict[str, StoredModel]:
        """Returns the stored configurations of models."""
        with translated():
            values = await self._fields([(keys.config(name), "model") for name in names])
        return self._records.all(dict(zip(names, values, strict=True)), StoredModel)

    async def put_model(self, stored: StoredModel) -> bool:
        """Stores a configuration, unless its generation is not newer."""
        with translated():
            written = await self.client.eval(
                _PUT_MODEL, 1, keys.config(stored.model), stored.generation, encode_document(stored)
            )
        return bool(written)

    async def heartbeat(self, record: WorkerRecord, ttl_s: float) -> None:
        """Writes a worker's record."""
        key = keys.worker(record.id)
        with translated():
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hset(key, "record", encode_document(record))
                pipe.pexpire(key, int(ttl_s * 1000))
                pipe.zadd(keys.workers(), {record.id: time.time()})
                await pipe.execute()

    async def put_model_metrics(self, worker_id: str, record: bytes, ttl_s: float) -> None:
        """Writes the custom metrics of a worker's models."""
        key = keys.worker(worker_id)
        with translated():
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hset(key, _METRICS, record)
                pipe.pexpire(key, int(ttl_s * 1000))
                await pipe.execute()

    async def model_metrics(self, workers: Collection[str]) -> list[bytes | None]:
        """Returns the models' custom metrics."""
        with translated():
            return await self._fields([(keys.worker(worker_id), _METRICS) for worker_id in workers])

    async def retire(self, worker_id: str) -> None:
        """Removes a worker's record."""
        with translated():
            await self.client.delete(keys.worker(worker_id))
            await self.client.zrem(keys.workers(), worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """Returns live workers; removes dead workers from the index."""
        with translated():
            ids = [_decode_text(id_) for id_ in await self.client.zrange(keys.workers(), 0, -1)]
            values = await self._fields([(keys.worker(worker_id), "record") for worker_id in ids])
            # A worker that beats now returns with its next heartbeat.
            dead = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
            if dead:
                await self.client.zrem(keys.workers(), *dead)
        return list(self._records.all(dict(zip(ids, values, strict=True)), WorkerRecord).values())

    async def beats(self) -> dict[str, float]:
        """Returns each worker's last heartbeat by its own clock."""
        with translated():
            found = await self.client.zrange(keys.workers(), 0, -1, withscores=True)
        return {_decode_text(worker_id): at for worker_id, at in found}

    async def report_liveness(self, program: str, process: str, ttl_s: float) -> None:
        """Marks a process of a program as live."""
        with translated():
            await self.client.eval(_LIVENESS, 1, keys.liveness(program), process, int(ttl_s * 1000))

    async def live_processes(self, program: str) -> list[str]:
        """Returns a program's live processes, sorted."""
        with translated():
            return sorted(map(_decode_text, await self.client.eval(_LIVENESS, 1, keys.liveness(program))))

    async def put_scaler(self, record: ScalerRecord, counts: Mapping[str, int], ttl_s: float) -> None:
        """Writes an autoscaler's record, and adds to all counts."""
        with translated():
            words = (record.id, int(ttl_s * 1000), encode_document(record))
            await self.client.eval(_EXPIRING, 1, keys.scalers(), *words)
            for name, count in counts.items():
                await self.client.hincrby(keys.scaler_counts(), name, count)

    async def scalers(self) -> list[ScalerRecord]:
        """Returns the live autoscalers, by id."""
        return await self._live(keys.scalers(), ScalerRecord)

    async def scaler_counts(self) -> dict[str, int]:
        """Returns all autoscalers' counts."""
        with translated():
            values = await self.client.hgetall(keys.scaler_counts())
        return self._records.counts(values, "autoscalers")

    async def put_pin(self, pin: Pin, ttl_s: float) -> None:
        """Writes a pin; a `ttl_s` of 0 removes it."""
        with translated():
            words = (pin.id, int(ttl_s * 1000), encode_document(pin))
            await self.client.eval(_EXPIRING, 1, keys.pins(), *words)

    async def pins(self) -> list[Pin]:
        """Returns all live pins, by id."""
        return await self._live(keys.pins(), Pin)

    async def put_speed(self, model: str, version: int, speed: Speed) -> None:
        """Stores a measured speed, which outlives its worker."""
        with translated():
            await self.client.hset(keys.config(model), _speed_field(version), encode_document(speed))

    async def speeds(self, versions: Collection[tuple[str, int]]) -> dict[tuple[str, int], Speed]:
        """Returns the stored speeds of versions."""
        with translated():
            values = await self._fields([(keys.config(model), _speed_field(version)) for model, version in versions])
        return self._records.all(dict(zip(versions, values, strict=True)), Speed)

    async def put_completion(self, content_hash: str, completed: str) -> None:
        """Stores a completed configuration by content; the first stays."""
        with translated():
            await self.client.hsetnx(keys.completions(), content_hash, completed)

    async def completion(self, content_hash: str) -> str | None:
        """Returns the value of `put_completion`."""
        with translated():
            value = await self.client.hget(keys.completions(), content_hash)
        return None if value is None else _decode_text(value)

    async def put_setting(self, name: str, value: str) -> None:
        """Stores a setting (JSON), such as `logging`."""
        with translated():
            await self.client.hset(keys.settings(), name, value)

    async def settings(self) -> dict[str, str]:
        """Returns the values of `put_setting`, by name."""
        with translated():
            values = await self.client.hgetall(keys.settings())
        read = {_decode_text(name): value for name, value in values.items()}
        return {name: value.decode() for name, value in read.items() if self._records.is_setting(value, name)}

    async def wake(self) -> None:
        """Wakes every waiting process."""
        with translated():
            await self.client.xadd(keys.control(), {"wake": ""}, maxlen=_WAKES_KEPT, approximate=False)

    async def wait(self, timeout_s: float) -> bool:
        """Waits for a `wake` since the last call; may return early."""
        task = asyncio.current_task()
        assert task is not None
        last = self._last_wakes.get(task, "0-0")
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            block_ms = max(int(min(left_s, _MAX_BLOCK_S) * 1000), 1)
            with translated():
                streams = await self.client.xread({keys.control(): last}, block=block_ms)
            if streams:
                self._last_wakes[task] = _last_id(streams)
                return True
        return False

    async def hint_of_endpoint(self, name: str) -> str:
        """Returns a hint that an unknown model is an endpoint."""
        with translated():
            is_one = await self.client.hexists(keys.endpoints(), name)
        why = f"; '{name}' is an endpoint, and steps name models: write the model and version of a target"
        return why if is_one else ""

    async def add_stats(self, model: str, version: int, deltas: Mapping[str, int]) -> None:
        """Adds to a version's statistics; `LATEST` fields keep the greatest."""
        if not deltas:
            return
        instants = [(name, deltas[name]) for name in LATEST if name in deltas]
        sums = [(name, delta) for name, delta in deltas.items() if name not in LATEST]
        pairs = [word for pair in (*instants, *sums) for word in pair]
        with translated():  # one command, as the event loop packs hundreds of fields
            await self.client.eval(_ADD_STATS, 1, keys.stats(model, version), len(instants), *pairs)

    async def stats(self, model: str, version: int) -> dict[str, int]:
        """Returns a version's statistics."""
        return (await self.all_stats([(model, version)]))[model, version]

    async def all_stats(self, versions: Collection[tuple[str, int]]) -> dict[tuple[str, int], dict[str, int]]:
        """Returns versions' statistics."""
        found: list[Mapping[bytes, bytes] | Exception] = []
        if versions:
            with translated():
                async with self.client.pipeline(transaction=False) as pipe:
                    for model, version in versions:
                        pipe.hgetall(keys.stats(model, version))
                    found = await pipe.execute(raise_on_error=False)
                wrong = next((each for each in found if isinstance(each, Exception) and not _is_wrong_type(each)), None)
                if wrong is not None:
                    raise wrong
        pairs = zip(versions, found, strict=True)
        return {version: self._records.counts(values, _format_version(version)) for version, values in pairs}

    async def some_stats(
        self, versions: Collection[tuple[str, int]], fields: Collection[str]
    ) -> dict[tuple[str, int], dict[str, int]]:
        """Returns chosen statistics."""
        wanted = [(keys.stats(model, version), name) for model, version in versions for name in fields]
        with translated():
            values = iter(await self._fields(wanted))
        read = {key: {name.encode(): next(values) for name in fields} for key in versions}
        return {
            key: self._records.counts({name: raw for name, raw in of.items() if raw is not None}, _format_version(key))
            for key, of in read.items()
        }

    async def close(self) -> None:
        """Closes the connections."""
        await self.client.aclose()

    async def _live(self, key: str, kind: type[T]) -> list[T]:
        with translated():
            words = iter(await self.client.eval(_EXPIRING, 1, key))
        read = self._records.all(dict(zip(map(_decode_text, words), words, strict=True)), kind)
        return [read[id_] for id_ in sorted(read)]

    async def _fields(self, wanted: list[tuple[str, str]]) -> list[bytes | None]:
        if not wanted:
            return []
        async with self.client.pipeline(transaction=False) as pipe:
            for key, name in wanted:
                pipe.hget(key, name)
            return await pipe.execute()  # type: ignore[no-any-return]  # redis-py says no more of it


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
    """Returns whether redis-py has raised the error, as its cluster client does when nodes leave."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("redis.") for frame, _ in frames)


class StoredRecords:
    """Reads stored records; logs and skips unreadable records."""

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
            name = _decode_text(field)
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


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def _format_version(version: tuple[str, int]) -> str:
    return f"version {version[1]} of {version[0]}"


def _speed_field(version: int) -> str:
    return f"speed:{version}"


def _decode_text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _last_id(streams: Any) -> str:
    """Returns the last entry's id; the reply to XREAD is a map with RESP3."""
    entries = next(iter(streams.values()))[0] if isinstance(streams, dict) else streams[0][1]
    return _decode_text(entries[-1][0])
