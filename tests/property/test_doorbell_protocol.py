"""The doorbell's protocol as a model of which all interleavings are tried: no ring is lost, whenever it comes.

One reader, one doorbell, one entry that is given back at any time. Every step of theirs is one that can't be divided:
a command that Redis executes, a reply or a ring that arrives, and what the reader does between two awaits.
"""

from collections.abc import Iterator

import msgspec
import pytest


class World(msgspec.Struct, frozen=True):
    """A state.

    Attributes:
        entry: Where it is: `held` by who gives it back, `given back`, `fetched`.
        to_ring: Whether its ring is still to be sent.
        unheard: Rings on the way to the reader's process.
        is_armed: The process hears the rings from now on.
        arming: Rings there were when it asked for the newest one; `None` = it has not asked.
        rung: Rings of this entry that are in the stream.
        rings: Rings that the reader knows of.
        looked: Rings that it knew of before its last look, if that found nothing.
        before: Those that it knew of when it began to look.
        reader: `idle`, its `look` is on the way, `empty` or `full` on the way back, its `sleep` on the way, `blocked`.
        unblocks: Whether a CLIENT UNBLOCK is on its way.
    """

    entry: str = "held"
    to_ring: bool = True
    unheard: int = 0
    is_armed: bool = False
    arming: int | None = None
    rung: int = 0
    rings: int = 0
    looked: int = -1
    before: int = 0
    reader: str = "idle"
    unblocks: bool = False

    def but(self, **changes: object) -> "World":
        return msgspec.structs.replace(self, **changes)


def steps(world: World, *, checks: bool, retries: bool) -> Iterator[World]:
    """Yields the states that may follow; `checks` and `retries` are the two rules of the protocol."""
    yield from _given_back(world)
    yield from _heard(world)
    yield from _read(world, checks=checks)
    if world.unblocks:
        is_hit = world.reader == "blocked"
        again = retries and not is_hit and world.reader == "sleep"
        yield world.but(unblocks=again, reader="idle" if is_hit else world.reader)


def _given_back(world: World) -> Iterator[World]:
    if world.entry == "held":
        yield world.but(entry="given back")
    elif world.to_ring:  # Redis passes it on to a bell that reads; one that is not armed will ask
        unheard = world.unheard + int(world.arming is not None)
        yield world.but(to_ring=False, rung=world.rung + 1, unheard=unheard)


def _rung(world: World) -> World:
    is_asleep = world.reader in {"sleep", "blocked"}
    return world.but(rings=world.rings + 1, unblocks=world.unblocks or is_asleep)


def _heard(world: World) -> Iterator[World]:
    if world.arming is None:
        yield world.but(arming=world.rung)  # XREVRANGE; what is newer, XREAD will tell
    elif not world.is_armed:
        yield _rung(world.but(is_armed=True))
    elif world.unheard:
        yield _rung(world.but(unheard=world.unheard - 1))


def _read(world: World, *, checks: bool) -> Iterator[World]:
    match world.reader:
        case "idle":
            if world.is_armed and (world.looked == world.rings or not checks) and world.looked >= 0:
                yield world.but(reader="sleep")
            else:  # it looks again
                yield world.but(reader="look", before=world.rings)
        case "look" if world.entry == "given back":
            yield world.but(reader="full", entry="fetched")
        case "look":
            yield world.but(reader="empty")
        case "empty":
            yield world.but(reader="idle", looked=world.before)
        case "full":
            yield world.but(reader="idle", looked=-1)
        case "sleep":  # the blocking read comes to Redis; it gets no entries that were given back
            yield world.but(reader="blocked")


def stuck(*, checks: bool = True, retries: bool = True) -> list[World]:
    """Returns the states in which the entry waits, and nothing will happen any more."""
    seen, left = {World()}, [World()]
    found = []
    while left:
        world = left.pop()
        following = [one for one in steps(world, checks=checks, retries=retries) if one.looked < 4 and one.rings < 4]
        if not following and world.entry != "fetched":
            found.append(world)
        new = {one for one in following if one not in seen}
        seen |= new
        left += new
    assert len(seen) > 50
    return found


def test_no_ring_is_lost() -> None:
    """Whatever comes first, the entry is fetched."""
    assert stuck() == []


@pytest.mark.parametrize("rule", ["checks", "retries"])
def test_each_rule_is_needed(rule: str) -> None:
    """Without it there is an order of events in which the entry waits for the next look that nobody rang for."""
    assert stuck(**{rule: False})
