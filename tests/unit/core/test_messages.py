"""Ids, failures, and records of calls."""

import re
import time

import pytest

from qinfer.core.messages import CalledTensor, CallRecord, CallTraces, Failure, IdFactory, parse_request_id
from qinfer.errors import InvalidRequest, QueueFull

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def _milliseconds(ulid: str) -> int:
    value = 0
    for character in ulid[:10]:
        value = value * 32 + CROCKFORD.index(character)
    return value


def test_ulids_have_the_form_of_the_specification() -> None:
    """26 characters of Crockford's base 32, the first ten the time in milliseconds."""
    before = time.time_ns() // 1_000_000

    ulid = IdFactory().ulid()

    assert re.fullmatch(f"[0-7][{CROCKFORD}]{{25}}", ulid)
    assert before <= _milliseconds(ulid) <= time.time_ns() // 1_000_000


def test_ulids_are_unique_and_ascend() -> None:
    """Ids of one factory never repeat, and sort in the order they were made."""
    factory = IdFactory()

    ulids = [factory.ulid() for _ in range(20_000)]

    assert len(set(ulids)) == len(ulids)
    assert ulids == sorted(ulids)


def test_factories_do_not_share_their_random_part() -> None:
    """Two processes that start in the same millisecond make different ids."""
    assert IdFactory().ulid()[10:] != IdFactory().ulid()[10:]


def test_request_ids_are_parsed() -> None:
    """A request id tells its partition and model, dots in the name included."""
    request_id = IdFactory().request_id("my.model", 3)

    assert parse_request_id(request_id) == (request_id[:26], 3, "my.model")


@pytest.mark.parametrize("text", ["", "x.0.m", "0" * 26, "0" * 26 + ".a.m", "0" * 26 + ".0.", "0" * 26 + ".-1.m"])
def test_other_ids_are_refused(text: str) -> None:
    """What is not a request id is said to be none."""
    with pytest.raises(InvalidRequest, match="is not a request id"):
        parse_request_id(text)


def test_failures_keep_foreign_texts_from_clients() -> None:
    """A qinfer error is described as it is, any other as internal."""
    assert Failure.from_error(QueueFull("full")) == Failure("queue_full", "full", retryable=True)
    assert "secret" not in Failure.from_error(RuntimeError("secret")).message


def test_what_all_calls_take_is_bounded() -> None:
    """The records of calls that a called model made count, too."""
    traces = CallTraces(has_tensors=True)
    tensor = CalledTensor(is_output=False, name="x", datatype="UINT8", shape=(1,), data=bytes(400_000))
    inner = CallRecord("inner", 1, "", 1.0, 2.0, tensors=(tensor,))

    for name in ("first", "second", "third"):
        traces.add(CallRecord(name, 1, "", 1.0, 2.0, calls=(inner,)))
    for _ in range(100):
        traces.add(CallRecord("small", 1, "", 1.0, 2.0))

    assert [call.model for call in traces.ended[:3]] == ["first", "second", "small"]
    assert sum(call.weight for call in traces.ended) <= 2**20
