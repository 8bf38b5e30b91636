"""The models: their versions, states, figures, memory and configuration; load and unload."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, ModelNotFound
from qinfer.models.state import ModelPause, WorkerRecord
from qinfer.wire.bodies import ModelIndexEntry
from qinfer_api.console.history import series_of
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit
from qinfer_api.observe.statistics import ModelStatistics


class ModelVersion(NamedTuple):
    """A line of the list: a version, the workers that have it ready, and the memory that it takes in all of them."""

    entry: ModelIndexEntry
    series: str
    workers: tuple[str, ...]
    instances: int
    memory_bytes: int


def models_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    acts = {
        "load": (_load_model, Scope.ADMIN),
        "unload": (_unload, Scope.ADMIN),
        "pause": (_pause, Scope.ADMIN),
        "resume": (_resume, Scope.ADMIN),
    }
    return [
        pages.route("/models", models, Scope.VIEWER),
        pages.route("/models/{model}", model, Scope.VIEWER, acts),
    ]


async def models(visit: Visit) -> Response:
    """Lists the models of the repositories and the loaded ones."""
    state = await visit.parts.live.now()
    word, page = visit.query("q").lower(), visit.page_number
    wanted = visit.query("state")
    entries = await visit.parts.services.models.index()
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.state or "NOT LOADED"] = counts.get(entry.state or "NOT LOADED", 0) + 1
    rows = [entry for entry in entries if word in entry.name.lower() and wanted in ("", entry.state or "NOT LOADED")]
    rows.sort(key=lambda entry: (entry.state not in ("UNAVAILABLE", "LOADING"), entry.name, entry.version))
    shown = rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    return visit.render(
        "models.html",
        "Models",
        "models",
        state=state,
        rows=_versions(visit, shown),
        counts=counts,
        wanted=wanted,
        total=len(rows),
        known=len(entries),
        page=page,
        pages=-(-len(rows) // PAGE_ROWS),
    )


def _versions(visit: Visit, entries: Sequence[ModelIndexEntry]) -> list[ModelVersion]:
    workers = visit.parts.services.catalog.workers()
    return [_version(visit, entry, workers) for entry in entries]


def _version(visit: Visit, entry: ModelIndexEntry, workers: Sequence[WorkerRecord]) -> ModelVersion:
    version = int(entry.version or 0)
    ready = tuple(worker.id for worker in workers if worker.is_ready(entry.name, version))
    memory = sum(use.nbytes for worker in workers for use in worker.memory.get(entry.name, {}).get(version, ()))
    spec = visit.parts.services.catalog.spec(entry.name)
    instances = len(ready) * (spec.instance_count if spec is not None else 1)
    return ModelVersion(entry, series_of(entry.name, version), ready, instances, memory)


async def model(visit: Visit) -> Response:
    """Shows one model."""
    name, services = visit.name("model"), visit.parts.services
    state = await visit.parts.live.now()
    entries = [entry for entry in await services.models.index() if entry.name == name]
    if not entries:
        raise ModelNotFound(f"model '{name[:100]}' is neither in the repositories nor loaded")
    stored = await visit.parts.store.model(name)
    statistics: list[ModelStatistics] = []
    if services.catalog.ready_versions(name):
        try:
            statistics = await services.reporting.statistics.model_statistics(name, is_latest=False)
        except InvalidRequest:  # it was unloaded meanwhile
            statistics = []
    return visit.render(
        "model.html",
        name,
        "models",
        state=state,
        charts=visit.parts.long,
        chosen=visit.parts.long.chosen(visit.query("range")),
        name=name,
        rows=_versions(visit, entries),
        spec=services.catalog.spec(name),
        stored=stored,
        config=_pretty(stored.config if stored is not None else ""),
        override=_pretty(stored.override if stored is not None else ""),
        statistics=statistics,
        pauses=await services.models.pauses(name),
        is_explicit=services.settings.repository.control_mode == "explicit",
        is_loaded=any(entry.state in ("READY", "LOADING") for entry in entries),
    )


def _pretty(document: str) -> str:
    try:
        return msgspec.json.format(document, indent=2) if document else ""
    except msgspec.DecodeError:
        return document


async def _load_model(visit: Visit) -> str:
    await visit.parts.services.models.load(visit.name("model"))
    return f"Model {visit.name('model')} is loaded."


async def _unload(visit: Visit) -> str:
    await visit.parts.services.models.unload(visit.name("model"))
    return (
        f"Model {visit.name('model')} is unloaded: it takes no more requests, and waiting requests are still answered."
    )


async def _pause(visit: Visit) -> str:
    since = visit.parts.services.requests.now_s()
    pause = ModelPause(model=visit.name("model"), since=since, by=visit.user.name, reason=visit.value("reason")[:500])
    await visit.parts.services.models.pause(pause)
    return "The model is paused: workers end what they have begun, and take nothing more."


async def _resume(visit: Visit) -> str:
    await visit.parts.services.models.end_pause(visit.name("model"), 0)
    return "The model goes on."
