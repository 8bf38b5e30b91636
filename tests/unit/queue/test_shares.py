"""The places of tenants as one process remembers them, and the names of shares."""

import pytest

from qinfer.queue.entries import Lane, delayed_name, divided_of, share_of, undivided
from qinfer.queue.tenants import CROWDED_S, KNOWN_S, Places
from qinfer.testing import FakeClock

LANE = Lane("m", 1, "p1")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def places(clock: FakeClock) -> Places:
    return Places(clock.monotonic_s)


def test_a_place_is_asked_for_until_it_is_known(places: Places) -> None:
    """Each tenant's in each lane."""
    assert places.find(LANE, "acme") is None

    places.learn(LANE, "acme", 3, is_shared=False)

    assert places.find(LANE, "acme") == Lane("m", 1, "p1~3")
    assert places.find(LANE, "other") is None
    assert places.find(Lane("m", 2, "p1"), "acme") is None


@pytest.mark.parametrize(("is_shared", "kept_s"), [(False, KNOWN_S), (True, CROWDED_S)])
def test_a_place_is_asked_for_again_by_one_entry(
    places: Places,
    clock: FakeClock,
    is_shared: bool,  # noqa: FBT001
    kept_s: float,
) -> None:
    """Sooner where others have it, too; those that come meanwhile go where the last ones went."""
    places.learn(LANE, "acme", 3, is_shared=is_shared)

    clock.advance(kept_s - 0.01)
    assert places.find(LANE, "acme") is not None
    clock.advance(0.02)

    assert [places.find(LANE, "acme") for _ in range(2)] == [None, share_of(LANE, 3)]
    places.learn(LANE, "acme", 0, is_shared=False)
    assert places.find(LANE, "acme") == LANE


def test_a_stream_that_is_gone_is_forgotten(places: Places) -> None:
    places.learn(LANE, "acme", 3, is_shared=False)

    places.drop_place(LANE, "acme")

    assert places.find(LANE, "acme") is None
    assert places.last(LANE, "acme") not in (LANE, share_of(LANE, 3))


def test_a_share_knows_its_lane() -> None:
    """Names of other lanes stay as they are, those of steps of sequences too."""
    share = share_of(LANE, 12)

    assert (share.name, divided_of(share), divided_of(LANE)) == ("p1~12", (LANE, 12), (LANE, 0))
    assert share_of(LANE, 0) == LANE
    assert [undivided(name) for name in ("p1~12", "p2.delayed", "seq@w")] == ["p1", "p2.delayed", "seq@w"]
    assert (delayed_name("p1~12"), delayed_name("p1")) == ("p1.delayed", "p1.delayed")
