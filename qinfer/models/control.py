"""The model repository extension: index, load and unload (reference §1.14, §6); pauses of models; drains of workers.

It writes desired state and watches the workers' reports, so that workers that join later find the same state.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from weakref import WeakValueDictionary

import msgspec

from qinfer.core.settings import RepositorySettings
from qinfer.errors import (
    BrokerUnavailable,
    ControlDisabled,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    QinferError,
    VersionsFailed,
    WorkerNotFound,
)
from qinfer.models.dependents import in_order, missing_uses, renew_users, unneeded, wanted_for_another
from qinfer.models.installation import has_same_content, refuse_lost, write_model
from qinfer.models.readiness import LoadProgress, ModelStatus, assess, outcome
from qinfer.models.repository.open import Repositories, is_model_name
from qinfer.models.state import DesiredState, ErrorKind, ModelPause, State, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.logs import RecentLine
from qinfer.queue.lanes import Queue
from qinfer.wire.bodies import ModelIndexEntry

logger = logging.getLogger(__name__)

UNLOADED = "unloaded"
MAX_CONFIG_CHARACTERS = 4 * 2**20
"""The longest configuration of a load: a parsed one takes many times the memory of its text."""
_LOOK_S = 2.0


class ModelControl:
    """Lists, loads and unloads models; `refresh` updates this process's view."""

    def __init__(
        self,
        source: Repositories | None,
        store: ControlStore,
        delivery: Queue,
        settings: RepositorySettings,
        refresh: Callable[[], Awaitable[object]],
    ) -> None:
        self._source = source
        self._store = store
        self._delivery = delivery
        self._settings = settings
        self._refresh = refresh
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads: set[asyncio.Task[None]] = set()

    async def index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Returns all repository and desired models, by name and version."""
        workers = await self._store.workers()  # before the configurations, which must not be older
        desired = await self._store.desired()
        stored = await self._store.models(desired)
        names = set() if ready else await asyncio.to_thread(self._names)
        statuses = assess(desired, stored, workers)
        entries: list[ModelIndexEntry] = []
        for name in sorted({*names, *desired}):
            if name in statuses:
                entries.extend(_loaded(statuses[name]))
            elif name in stored:
                entries.extend(_unloaded(stored[name], workers))
            else:
                entries.append(ModelIndexEntry(name=name))
        return [entry for entry in entries if not ready or entry.state == State.READY]

    async def load(self, model: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads a model, or reloads it if anything has changed; returns once it is READY.

        A failed reload leaves the earlier generation in service. A load goes on after its caller has disconnected.
        `config`, of at most `MAX_CONFIG_CHARACTERS`, also holds in later loads. `files` (`<version>/<file>` →
        content) need `config`. Raises `ControlDisabled`, `ModelLoadFailed`, `ModelNotReady` after
        `repository.load_timeout_s`, `UnsupportedFeature` without an overlay, or `Overloaded` at shutdown.
        """
        self._check_request(model)
        if "/" in model or "\\" in model or model.strip() in (".", ".."):
            raise InvalidRequest("model name must not contain path traversal characters")
        if config is not None and len(config) > MAX_CONFIG_CHARACTERS:
            raise _not_polled(
                model,
                f"parameter 'config' has {len(config)} characters, and at most {MAX_CONFIG_CHARACTERS} are read; large "
                "values belong into files",
            )
        if files and not config:
            raise _not_polled(model, "parameter 'config' is required where files are given")
        load = asyncio.create_task(self._load_alone(model, config or "", files or {}))
        self._loads.add(load)
        load.add_done_callback(self._over)
        try:
            await asyncio.shield(load)
        except asyncio.CancelledError:
            if not load.cancelled():
                raise
            raise Overloaded("Server exiting") from None

    async def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unloads a model, perhaps with dependents; its waiting requests are still answered."""
        self._check_request(model)
        desired = await self._store.desired()
        wish = desired.get(model)
        if wish is None:
            await refuse_lost(self._store)
        if wish is None or not wish.load:
            return
        dependents = unneeded(model, desired, await self._store.models(desired)) if unload_dependents else []
        for name in (model, *dependents):
            await self._store.set_desired(msgspec.structs.replace(desired[name], load=False))
            logger.info("model unload requested", extra={"model": name})
        await self._store.wake()
        await self._refresh()

    async def pause(self, pause: ModelPause) -> None:
        """Pauses a model or version in all gateways and workers."""
        if not await self._store.has_model(pause.model):
            raise ModelNotFound(f"model '{pause.model}' is not known, so it can't be paused")
        await self._store.put_pause(pause)
        logger.info("model paused", extra={"model": pause.model, "version": pause.version, "reason": pause.reason})
        await self._refresh()

    async def end_pause(self, model: str, version: int) -> bool:
        """Ends the pause of a model or version; returns whether there was one."""
        was_paused = await self._store.remove_pause(model, version)
        if was_paused:
            logger.info("model resumed", extra={"model": model, "version": version})
        await self._refresh()
        return was_paused

    async def pauses(self, model: str = "") -> list[ModelPause]:
        """Returns the pauses of a model, or all, by model and version."""
        found = await self._store.pauses()
        return [found[key] for key in sorted(found) if model in ("", key[0])]

    async def drain_worker(self, worker_id: str, by: str) -> None:
        """Asks a worker to drain and end, as SIGTERM does; `by` is the id of the API key, for the worker's log."""
        if not await self._store.ask_drain(worker_id, by):
            raise WorkerNotFound(f"no worker '{worker_id[:200]}' is alive; GET /v1/workers lists those that are")
        logger.info("worker drain requested", extra={"worker": worker_id, "by": by})

    async def worker_log(self, worker_id: str) -> list[RecentLine]:
        """Returns the last warnings and errors of a worker, newest first, up to an hour after its end."""
        lines = await self._store.worker_log(worker_id)
        if not lines and all(worker.id != worker_id for worker in await self._store.workers()):
            raise WorkerNotFound(f"no worker '{worker_id[:200]}' is alive, and no log of it is left")
        return lines

    def cancel_loads(self) -> None:
        """Ends the waits for loads; the models stay desired."""
        for load in self._loads:
            load.cancel()

    def _over(self, load: "asyncio.Task[None]") -> None:
        self._loads.discard(load)
        if not load.cancelled() and (error := load.exception()) is not None:
            logger.warning("model load failed", extra={"reason": str(error)})

    def _check_request(self, model: str) -> None:
        if self._settings.control_mode != "explicit":
            raise ControlDisabled("explicit model load / unload is not allowed if polling is enabled")
        if not model.strip():
            raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")

    def _names(self) -> set[str]:
        try:
            return set() if self._source is None else set(self._source.names())
        except QinferError as error:
            logger.warning("model repository can't be read", extra={"reason": error.message})
            return set()

    async def _load_alone(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        for name in await self._unloaded_uses(model, config or await self._kept_override(model)):
            try:
                async with self._locks.setdefault(name, asyncio.Lock()):
                    await self._load(name, dependent=True)
            except ModelLoadFailed as error:
                raise ModelLoadFailed(f"failed to load '{model}', it depends on '{name}': {error.message}") from None
        async with self._locks.setdefault(model, asyncio.Lock()):
            await self._load(model, config, files)
        await self._refresh()

    async def _kept_override(self, model: str) -> str:
        wish = (await self._store.desired()).get(model)
        before = await self._store.model(model) if wish is not None and wish.load else None
        return before.override if before is not None and not before.location else ""

    async def _unloaded_uses(self, model: str, config: str) -> list[str]:
        if self._source is None or not is_model_name(model):
            return []
        loaded = [name for name, wish in (await self._store.desired()).items() if wish.load and name != model]
        found: dict[str, StoredModel] = {}
        missing = [model]
        while missing:
            for name in missing:
                try:
                    found[name] = await asyncio.to_thread(self._source.read, name, config if name == model else "")
                except ModelNotFound:
                    if name == model:  # its files come with the request, or its load reports the error
                        return []
                    hint = await self._store.hint_of_endpoint(name)
                    raise ModelLoadFailed(
                        f"failed to load '{model}', it contains models that are not available or ambiguous: "
                        f"{name}{hint}"
                    ) from None
                except QinferError:  # its load reports the error
                    found[name] = StoredModel(name)
            missing = missing_uses(list(found.values()), {*found, *loaded})
        return [one.model for one in in_order(found.values()) if one.model != model]

    async def _load(
        self, model: str, config: str = "", files: Mapping[str, bytes] | None = None, *, dependent: bool = False
    ) -> None:
        source = self._source
        if source is None or not is_model_name(model):
            raise _not_polled(model, "" if source else "this gateway has no model repository")
        before = await self._store.model(model)
        config = config or await self._kept_override(model)
        location = await asyncio.to_thread(source.put_files, model, files) if files else ""
        try:
            found = await self._read_model(source, model, config, location)
            await self._bring_about(found, before, dependent=dependent)
        finally:
            await self._drop_unused(source, model, {location, before.location if before else ""} - {""})

    async def _bring_about(self, found: StoredModel, before: StoredModel | None, *, dependent: bool) -> None:
        wish = (await self._store.desired()).get(found.model)
        anew = await self._is_due(wish, before)
        if dependent and (wish is None or not wish.load):
            wish = wanted_for_another(found.model, wish)
        elif wish is not None and wish.dependent and not dependent:
            wish = msgspec.structs.replace(wish, dependent=False)
            await self._store.set_desired(wish)
        written, changed = await write_model(
            found, wish, self._store, self._delivery, anew=anew, min_workers=self._settings.min_workers
        )
        if changed:
            await renew_users([found.model], self._store)
            await self._store.wake()
            logger.info("model load requested", extra={"model": found.model, "generation": written.generation})
        try:
            await self._until_ready(written)
        except _Superseded:
            raise
        except ModelLoadFailed:
            await self._revert(written, wish, before)
            raise

    async def _drop_unused(self, source: Repositories, model: str, locations: set[str]) -> None:
        if not locations:
            return
        try:
            stored = await self._store.model(model)
        except BrokerUnavailable:  # the configuration may name them
            logger.warning("files of a load request may be left over", extra={"model": model})
            return
        for location in locations - {stored.location if stored else ""}:
            await asyncio.to_thread(source.drop_files, location)

    async def _read_model(self, source: Repositories, model: str, config: str, location: str) -> StoredModel:
        try:
            found = await asyncio.to_thread(source.read, model, config, location)
        except ModelNotFound:
            raise _not_polled(model) from None
        except QinferError as error:
            raise _not_polled(model, error.message) from None
        if found.error_kind == ErrorKind.NO_VERSION:
            raise ModelLoadFailed(f"failed to load '{model}', no version is available")
        if found.error:
            raise _not_polled(model, found.error)
        return msgspec.structs.replace(found, override=config)

    async def _is_due(self, wish: DesiredState | None, before: StoredModel | None) -> bool:
        if wish is None or not wish.load or before is None:
            return True
        return outcome(before, await self._store.workers()).progress is LoadProgress.FAILED

    async def _until_ready(self, target: StoredModel) -> None:
        model, reason = target.model, ""
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                while True:
                    target = await self._present(target)
                    progress, reason = outcome(target, await self._store.workers())
                    if progress is LoadProgress.READY:
                        return
                    if progress is LoadProgress.FAILED:
                        raise VersionsFailed(f"load failed for model '{model}': {reason}")
                    await self._store.wait(_LOOK_S)
        except TimeoutError:
            raise ModelNotReady(
                f"failed to load '{model}' within {self._settings.load_timeout_s:g} s, {reason}; it stays requested"
            ) from None

    async def _present(self, target: StoredModel) -> StoredModel:
        """Returns the stored model of a load, which a worker may have completed."""
        current = await self._store.model(target.model)
        wish = (await self._store.desired()).get(target.model)
        if current is None or wish is None:
            await refuse_lost(self._store)
        if current is None or wish is None or not wish.load:
            raise _Superseded(f"failed to load '{target.model}', it was unloaded meanwhile")
        if current.generation == target.generation or has_same_content(current, target):
            return current
        is_completed = target.pending and (current.content_hash, current.location, current.pending) == (
            target.content_hash,
            target.location,
            "",
        )
        if not is_completed:
            raise _Superseded(f"failed to load '{target.model}', another load of it came in between")
        return current

    async def _revert(self, failed: StoredModel, wish: DesiredState | None, before: StoredModel | None) -> None:
        """Restores the former model as a new generation, for workers that join later."""
        if before is None or before.error or wish is None or not wish.load:
            return
        current = await self._store.model(failed.model)
        if current is None or current.location != failed.location or current.content_hash != failed.content_hash:
            return
        if not any(worker.serves(before.model) for worker in await self._store.workers()):
            return
        restored = msgspec.structs.replace(before, generation=current.generation + 1)
        if not await self._store.put_model(restored):
            return
        await self._store.set_desired(DesiredState(restored.model, restored.generation, dependent=wish.dependent))
        await renew_users([restored.model], self._store)
        await self._store.wake()
        logger.warning("load reverted", extra={"model": restored.model, "generation": restored.generation})


class _Superseded(ModelLoadFailed):
    """Another request has changed the desired state."""


def _not_polled(model: str, reason: str = "") -> ModelLoadFailed:
    text = f"failed to load '{model}', failed to poll from model repository"
    return ModelLoadFailed(f"{text}: {reason}" if reason else text)


def _loaded(status: ModelStatus) -> Iterator[ModelIndexEntry]:
    if not status.versions:
        yield ModelIndexEntry(name=status.model, state=State.UNAVAILABLE, reason=status.error)
    for version, state in sorted(status.versions.items()):
        reason = state.unready if state.state is State.READY else state.reason
        yield ModelIndexEntry(name=status.model, version=str(version), state=state.state, reason=reason)


def _unloaded(stored: StoredModel, workers: list[WorkerRecord]) -> Iterator[ModelIndexEntry]:
    states = [item for worker in workers for item in worker.models.get(stored.model, {}).items()]
    held = {version for version, state in states if state.state is not State.UNAVAILABLE}
    for version in stored.versions:
        state, reason = (State.UNLOADING, "") if version in held else (State.UNAVAILABLE, stored.error or UNLOADED)
        yield ModelIndexEntry(name=stored.model, version=str(version), state=state, reason=reason)
