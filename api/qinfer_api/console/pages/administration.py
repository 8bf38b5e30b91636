"""Label Studio's projects, tenants with their keys and quotas, and the audit log."""

import math
from collections import defaultdict
from typing import NamedTuple

from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.queue.dead_letters import id_of
from qinfer_api.auth import Principal
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit

MOST_BOARDS = 200
_FAILED_SHOWN = 20


class BoardCounts(NamedTuple):
    """A project's tasks by state, and the first that failed."""

    board: Board
    counts: dict[str, int]
    failed: list[LabelTask]


class TenantRow(NamedTuple):
    """A tenant: its keys, and its limits, which its keys share; infinite = none."""

    name: str
    keys: list[Principal]
    in_flight: int
    rate_per_s: float
    burst: float
    max_in_flight: float
    weight: int


def administration_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    return [
        pages.route("/labeling", labeling),
        pages.route("/tenants", tenants, Scope.ADMIN, needs_redis=False),
        pages.route("/audit", audit, Scope.ADMIN),
    ]


async def labeling(visit: Visit) -> Response:
    """Counts the tasks of Label Studio's projects, of the user's tenant."""
    services = visit.parts.services
    tasks = LabelTasks(services.requests.delivery)
    rows: list[BoardCounts] = []
    for model in services.catalog.known():
        for board in await tasks.boards(model):
            if board.tenant == visit.context.tenant and len(rows) < MOST_BOARDS:
                counts = {state.value: count for state, count in (await tasks.counts(board)).items()}
                failed = await tasks.page(board, LabelState.FAILED, 0, _FAILED_SHOWN) if counts["failed"] else []
                rows.append(BoardCounts(board, counts, failed))
    is_on = bool(services.settings.labeling.mappings)
    return visit.render("labeling.html", "Labeling", "labeling", rows=rows, is_on=is_on)


async def tenants(visit: Visit) -> Response:
    """Shows the tenants of the key file."""
    auth = visit.parts.auth
    held: defaultdict[str, list[Principal]] = defaultdict(list)
    for one in auth.holders() if auth is not None else ():
        held[one.tenant].append(one)
    rows = [
        TenantRow(
            name,
            sorted(of, key=lambda one: one.key_id),
            of[0].quota.in_flight,
            of[0].quota.limits.rate or math.inf,
            of[0].quota.limits.burst,
            of[0].quota.limits.places or math.inf,
            of[0].quota.weight,
        )
        for name, of in sorted(held.items())
        if visit.query("q").lower() in name.lower()
    ]
    return visit.render(
        "tenants.html", "Tenants", "tenants", rows=rows[:PAGE_ROWS], total=len(rows), has_keys=auth is not None
    )


async def audit(visit: Visit) -> Response:
    """Shows administrative acts and refused keys, newest first."""
    await visit.parts.audit.copy_waiting()
    before = visit.query("before")
    lines = await visit.parts.audit.lines(before if id_of(before) else "", PAGE_ROWS + 1)
    following = lines[PAGE_ROWS - 1].id if len(lines) > PAGE_ROWS else ""
    return visit.render("audit.html", "Audit", "audit", rows=lines[:PAGE_ROWS], following=following, before=before)
