"""What the scripts of asynchronous requests are given, KEYS and ARGV; and how many requests one of them takes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from qinfer.delivery import keys
from qinfer.delivery.base import DELAYED, Lane
from qinfer.delivery.connection import Argument
from qinfer.delivery.request_fields import accepted_fields
from qinfer.delivery.requests import MARGIN_S, Acceptance, Address, Settlement
from qinfer.delivery.scripts import Words
from qinfer.delivery.values import packable
from qinfer.tensors import Bytes

AT_ONCE = 32
"""So many requests one script takes at most: a millisecond of Redis, for which all others wait."""

AT_ONCE_BYTES = 2**20
"""Their values have so many bytes at most, but for a single one."""


class Value(NamedTuple):
    """A payload or a result as a script takes it.

    Attributes:
        place: none | given | staged.
        data: The bytes, where they are given.
        staged: The name that they were stored under, where they are staged.
    """

    place: bytes
    data: Bytes
    staged: str


def given(name: str, data: Bytes) -> Value:
    """Returns a value that is passed to the script, which stores it under `name`."""
    return Value(b"given" if data else b"none", data, keys.staged(name, ""))


def parts_of(addresses: Sequence[Address], sizes: Sequence[int]) -> list[list[int]]:
    """Cuts requests into parts for one script each.

    Args:
        addresses: Of the requests.
        sizes: Of their values, in bytes.

    Returns:
        The numbers of the requests of each part, which are of one partition.
    """
    parts: list[list[int]] = []
    open_parts: dict[tuple[str, int], tuple[list[int], int]] = {}
    for number, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        place = address.model, address.partition
        part, part_bytes = open_parts.get(place, ([], 0))
        if not part or len(part) == AT_ONCE or part_bytes + size > AT_ONCE_BYTES:
            part, part_bytes = [], 0
            parts.append(part)
        part.append(number)
        open_parts[place] = part, part_bytes + size
    return parts


def record_key(address: Address) -> bytes:
    """Returns the key of a request's record."""
    return keys.request(address.model, address.partition, address.id).encode()


def payload_name(address: Address) -> str:
    """Returns the name of a request's payload."""
    return keys.payload(address.model, address.partition, address.id)


def result_name(address: Address) -> str:
    """Returns the name of a request's result."""
    return keys.result(address.model, address.partition, address.id)


def to_accept(acceptance: Acceptance, payload: Value) -> Words:
    """Returns the words of accept.lua."""
    address = acceptance.address
    model, partition = address.model, address.partition
    names = (
        *_lane_keys(acceptance.lane),
        record_key(address),
        keys.due(model, partition).encode(),
        payload_name(address).encode(),
        payload.staged.encode(),
        keys.idempotency(model, partition, acceptance.tenant, acceptance.idempotency_key).encode(),
    )
    times = (acceptance.timeout_s, acceptance.result_ttl_s, acceptance.tombstone_ttl_s, MARGIN_S)
    arguments: list[Argument] = [
        *(keys.GROUP, keys.RELEASED, keys.SUSPECTS),
        *(address.id, packable(acceptance.frame), payload.place, packable(payload.data), acceptance.limit),
        *map(_ttl_ms, times),
        _ttl_ms(acceptance.idempotency_ttl_s) if acceptance.idempotency_key else 0,
        acceptance.body_hash,
    ]
    for name, value in accepted_fields(acceptance).items():
        arguments += (name, value)
    return Words(names, arguments)


def to_settle(settlement: Settlement, result: Value) -> Words:
    """Returns the words of settle.lua."""
    address, entry, outcome = settlement.address, settlement.entry, settlement.outcome
    model, partition = address.model, address.partition
    names = (
        record_key(address),
        result_name(address).encode(),
        result.staged.encode(),
        keys.due(model, partition).encode(),
        keys.outbox(model, partition).encode(),
        payload_name(address).encode(),
    )
    where = (keys.lane(entry.lane), entry.entry_id) if entry is not None else (b"", b"")
    fields = (b"state", outcome.state, b"code", outcome.code, b"message", outcome.message)
    value = (result.place, packable(result.data))
    return Words(
        names, (keys.prefix(model, partition), keys.GROUP, address.id, *where, *value, outcome.attempt, *fields)
    )


@lru_cache(maxsize=1024)
def _lane_keys(lane: Lane) -> tuple[bytes, bytes]:
    """Returns the keys of a lane, and of its lane for the delayed."""
    return keys.lane(lane), keys.lane(Lane(lane.model, lane.version, lane.name + DELAYED, lane.partition))


def _ttl_ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))  # Redis takes no time to live of 0
