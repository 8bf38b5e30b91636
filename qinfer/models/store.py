"""Desired state, configurations, heartbeats and statistics in Redis; nothing here runs once per request.

Settings that clients change while the server runs are one document for each value; `null` = cleared.

Values are JSON, readable in `redis-cli`. Values with several writers are guarded by their generation in scripts.
Processes read the desired state at start, on reconnect, when woken, and every 10 s.

Two short streams carry questions and answers on counts: readers of statistics ask workers to push their counts, and an
answer also has the requests under way. Without questions, workers push every second. Both streams have ids from one
Redis clock, so that a reader skips older answers.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from redis.exceptions import ResponseError

from qinfer.errors import BrokerUnavailable
from qinfer.models.readiness import Pin
from qinfer.models.state import DesiredState, ModelPause, ScalerRecord, Speed, StoredModel, WorkerRecord
from qinfer.observe import logs
from qinfer.observe.logs import RecentLine, Switches, WorkerLog
from qinfer.observe.stats import LATEST
from qinfer.queue import keys
from qinfer.queue.router import load_script
from qinfer.queue.stored_records import SettingValue, StoredRecords, decode_text, entries_of, translated
from qinfer.wire.versions import encode_document

T = TypeVar("T")

_MAX_BLOCK_S = 2.0  # below the client's socket timeout
_WAKES_KEPT = 16
LIVENESS_EVERY_S = 3.0
LIVENESS_HOLDS_S = 15.0
"""Longer than a failover of Redis, or a delay of the event loop."""

_LEAVE_S = 1.0
_METRICS, _DRAIN = "metrics", "drain"
_TENSORS = "tensors"

_PUT_MODEL = load_script("put_model", package="qinfer.models").text
_SET_DESIRED = load_script("set_desired", package="qinfer.models").text
_ASK_DRAIN = load_script("ask_drain", package="qinfer.models").text
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
        value = await _reply(self.client.get(keys.installation()))
        return "" if value is None else decode_text(value)

    async def exchange_installation(self, seen: str, new: str, ttl_s: float = 0.0) -> str:
        """Replaces the id if it is `seen` (empty = none); returns the present id."""
        words = (seen, new, int(ttl_s * 1000))
        return decode_text(await _reply(self.client.eval(_EXCHANGE, 1, keys.installation(), *words)))

    async def segment_secret(self) -> bytes:
        """Returns the secret of processes that share memory; the first one makes it."""
        key = keys.segment_secret()
        if not (secret := await _reply(self.client.get(key))):  # a full Redis refuses to set it
            await _reply(self.client.set(key, secrets.token_hex(32), nx=True))
            secret = await _reply(self.client.get(key))
        return bytes(secret or b"")

    async def has_model(self, name: str) -> bool:
        """Tells whether a configuration is stored, readable or not."""
        return await _reply(self.client.hget(keys.config(name), "model")) is not None

    async def wished(self) -> set[str]:
        """Returns the desired models, readable or not."""
        return {decode_text(name) for name in await _reply(self.client.hgetall(keys.desired()))}

    async def desired(self) -> dict[str, DesiredState]:
        """Returns all desired states; of a damaged record, the last one that could be read."""
        values = await _reply(self.client.hgetall(keys.desired()))
        read = {decode_text(model): value for model, value in values.items()}
        known = {model: desired for model, desired in self._desired.items() if model in read}
        self._desired = known | self._records.all(read, DesiredState)
        return dict(self._desired)

    async def set_desired(self, desired: DesiredState) -> None:
        """Writes a desired state, unless a newer generation is stored."""
        words = (desired.model, desired.generation, encode_document(desired))
        await _reply(self.client.eval(_SET_DESIRED, 1, keys.desired(), *words))

    async def model(self, name: str) -> StoredModel | None:
        """Returns a model's stored configuration."""
        value = await _reply(self.client.hget(keys.config(name), "model"))
        return None if value is None else self._records.one(value, StoredModel, name)

    async def models(self, names: Collection[str]) -> dict[str, StoredModel]:
        """Returns the stored configurations of models."""
        values = await self._fields([(keys.config(name), "model") for name in names])
        return self._records.all(dict(zip(names, values, strict=True)), StoredModel)

    async def put_model(self, stored: StoredModel) -> bool:
        """Stores a configuration, unless its generation is not newer."""
        words = (stored.generation, encode_document(stored))
        return bool(await _reply(self.client.eval(_PUT_MODEL, 1, keys.config(stored.model), *words)))

    async def heartbeat(self, record: WorkerRecord, ttl_s: float) -> str | None:
        """Writes a worker's record; returns the key that has asked the worker to drain, `None` = no one has."""
        key = keys.worker(record.id)
        with translated():
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hset(key, "record", encode_document(record))
                pipe.pexpire(key, int(ttl_s * 1000))
                pipe.zadd(keys.workers(), {record.id: time.time()})
                pipe.hget(key, _DRAIN)
                asked = (await pipe.execute())[-1]
        return None if asked is None else decode_text(asked)

    async def ask_drain(self, worker_id: str, by: str) -> bool:
        """Asks a worker to drain, as SIGTERM does, at its next heartbeat; returns false unless it is alive."""
        return bool(await _reply(self.client.eval(_ASK_DRAIN, 1, keys.worker(worker_id), by)))

    async def put_worker_log(self, worker_id: str, log: WorkerLog, ttl_s: float) -> None:
        """Writes the last lines of a worker's log, which outlive it by `ttl_s`."""
        await _reply(self.client.set(keys.worker_log(worker_id), encode_document(log), px=int(ttl_s * 1000)))

    async def worker_log(self, worker_id: str) -> list[RecentLine]:
        """Returns a worker's last warnings and errors, newest first; none of a worker that is unknown."""
        found = await _reply(self.client.get(keys.worker_log(worker_id)))
        log = None if found is None else self._records.one(found, WorkerLog, worker_id)
        return [] if log is None else log.lines

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
        return await self._fields([(keys.worker(worker_id), _METRICS) for worker_id in workers])

    async def retire(self, worker_id: str) -> None:
        """Removes a worker's record."""
        with translated():
            await self.client.delete(keys.worker(worker_id))
            await self.client.zrem(keys.workers(), worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """Returns live workers; removes dead workers from the index."""
        ids = [decode_text(id_) for id_ in await _reply(self.client.zrange(keys.workers(), 0, -1))]
        values = await self._fields([(keys.worker(worker_id), "record") for worker_id in ids])
        # A worker that beats now returns with its next heartbeat.
        dead = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
        if dead:
            await _reply(self.client.zrem(keys.workers(), *dead))
        return list(self._records.all(dict(zip(ids, values, strict=True)), WorkerRecord).values())

    async def beats(self) -> dict[str, float]:
        """Returns each worker's last heartbeat by its own clock."""
        found = await _reply(self.client.zrange(keys.workers(), 0, -1, withscores=True))
        return {decode_text(worker_id): at for worker_id, at in found}

    async def report_liveness(self, program: str, process: str, ttl_s: float) -> None:
        """Marks a process of a program as live."""
        await _reply(self.client.eval(_LIVENESS, 1, keys.liveness(program), process, int(ttl_s * 1000)))

    async def live_processes(self, program: str) -> list[str]:
        """Returns a program's live processes, sorted."""
        return sorted(map(decode_text, await _reply(self.client.eval(_LIVENESS, 1, keys.liveness(program)))))

    def announce_tensors(self, process: str) -> Coroutine[Any, Any, NoReturn]:
        """Tells until cancelled that others read the tensors of `<name>@<host>:<port>`."""
        return report_liveness(self, process, _TENSORS)

    async def announced_tensors(self) -> list[str]:
        """Returns what live processes tell by `announce_tensors`."""
        return await self.live_processes(_TENSORS)

    async def take_sweep(self, ttl_s: float) -> bool:
        """Takes the turn to look for stuck jobs; returns false while another bulk worker has it."""
        return bool(await _reply(self.client.set(keys.sweep(), "1", nx=True, px=int(ttl_s * 1000))))

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
        values = await _reply(self.client.hgetall(keys.scaler_counts()))
        return self._records.counts(values, "autoscalers")

    async def pauses(self) -> dict[tuple[str, int], ModelPause]:
        """Returns the pauses by model and version."""
        values = await _reply(self.client.hgetall(keys.pauses()))
        found = self._records.all({decode_text(name): value for name, value in values.items()}, ModelPause)
        return {(pause.model, pause.version): pause for pause in found.values()}

    async def put_pause(self, pause: ModelPause) -> None:
        """Pauses a model or version; a repetition changes its reason."""
        await _reply(self.client.hset(keys.pauses(), _pause_field(pause.model, pause.version), encode_document(pause)))
        await self.wake()

    async def remove_pause(self, model: str, version: int) -> bool:
        """Ends a pause; returns whether there was one."""
        is_removed = bool(await _reply(self.client.hdel(keys.pauses(), _pause_field(model, version))))
        await self.wake()
        return is_removed

    async def put_pin(self, pin: Pin, ttl_s: float) -> None:
        """Writes a pin; a `ttl_s` of 0 removes it."""
        words = (pin.id, int(ttl_s * 1000), encode_document(pin))
        await _reply(self.client.eval(_EXPIRING, 1, keys.pins(), *words))

    async def pins(self) -> list[Pin]:
        """Returns all live pins, by id."""
        return await self._live(keys.pins(), Pin)

    async def put_speed(self, model: str, version: int, speed: Speed) -> None:
        """Stores a measured speed, which outlives its worker."""
        await _reply(self.client.hset(keys.config(model), _speed_field(version), encode_document(speed)))

    async def speeds(self, versions: Collection[tuple[str, int]]) -> dict[tuple[str, int], Speed]:
        """Returns the stored speeds of versions."""
        values = await self._fields([(keys.config(model), _speed_field(version)) for model, version in versions])
        return self._records.all(dict(zip(versions, values, strict=True)), Speed)

    async def put_completion(self, content_hash: str, completed: str) -> None:
        """Stores a completed configuration by content; the first stays."""
        await _reply(self.client.hsetnx(keys.completions(), content_hash, completed))

    async def completion(self, content_hash: str) -> str | None:
        """Returns the value of `put_completion`."""
        value = await _reply(self.client.hget(keys.completions(), content_hash))
        return None if value is None else decode_text(value)

    async def put_setting(self, name: str, value: str) -> None:
        """Stores a setting (JSON), such as `logging`."""
        await _reply(self.client.hset(keys.settings(), name, value))

    async def settings(self) -> dict[str, str]:
        """Returns the values of `put_setting`, by name."""
        values = await _reply(self.client.hgetall(keys.settings()))
        read = {decode_text(name): value for name, value in values.items()}
        return {name: value.decode() for name, value in read.items() if self._records.is_setting(value, name)}

    async def wake(self) -> None:
        """Wakes every waiting process."""
        await _reply(self.client.xadd(keys.control(), {"wake": ""}, maxlen=_WAKES_KEPT, approximate=False))

    async def wait(self, timeout_s: float) -> bool:
        """Waits for a `wake` since the last call; may return early."""
        task = asyncio.current_task()
        assert task is not None
        last = self._last_wakes.get(task, "0-0")
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            block_ms = max(int(min(left_s, _MAX_BLOCK_S) * 1000), 1)
            if entries := entries_of(await _reply(self.client.xread({keys.control(): last}, block=block_ms))):
                self._last_wakes[task] = decode_text(entries[-1][0])
                return True
        return False

    async def hint_of_endpoint(self, name: str) -> str:
        """Returns a hint that an unknown model is an endpoint."""
        is_one = await _reply(self.client.hexists(keys.endpoints(), name))
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
        words = iter(await _reply(self.client.eval(_EXPIRING, 1, key)))
        read = self._records.all(dict(zip(map(decode_text, words), words, strict=True)), kind)
        return [read[id_] for id_ in sorted(read)]

    async def _fields(self, wanted: list[tuple[str, str]]) -> list[bytes | None]:
        if not wanted:
            return []
        with translated():
            async with self.client.pipeline(transaction=False) as pipe:
                for key, name in wanted:
                    pipe.hget(key, name)
                return await pipe.execute()  # type: ignore[no-any-return]  # redis-py says no more of it


async def report_liveness(store: ControlStore, name: str, program: str) -> NoReturn:
    """Reports every few seconds that `<name>@<host>` is live, until cancelled."""
    try:
        while True:
            with suppress(BrokerUnavailable):
                await store.report_liveness(program, name, LIVENESS_HOLDS_S)
            await asyncio.sleep(LIVENESS_EVERY_S)
    finally:
        with suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await store.report_liveness(program, name, 0.0)


async def _reply(command: Awaitable[Any]) -> Any:
    with translated():
        return await command


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def _format_version(version: tuple[str, int]) -> str:
    return f"version {version[1]} of {version[0]}"


def _pause_field(model: str, version: int) -> str:
    return f"{version}:{model}"


def _speed_field(version: int) -> str:
    return f"speed:{version}"


LOGGING = "logging"
TRACE = "trace"
"""The trace settings; `trace:<model>` has those of one model."""

FOLLOW_EVERY_S = 2.0
"""The longest delay of a change through another gateway."""


def of_group(stored: Mapping[str, str], group: str) -> dict[str, SettingValue]:
    """Returns the values of a group, without cleared values."""
    values: dict[str, SettingValue] = {}
    prefix = f"{group}/"
    for name, document in stored.items():
        if name.startswith(prefix):
            value: SettingValue = msgspec.json.decode(document, type=SettingValue)
            if value is not None:
                values[name.removeprefix(prefix)] = value
    return values


async def put_group(store: ControlStore, group: str, values: Mapping[str, SettingValue]) -> None:
    """Stores a group's values; `None` clears one."""
    for name, value in values.items():
        await store.put_setting(f"{group}/{name}", msgspec.json.encode(value).decode())


def switches_of(values: Mapping[str, SettingValue], first: Switches) -> Switches:
    """Returns the stored log switches, by default the process's own."""
    verbose = values.get("log_verbose_level", first.verbose_level)
    return Switches(
        info=bool(values.get("log_info", first.info)),
        warning=bool(values.get("log_warning", first.warning)),
        error=bool(values.get("log_error", first.error)),
        verbose_level=verbose if isinstance(verbose, int) else first.verbose_level,
        iso8601=values.get("log_format") == "ISO8601",
    )


async def follow_log_settings(store: ControlStore, first: Switches) -> None:
    """Applies stored log settings until cancelled."""
    applied: Switches | None = None
    while True:
        try:
            values = of_group(await store.settings(), LOGGING)
        except BrokerUnavailable:
            values = {}
        if values:
            wanted = switches_of(values, first)
            if wanted != applied:
                logs.apply(wanted)
                applied = wanted
        await asyncio.sleep(FOLLOW_EVERY_S)


EVERY_MODEL = ""

_KEPT = 256
_Id = tuple[int, ...]


def concerns(models: Collection[str], hosted: Collection[str]) -> bool:
    """Tells whether a worker must answer."""
    return bool(hosted) and (EVERY_MODEL in models or any(model in hosted for model in models))


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
        return [EVERY_MODEL]


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
