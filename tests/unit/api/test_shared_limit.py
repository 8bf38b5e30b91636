"""Places that tenants share: how many one of them gets."""

import contextlib

from qinfer_api.shared_limit import SharedLimit


def taken(limit: SharedLimit, places: contextlib.ExitStack, tenant: str, most: int = 12) -> int:
    """Returns how many places a tenant gets that takes all it can."""
    count = 0
    while limit.has_room(most, tenant):
        places.enter_context(limit.place(tenant))
        count += 1
    return count


def test_a_tenant_that_takes_all_it_can_leaves_as_many_to_the_others() -> None:
    limit = SharedLimit()
    with contextlib.ExitStack() as places:
        assert [taken(limit, places, tenant) for tenant in ("evil", "acme", "other")] == [6, 3, 2]
        assert limit.taken == 11


def test_places_come_back() -> None:
    limit = SharedLimit()
    with contextlib.ExitStack() as places:
        taken(limit, places, "evil")
        assert not limit.has_room(12, "evil")

    assert limit.taken == 0
    assert limit.has_room(1, "evil")


def test_who_shares_with_no_other_takes_all() -> None:
    with contextlib.ExitStack() as places:
        assert taken(SharedLimit(), places, "") == 12
