"""How the record of an asynchronous request looks as a Redis hash: what `accept.lua` writes, and what is read of it."""

from collections.abc import Mapping

from qinfer.delivery.connection import Argument
from qinfer.delivery.requests import Acceptance, Address, RequestRecord, RequestState

RECORD_FIELDS = (
    *(b"state", b"version", b"tenant", b"client_id", b"attempts", b"created_at", b"deadline_at", b"finished_at"),
    *(b"expires_at", b"code", b"message", b"plan", b"webhook", b"webhook_state"),
)
"""The fields that `record_of` reads; the state is the first."""


def accepted_fields(acceptance: Acceptance) -> dict[bytes, Argument]:
    """Returns the fields that a record has from the start, beside those that accept.lua computes."""
    fields: dict[bytes, Argument] = {
        b"version": acceptance.lane.version,
        b"lane": acceptance.lane.name,
        b"tenant": acceptance.tenant,
        b"client_id": acceptance.client_id,
        b"plan": acceptance.plan,
        b"webhook": acceptance.webhook,
    }
    if acceptance.outbox:
        fields |= {b"outbox": acceptance.outbox, b"notes": acceptance.notes}
    if acceptance.watcher:
        fields[b"waiters"] = acceptance.watcher
    return fields


def record_of(
    address: Address,
    fields: Mapping[bytes, bytes | None],
    *,
    has_result: bool,
    is_held: bool = False,
    deliveries: int = 0,
) -> RequestRecord:
    """Reads a record.

    Args:
        address: Whose it is.
        fields: Its fields; what is missing or `None` was not set.
        has_result: Whether there is a result beside it.
        is_held: Whether a consumer holds its entry.
        deliveries: How often its entry was handed out; of one that ended the record tells it.
    """

    def text(name: bytes) -> str:
        return (fields.get(name) or b"").decode()

    def instant_s(name: bytes) -> float:
        return int(fields.get(name) or 0) / 1000

    state = RequestState(text(b"state"))
    return RequestRecord(
        address=address,
        state=RequestState.RUNNING if is_held else state,
        version=int(fields.get(b"version") or 0),
        tenant=text(b"tenant"),
        client_id=text(b"client_id"),
        attempts=int(fields.get(b"attempts") or 0) if state.is_terminal else deliveries,
        created_at=instant_s(b"created_at"),
        deadline_at=instant_s(b"deadline_at"),
        finished_at=instant_s(b"finished_at"),
        expires_at=instant_s(b"expires_at"),
        code=text(b"code"),
        message=text(b"message"),
        plan=fields.get(b"plan") or b"",
        has_result=has_result,
        webhook=text(b"webhook"),
        webhook_state=text(b"webhook_state"),
    )
