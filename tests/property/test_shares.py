"""Turns of shares (`lua/common/fair.lua`): work-conserving, by weight, never far from it, whatever is fetched."""

import json
from importlib.resources import files

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.testing import EmbeddedServer

_DRIVER = """
local shares, calls = cjson.decode(ARGV[1]), cjson.decode(ARGV[2])
local taken = {}
for number, call in ipairs(calls) do
  for i, more in ipairs(call.more) do shares[i].held = shares[i].held + more end
  local got = {}
  for i, share in ipairs(shares) do got[i], share.number, share.empty = 0, i, share.held == 0 end
  local count = take_in_turn(shares, call.count, function(share, count)
    local some = math.min(share.held, count)
    share.held, got[share.number] = share.held - some, got[share.number] + some
    return some
  end)
  local leads = {}
  for i, share in ipairs(shares) do leads[i] = string.format('%.9f', share.lead) end
  taken[number] = {got, count, leads}
end
return taken
"""

WEIGHTS = st.lists(st.integers(1, 50), min_size=2, max_size=6)
COUNTS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


class Turns:
    """Runs the script's functions."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._client = redis.Redis.from_url(server.url)
        text = files("qinfer.queue").joinpath("lua", "common", "fair.lua").read_text()
        self._run = self._client.register_script(text + _DRIVER)

    def take(self, weights: list[int], calls: list[tuple[int, list[int]]]) -> list[tuple[list[int], list[float]]]:
        """Returns of each call how many entries of each share were taken, and the leads after it.

        Args:
            weights: Of the shares.
            calls: How many entries to take, and how many come to each share before.
        """
        shares = [{"weight": weight, "lead": 0, "held": 0} for weight in weights]
        steps = [{"count": count, "more": more} for count, more in calls]
        found = self._run(args=[json.dumps(shares), json.dumps(steps)])
        assert all(sum(got) == count for got, count, _ in found)
        return [(got, [float(lead) for lead in leads]) for got, _, leads in found]


@pytest.fixture
def turns(embedded: EmbeddedServer) -> Turns:
    return Turns(embedded)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(weights=WEIGHTS, counts=COUNTS)
def test_who_always_waits_is_never_more_than_an_entry_from_its_share(
    turns: Turns, weights: list[int], counts: list[int]
) -> None:
    """After any number of fetches of any sizes: by weight, all have had the same but for one entry."""
    plenty = [sum(counts)] * len(weights)
    calls = [(counts[0], plenty), *((count, [0] * len(weights)) for count in counts[1:])]
    had = [0] * len(weights)

    for got, _ in turns.take(weights, calls):
        had = [one + other for one, other in zip(had, got, strict=True)]

        by_weight = [(count / weight, 1 / weight) for count, weight in zip(had, weights, strict=True)]
        for service, _ in by_weight:
            for other, entry in by_weight:
                assert other - service <= entry + 1e-6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), weights=WEIGHTS, counts=COUNTS)
def test_a_fetch_is_full_as_long_as_anything_waits(
    turns: Turns, data: st.DataObject, weights: list[int], counts: list[int]
) -> None:
    """Whoever has it."""
    more = st.lists(st.integers(0, 100), min_size=len(weights), max_size=len(weights))
    calls = [(count, data.draw(more)) for count in counts]
    held = 0

    for (count, came), (got, _) in zip(calls, turns.take(weights, calls), strict=True):
        held += sum(came)
        assert sum(got) == min(count, held)
        held -= sum(got)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), weights=WEIGHTS, counts=COUNTS)
def test_nobody_saves_anything_up(turns: Turns, data: st.DataObject, weights: list[int], counts: list[int]) -> None:
    """Whatever came before: who begins to wait now has its share of what is fetched next, but for an entry of each."""
    more = st.lists(st.integers(0, 100), min_size=len(weights), max_size=len(weights))
    calls = [(count, data.draw(more)) for count in counts]
    rounds = 20 * sum(weights)
    plenty = [rounds + sum(sum(came) for _, came in calls)] * len(weights)

    got, _ = turns.take(weights, [*calls, (rounds, plenty)])[-1]

    for count, weight in zip(got, weights, strict=True):
        share = rounds * weight / sum(weights)
        assert abs(count - share) <= 2 * len(weights) * max(weights), (got, weights)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), weights=WEIGHTS, counts=COUNTS)
def test_leads_stay_small(turns: Turns, data: st.DataObject, weights: list[int], counts: list[int]) -> None:
    """What is kept between fetches is bounded by an entry of each share, however long it goes on."""
    more = st.lists(st.integers(0, 100), min_size=len(weights), max_size=len(weights))
    calls = [(count, data.draw(more)) for count in counts]

    for _, leads in turns.take(weights, calls):
        assert all(0 <= lead <= 1 / weight + 1e-6 for lead, weight in zip(leads, weights, strict=True))
