"""The overview, queues and sequences."""

from collections import Counter
from typing import NamedTuple

from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.errors import ModelNotFound
from qinfer.models.readiness import ModelStatus
from qinfer.models.state import WorkerRecord, pause_of
from qinfer.queue.entries import Lane
from qinfer.scaling.work import VersionWork, read_sequences
from qinfer_api.console.attention import findings
from qinfer_api.console.history import series_of
from qinfer_api.console.live import ConsoleState
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit

BUSIEST = 12
LATELY = 10
LATELY_S = 3600.0


class Change(NamedTuple):
    """An event of the last hour: its time, text, and page."""

    at_s: float
    text: str
    page: str


def system_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    return [
        pages.route("/", overview, Scope.VIEWER, needs_redis=False),
        pages.route("/queues", queues, Scope.VIEWER),
        pages.route("/sequences", sequences, Scope.VIEWER),
    ]


async def overview(visit: Visit) -> Response:
    """Shows the state of the installation at a glance."""
    parts, catalog = visit.parts, visit.parts.services.catalog
    state = await parts.live.now()
    live = catalog.workers()
    counts = {} if state.slot is None else state.slot.counts
    found = findings(_statuses(visit), live, state.work, counts, state.letters if visit.user.is_admin else {})
    busiest = sorted(state.work, key=lambda one: (-_rate(state, one), -one.work_s, one.model, one.version))
    return visit.render(
        "overview.html",
        "Overview",
        "",
        state=state,
        charts=parts.long,
        chosen=parts.long.chosen(visit.query("range")),
        findings=found,
        busiest=[(one, series_of(one.model, one.version)) for one in busiest[:BUSIEST]],
        more=max(len(busiest) - BUSIEST, 0),
        workers=live,
        devices=sorted(Counter(worker.device for worker in live).items()),
        gpus=[gpu for worker in live for gpu in worker.gpus],
        ready=sum(catalog.readiness().values()),
        versions=len(catalog.readiness()),
        changes=await _changes(visit, state, live) if state.is_store_up else [],
    )


def _statuses(visit: Visit) -> list[ModelStatus]:
    catalog = visit.parts.services.catalog
    found = []
    for name in catalog.known():
        try:
            found.append(catalog.status(name))
        except ModelNotFound:  # it is unloaded
            continue
    return found


def _rate(state: ConsoleState, one: VersionWork) -> float:
    return state.point(series_of(one.model, one.version)).rate


async def _changes(visit: Visit, state: ConsoleState, live: list[WorkerRecord]) -> list[Change]:
    """Returns what changed in the last hour, newest first: workers, jobs, canaries, and administrative acts."""
    parts = visit.parts
    found = [Change(worker.started_at, f"Worker {worker.id} started.", "workers") for worker in live]
    for job in (await parts.jobs.jobs.list(visit.context.tenant, None, "", LATELY)).records:
        at_s = job.ended_at or job.started_at or job.created_at
        shown = job.id.removesuffix(f"@{job.tenant}") if job.tenant else job.id
        found.append(Change(at_s, f"Job {shown} is {job.state}.", f"jobs/{shown}"))
    for one in await parts.endpoints.list():
        if one.canary is not None:
            text = f"The canary of {one.endpoint.name} is {one.canary.state}: {one.canary.reason}"
            found.append(Change(one.canary.since_s, text, f"endpoints/{one.endpoint.name}"))
    if visit.user.is_admin:
        for line in await parts.audit.lines(count=LATELY):
            about = line.about
            who = f" by {about['key']}" if about.get("key") else ""
            found.append(Change(line.at_s, f"{about.get('act', line.event)} {about.get('path', '')}{who}", "audit"))
    recent = [one for one in found if state.at_s - one.at_s < LATELY_S]
    return sorted(recent, reverse=True)[:LATELY]


async def queues(visit: Visit) -> Response:
    """Shows lanes: entries, age of the oldest, and the work of each version."""
    state = await visit.parts.live.now()
    word, page = visit.query("q").lower(), visit.page_number
    rows = [one for one in state.work if word in one.model.lower()]
    rows.sort(key=lambda one: (-one.oldest_age_s, -one.work_s, one.model, one.version))
    shown = rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    pauses, keys = await visit.parts.store.pauses(), [(one.model, one.version) for one in shown]
    shares = await _shares(visit, [lane.lane for one in shown for lane in one.lanes]) if visit.user.is_admin else {}
    return visit.render(
        "queues.html",
        "Queues",
        "queues",
        state=state,
        rows=[(one, series_of(one.model, one.version)) for one in shown],
        shares=shares,
        paused={key for key in keys if pause_of(pauses, *key) is not None},
        total=len(rows),
        page=page,
        pages=-(-len(rows) // PAGE_ROWS),
    )


async def _shares(visit: Visit, lanes: list[Lane]) -> dict[Lane, list[tuple[str, int, int]]]:
    """Returns the shares of lanes that several tenants use: tenants, weight, entries."""
    found = await visit.parts.services.requests.delivery.shares(lanes, named=True)
    return {
        lane: [(", ".join(share.tenants), share.weight, share.entries) for share in shares if share.tenants]
        for lane, shares in zip(lanes, found, strict=True)
        if len(shares) > 1
    }


async def sequences(visit: Visit) -> Response:
    """Shows the open sequences of stateful models."""
    services = visit.parts.services
    stored = await visit.parts.store.models(services.catalog.stateful())
    rows = await read_sequences(services.requests.delivery, stored)
    return visit.render("sequences.html", "Sequences", "sequences", rows=rows)
