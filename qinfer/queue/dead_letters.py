"""Dead letters: entries that were given up, kept with their bytes for a person to look at (DESIGN.md §2.5)."""

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from qinfer.core.messages import InferRequest
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.queue.base import Lane
from qinfer.wire.frame import PayloadApart, decode_request

MAX_AGE_S = 7 * 86400.0
"""How long a dead letter is kept."""

MAX_BYTES = 256 * 2**20
"""How much the dead letters of a partition may take together; the newest is kept whatever its size."""

_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_PAYLOAD_MARGIN_S = 300.0
_LONGEST_TIMEOUT_S = 86400.0


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that was given up.

    Attributes:
        id: Its id among the dead letters of its partition.
        lane: The lane it was in.
        request_id: The request's id; empty where the frame can't be decoded.
        code: The error code.
        reason: Why it was given up.
        deliveries: How often it had been handed out.
        buried_at: When, in seconds of the broker's time.
        size: Bytes of frame and payload.
        frame: The frame; empty in listings.
        payload: Its payload; empty in listings, and where it had none.
    """

    id: str
    lane: Lane
    request_id: str
    code: str
    reason: str
    deliveries: int
    buried_at: float
    size: int = 0
    frame: bytes = b""
    payload: bytes = b""


class DeadLetters(Protocol):
    """The port of dead letters, per model; bounded by age and bytes, the oldest go first."""

    async def list(self, model: str, *, after: str = "", count: int = 100) -> "list[DeadLetter]":
        """Returns dead letters in the order they were buried, from behind the id `after`, without their bytes.

        Raises:
            InvalidRequest: `after` is no id.
        """
        ...

    async def count(self, model: str) -> int:
        """Returns how many there are."""
        ...

    async def show(self, model: str, letter_id: str) -> DeadLetter | None:
        """Returns one with its bytes."""
        ...

    async def replay(self, model: str, letter_id: str) -> bool:
        """Puts one back at the end of its lane, as never delivered, in one step; False when it is gone.

        Nobody waits for its answer any more: an asynchronous request becomes `queued` again, with its old timeout from
        now on.
        """
        ...

    async def purge(self, model: str, letter_ids: "Sequence[str] | None" = None) -> int:
        """Removes the named ones, or all; returns how many there were."""
        ...


def id_of(text: str) -> tuple[int, int] | None:
    """Returns a dead letter's id as numbers, to compare; `None` where it is none."""
    found = _ID.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def place_after(text: str) -> tuple[int, int]:
    """Returns behind which id a listing begins.

    Raises:
        InvalidRequest: It is no id.
    """
    place = id_of(text or "0-0")
    if place is None:
        raise InvalidRequest(f"'{text[:60]}' is no dead letter's id; expected such as 1700000000123-0")
    return place


def head_of(frame: bytes) -> InferRequest | None:
    """Returns a frame's request, without the tensors that are stored beside it; `None` when it can't be decoded."""
    try:
        return decode_request(frame)
    except PayloadApart as apart:
        return apart.request
    except CorruptEntry:
        return None


def payload_ttl_s(frame: bytes) -> float:
    """Returns how long the payload of a request is needed that is put back into its lane now."""
    request = head_of(frame)
    return ((request.timeout_s if request else 0.0) or _LONGEST_TIMEOUT_S) + _PAYLOAD_MARGIN_S
