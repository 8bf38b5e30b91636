"""How a request is made ready for the queue: its stamps, its layout, its lane and limit."""

from dataclasses import replace

import pytest

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import InvalidRequest
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import BatchingSpec, ModelSpec, QueuePolicy, Routes
from qinfer.queue.entries import EntryAddress, Lane
from qinfer.submission.submit import StampedRequest, prepare
from qinfer.tensors import Tensor
from qinfer.wire.frame import PayloadApart, decode_request
from tests.support.step_worker import sum_spec

POLICY = QueuePolicy(max_queue_size=30, timeout_s=5.0, allow_override=True)


def served(batching: BatchingSpec | None = None, lane_capacity: int = 50) -> ServedVersion:
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), batching=batching, lane_capacity=lane_capacity)
    routes = Routes(spec, 3)
    return ServedVersion(spec=spec, version=3, generation=7, lane=routes.default.lane, routes=routes)


def request(size: int = 8, **changes: object) -> OutgoingRequest:
    inputs = (Tensor("x", "UINT8", (size,), bytes(size)),)
    return OutgoingRequest(**{"model": "m", "inputs": inputs, "reply_to": "reply:g", **changes})  # type: ignore[arg-type]  # any of its fields


def stamped(
    of: OutgoingRequest, by: ServedVersion, max_waiting: int = 0, inline_max_bytes: int = 100
) -> StampedRequest:
    of.tenant, of.trace = "t", "00-1"
    return prepare(of, by, EntryAddress("m", 2, "r1"), 60.0, inline_max_bytes, max_waiting)


def test_the_frame_tells_whose_it_is_and_until_when() -> None:
    """Everything that a worker needs; nobody waits at a reply address."""
    lane, frame, payload, limit, is_told, _ = stamped(request(client_id="mine"), served())

    found = decode_request(frame)
    assert (lane, payload, limit, is_told) == (Lane("m", 3), b"", 50, False)
    assert (found.id, found.partition, found.version, found.timeout_s) == ("r1", 2, 3, 60.0)
    assert (found.client_id, found.tenant, found.trace, found.reply_to) == ("mine", "t", "00-1", "")
    assert bytes(found.inputs[0].data) == bytes(8)


def test_what_may_be_moved_says_by_which_endpoint() -> None:
    assert stamped(request(endpoint="e", moves=True), served()).endpoint == "e"
    assert stamped(request(endpoint="e"), served()).endpoint == ""


def test_models_that_keep_state_take_no_stored_requests() -> None:
    """Their requests go to sequences, one after the other."""
    by = replace(served(), spec=sum_spec())

    with pytest.raises(InvalidRequest, match=r"^model 'sum' keeps state from request to request: .*; send the"):
        stamped(request(), by)


def test_large_tensors_travel_beside_the_frame() -> None:
    """The frame says so; a byte less, and they are in it."""
    _, frame, payload, *_ = stamped(request(9), served(), inline_max_bytes=8)

    assert len(payload) >= 9
    with pytest.raises(PayloadApart):
        decode_request(frame)
    assert stamped(request(8), served(), inline_max_bytes=8).payload == b""


def test_its_priority_says_where_it_waits_and_how_long() -> None:
    """The policy of the level, which a request may shorten only where it is allowed."""
    by = served(BatchingSpec(preferred_sizes=(8,), priority_levels=2, default_priority=2, policies={1: POLICY}))

    first = stamped(request(priority=1, timeout_s=2.0), by)
    second = stamped(request(priority=2, timeout_s=2.0), by)

    assert (first.lane.name, decode_request(first.frame).queue_timeout_s) == ("p1", 2.0)
    assert (second.lane.name, decode_request(second.frame).queue_timeout_s) == ("p2", 0.0)


@pytest.mark.parametrize(
    ("policy", "max_waiting", "limit"),
    [(QueuePolicy(), 0, 50), (POLICY, 0, 30), (POLICY, 20, 20), (QueuePolicy(), 60, 50)],
    ids=["capacity", "policy", "caller", "capacity below the caller"],
)
def test_the_lowest_limit_counts(policy: QueuePolicy, max_waiting: int, limit: int) -> None:
    """Of those that are set."""
    by = served(BatchingSpec(preferred_sizes=(8,), default_policy=policy))

    assert stamped(request(), by, max_waiting).limit == limit
