"""What bridges say of themselves, in Redis; the part of `RedisControlStore` that is about them.

All keys share a hash tag, so that one script adds a report up. The bridge's number and time are in the same entry as
what it has in hand: `<until when it lives, ms> <number> <uses as JSON>`.
"""

from typing import Any

import msgspec

from qinfer.control.bridges import KEPT_S, MOST_ROUTES, REMEMBERED_S, BridgeReport, RouteUse, merged
from qinfer.delivery import keys
from qinfer.observability.bridge_metrics import RouteTotals

_HEAD = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
"""

_REPORT = (
    _HEAD
    + """
local remembered_ms, kept_ms, process, ttl_ms, number = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local known = redis.call('HGET', KEYS[1], process)
local last = known and tonumber(string.match(known, '^%d+ (%d+) ')) or 0
if number < last then return end
redis.call('HSET', KEYS[1], process, string.format('%.0f %d %s', now_ms + ttl_ms, number, ARGV[6]))
redis.call('PEXPIRE', KEYS[1], ttl_ms + remembered_ms)
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  if tonumber(string.match(found[i + 1], '^%d+')) + remembered_ms < now_ms then
    redis.call('HDEL', KEYS[1], found[i])
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', now_ms - kept_ms))
local at = 7
for i = 3, #KEYS do
  redis.call('ZADD', KEYS[2], string.format('%.0f', now_ms), ARGV[at])
  local fields = tonumber(ARGV[at + 1])
  at = at + 2
  for _ = 1, fields do
    if number > last then redis.call('HINCRBY', KEYS[i], ARGV[at], ARGV[at + 1]) end
    at = at + 2
  end
  redis.call('PEXPIRE', KEYS[i], kept_ms)
end
redis.call('PEXPIRE', KEYS[2], kept_ms)
"""
)

_LIVE = (
    _HEAD
    + """
local found, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #found, 2 do
  local ends_ms, uses = string.match(found[i + 1], '^(%d+) %d+ (.*)$')
  if tonumber(ends_ms) > now_ms then table.insert(live, uses) end
end
local since = string.format('%.0f', now_ms - ARGV[1])
return {live, redis.call('ZREVRANGEBYSCORE', KEYS[2], '+inf', since, 'LIMIT', 0, ARGV[2])}
"""
)


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
