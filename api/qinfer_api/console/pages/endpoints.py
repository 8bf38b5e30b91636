"""Endpoints: the shares of their targets, the trial of a canary with its numbers, and decisions about it."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.traffic.canary import Action, CheckNumbers
from qinfer_api.console.visit import PageActs, Pages, Visit

_ACTS = {
    "promote": (Action.PROMOTE, "The canary is at its next step."),
    "rollback": (Action.ROLL_BACK, "The canary is rolled back; all requests go to the stable target."),
    "pause": (Action.PAUSE, "The trial is paused."),
    "resume": (Action.RESUME, "The trial goes on."),
}


class CheckBar(NamedTuple):
    """A check, its shares of bad requests (`None` = no requests), and its way to a rollback in percent."""

    numbers: CheckNumbers
    canary: float | None
    stable: float | None
    way: int


def endpoints_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    acts: PageActs = {name: (partial(_decide, name), Scope.ADMIN) for name in _ACTS}
    return [
        pages.route("/endpoints", endpoints, Scope.VIEWER),
        pages.route("/endpoints/{endpoint}", endpoint, Scope.VIEWER, acts),
    ]


async def endpoints(visit: Visit) -> Response:
    """Lists the endpoints."""
    word = visit.query("q").lower()
    known = await visit.parts.endpoints.list()
    rows = [one for one in known if word in one.endpoint.name.lower()]
    return visit.render("endpoints.html", "Endpoints", "endpoints", rows=rows, known=len(known))


async def endpoint(visit: Visit) -> Response:
    """Shows one endpoint."""
    state = await visit.parts.endpoints.find(visit.name("endpoint"))
    canary = state.canary
    return visit.render(
        "endpoint.html",
        state.endpoint.name,
        "endpoints",
        state=state,
        canary=canary,
        bars=bars_of(canary.checks) if canary is not None else [],
        is_open=canary is not None and canary.state in ("running", "paused"),
        declaration=msgspec.json.format(msgspec.json.encode(state.endpoint), indent=2).decode(),
    )


def bars_of(checks: Sequence[CheckNumbers]) -> list[CheckBar]:
    """Returns the checks with shares, and the logarithm of their evidence as a part of the one that decides."""
    bars = []
    for one in checks:
        canary = one.canary_bad / one.canary_requests if one.canary_requests else None
        stable = one.stable_bad / one.stable_requests if one.stable_requests else None
        way = math.log(max(one.evidence, 1.0)) / math.log(one.decides) if one.decides > 1 else 0.0
        bars.append(CheckBar(one, canary, stable, min(round(100 * way), 100)))
    return bars


async def _decide(name: str, visit: Visit) -> str:
    action, told = _ACTS[name]
    who = f" by {visit.user.name}" if visit.user.name else ""
    await visit.parts.endpoints.decide(visit.name("endpoint"), action, f"by hand in the console{who}")
    return told
