"""What bridges say of themselves, in Redis; the part of `RedisControlStore` that is about them.

All keys share a hash tag, so that one script adds a report up. The bridge's number and time are in the same entry as
what it has in hand: `<until when it lives, ms> <number> <uses as JSON>`.
"""

from typing import Any

import msgspec

from qinfer.bridge.metrics import RouteTotals
from qinfer.bridge.reports import KEPT_S, MOST_ROUTES, REMEMBERED_S, BridgeReport, RouteUse, merged
from qinfer.queue import keys, scripts

_REPORT = scripts.load("bridge_report", "now_ms", package="qinfer.models").text
_LIVE = scripts.load("bridges", "now_ms", package="qinfer.models").text


async def put(client: Any, report: BridgeReport, ttl_s: float) -> None:  # Any: the two clients share no typed interface
    """Adds a report up; see `ControlStore.put_bridge`."""
    words: list[str | int | bytes] = [_ms(REMEMBERED_S), _ms(KEPT_S), report.process, _ms(ttl_s), report.number]
    words.append(msgspec.json.encode(report.uses))
    for route, counts in report.counts.items():
        words += [route, len(counts), *(word for pair in counts.items() for word in pair)]
    names = [keys.bridges(), keys.routes(), *map(keys.route_counts, report.counts)]
    await client.eval(_REPORT, len(names), *names, *words)


async def read(client: Any) -> dict[str, RouteTotals]:
    """Returns what all bridges say of each route; see `ControlStore.routes`."""
    live, routes = await client.eval(_LIVE, 2, keys.bridges(), keys.routes(), _ms(KEPT_S), MOST_ROUTES)
    names = [name.decode() for name in routes]
    async with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hgetall(keys.route_counts(name))
        found = await pipe.execute() if names else []
    counts = {
        name: {field.decode(): int(value) for field, value in of.items()} for name, of in zip(names, found, strict=True)
    }
    return merged(counts, [msgspec.json.decode(uses, type=dict[str, RouteUse]) for uses in live])


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
