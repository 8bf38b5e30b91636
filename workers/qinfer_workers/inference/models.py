"""Which models this worker serves: desired state in, loaded instances out (DESIGN.md §5).

Everything is re-read at start, when woken and every 10 s. A new generation is loaded and warmed up beside the old one,
which serves until then, and goes on serving if the new one fails; the reason is in the heartbeat.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from qinfer.backends.base import Backend, BackendFactory
from qinfer.backends.reshape import reshaped
from qinfer.batching.latency import LatencyModel
from qinfer.clock import ServerClock
from qinfer.control.base import ControlStore, State, StoredModel, VersionState
from qinfer.control.placement import is_placed
from qinfer.errors import BrokerUnavailable, ModelLoadFailed, QinferError
from qinfer.repository import config
from qinfer.repository.spec import ModelSpec
from qinfer.settings import LimitSettings
from qinfer_workers.inference.executor import in_thread
from qinfer_workers.inference.warmup import warm_up

logger = logging.getLogger(__name__)

REREAD_S = 10.0

Key = tuple[str, int]
"""A model version: (model, version)."""


class Loaded(NamedTuple):
    """What a load yields, ready to be served."""

    spec: ModelSpec
    version: int
    generation: int
    instances: Sequence[Backend]
    latency: LatencyModel


class Host(Protocol):
    """What serves loaded models; `worker.Worker`."""

    def serve(self, loaded: Loaded) -> None:
        """Serves a model version, in place of its earlier generation if there is one."""
        ...

    async def retire(self, model: str, version: int) -> None:
        """Drains a model version and unloads it."""
        ...


class Loader:
    """Loads model versions; blocking, for a thread.

    Args:
        version_dir: Tells where the files of a (model, version) are.
        factory: Backend name → factory.
        clock: The broker's time.
    """

    def __init__(
        self, version_dir: Callable[[str, int], Path], factory: Callable[[str], BackendFactory], clock: ServerClock
    ) -> None:
        self._version_dir = version_dir
        self._factory = factory
        self._clock = clock

    def load(self, spec: ModelSpec, version: int, generation: int) -> Loaded:
        """Loads and warms up every instance.

        Raises:
            QinferError: One of them failed; none stays loaded.
        """
        make = self._factory(spec.backend)
        latency = LatencyModel()
        instances: list[Backend] = []
        try:
            for device in (group.device for group in spec.instances for _ in range(group.count)):
                instance = reshaped(make(), spec)
                instance.load(spec, self._version_dir(spec.name, version), device)
                instances.append(instance)
                warm_up(instance, spec, latency, self._clock.now_s())
        except BaseException:
            for instance in instances:
                instance.unload()
            raise
        return Loaded(spec, version, generation, instances, latency)


class Models:
    """Keeps what is loaded equal to what is desired.

    Args:
        store: Holds the desired state.
        globs: The models that this worker places.
        limits: Default and maximum timeouts.
        loader: Loads.
        host: Serves.
    """

    def __init__(
        self, store: ControlStore, globs: Sequence[str], limits: LimitSettings, loader: Loader, host: Host
    ) -> None:
        self._store = store
        self._globs = globs
        self._limits = limits
        self._loader = loader
        self._host = host
        self._tried: dict[Key, int] = {}
        """The generation last tried, whether it could be loaded or not: a failed one is not tried twice."""
        self._states: dict[Key, VersionState] = {}

    def states(self) -> dict[str, dict[int, VersionState]]:
        """Returns model → version → state, as the heartbeat shows it."""
        shown: dict[str, dict[int, VersionState]] = {}
        for (model, version), state in self._states.items():
            shown.setdefault(model, {})[version] = state
        return shown

    async def run(self, changed: Callable[[], None]) -> None:
        """Follows the desired state until cancelled; calls `changed` whenever a state changed."""
        while True:
            try:
                await self.follow(changed)
                await self._store.wait(REREAD_S)
            except BrokerUnavailable as error:
                logger.warning("desired state unknown", extra={"reason": error.message})
                await asyncio.sleep(1.0)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Reads the desired state once, and loads and unloads what differs."""
        desired = await self._store.desired()
        stored: dict[str, StoredModel] = {}
        for name, wish in desired.items():
            if wish.load and is_placed(name, self._globs):
                model = await self._store.model(name)
                if model is not None:
                    stored[name] = model
        wanted = {(name, version) for name, model in stored.items() for version in model.versions}
        for key in set(self._states) - wanted:
            await self._unload(key, changed)
        async with asyncio.TaskGroup() as loads:
            for name, model in stored.items():
                for version in model.versions:
                    if self._tried.get((name, version)) != model.generation:
                        loads.create_task(self._load((name, version), model, changed))

    async def _load(self, key: Key, model: StoredModel, changed: Callable[[], None]) -> None:
        name, version = key
        generation = model.generation
        before = self._states.get(key)
        self._tried[key] = generation
        if before is None or before.state is not State.READY:
            self._states[key] = VersionState(State.LOADING, generation)
            changed()
        try:
            if model.error:
                raise ModelLoadFailed(model.error)
            spec = config.to_spec(config.from_json(model.config), self._limits)
            loaded = await in_thread(f"load-{name}", lambda: self._loader.load(spec, version, generation))
        except Exception as error:  # the boundary to backends; whatever it is, it fails this load only
            logger.exception("load failed", extra={"model": name, "version": version, "generation": generation})
            reason = error.message if isinstance(error, QinferError) else f"{type(error).__name__}: {error}"
            keeps = before is not None and before.state is State.READY
            self._states[key] = VersionState(
                State.READY if keeps else State.UNAVAILABLE,
                before.generation if keeps and before is not None else generation,
                reason,
            )
        else:
            self._host.serve(loaded)
            self._states[key] = VersionState(State.READY, generation)
            logger.info("model ready", extra={"model": name, "version": version, "generation": generation})
        changed()

    async def _unload(self, key: Key, changed: Callable[[], None]) -> None:
        state = self._states[key]
        self._tried.pop(key, None)
        if state.state is State.READY:
            self._states[key] = VersionState(State.UNLOADING, state.generation)
            changed()
            await self._host.retire(*key)
            logger.info("model unloaded", extra={"model": key[0], "version": key[1]})
        del self._states[key]
        changed()
