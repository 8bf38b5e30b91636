"""The ids of asynchronous requests: those that the server made, and those that clients choose."""

import pytest

from qinfer.errors import RequestNotFound
from qinfer.queue.entries import EntryAddress
from qinfer_api.requests.records import address_of, path_of, shown_id

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.mark.parametrize(
    ("request_id", "model", "address", "path"),
    [
        (f"{ULID}.0.m", None, EntryAddress("m", 0, f"{ULID}.0.m"), f"/v1/requests/{ULID}.0.m"),
        (f"{ULID}.0.m", "m", EntryAddress("m", 0, f"{ULID}.0.m"), f"/v1/requests/{ULID}.0.m"),
        (f"{ULID}.3.a b.c", None, EntryAddress("a b.c", 3, f"{ULID}.3.a b.c"), f"/v1/requests/{ULID}.3.a%20b.c"),
        ("row-17", "a b", EntryAddress("a b", 0, "row-17@acme"), "/v1/models/a%20b/requests/row-17"),
    ],
)
def test_where_a_request_is(request_id: str, model: str | None, address: EntryAddress, path: str) -> None:
    """A chosen id is the tenant's own; it is shown as it was chosen."""
    assert address_of(request_id, "acme", model) == address
    assert (shown_id(address), path_of(address)) == (request_id, path)


@pytest.mark.parametrize(
    ("request_id", "model"),
    [
        ("row-17", None),
        ("row-17@acme", "m"),
        (f"{ULID}.0.other", "m"),
        (f"{ULID}.0.}}", None),
        (f"{ULID}.0.a{{b}}", None),
        ("row-17", "}"),
        (f"{ULID}.0.m\r\nx: y", None),
        (f"{ULID[:-1]}@.0.m", None),
    ],
)
def test_what_no_request_can_have(request_id: str, model: str | None) -> None:
    """Not known, before the queue is asked: the keys of such a model would lie in several slots of a cluster."""
    with pytest.raises(RequestNotFound, match="is not known"):
        address_of(request_id, "acme", model)
