"""Lists of stored requests: their filter, pages and cursors, and the timeline of one request.

A list goes through the models by name, and in each first through its unfinished requests. A page reads at most
`MOST_READ` records, so that it may be short although more follow. A cursor names no request of another tenant.
"""

import asyncio
import base64
import binascii
import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import QueryParams

from qinfer.errors import Forbidden, InvalidRequest
from qinfer.models.repository.open import is_model_name
from qinfer.queue.dead_letters import DeadLetter
from qinfer.queue.entries import EntryAddress, RequestRecord, RequestState
from qinfer.queue.requests import LISTED, UNFINISHED, ListedRequest, ListPlace
from qinfer_api.auth import CallerContext
from qinfer_api.requests.records import RequestBody, instant, shown_id, written
from qinfer_api.requests.service import AsyncRequests
from qinfer_api.rest.openapi import Json, query

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000

MOST_READ = 2000
"""Redis reads so many records in about ten milliseconds."""

AT_ONCE = 100
"""The most records of one script."""

_EMPTY_COSTS = 10  # a read of a model counts for so many records at least
_PARTITION = 0
_MOST_TEXT = 512

Text = Annotated[str, msgspec.Meta(max_length=_MOST_TEXT)]
Age = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # infinity is no JSON


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice of stored requests or dead letters; an omitted field chooses all.

    Attributes:
        model: A model, or an endpoint: the models of its targets.
        state: The states; queued and running are unfinished, the others final.
        tenant: A tenant; other tenants than one's own need the scope `admin`.
        id_prefix: The beginning of the id.
        error: A part of `<code>: <message>` of the error, in letters of either case.
        older_than_s: The least age, in seconds since the acceptance; of a dead letter, since it was given up.
        newer_than_s: The greatest age.

    Example:
        {"model": "digits", "state": ["failed"], "error": "out of memory", "older_than_s": 60}
    """

    model: Text = ""
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    state: tuple[RequestState, ...] = ()
    tenant: Text | None = None
    id_prefix: Text = ""
    error: Text = ""
    older_than_s: Age = 0.0
    newer_than_s: Age | None = None

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes that have the chosen states."""
        names = {state if state.is_terminal else UNFINISHED for state in self.state or RequestState}
        return tuple(index for index in LISTED if index in names)

    def fits(self, record: RequestRecord, now_s: float, *, reads: bool = True) -> bool:
        """Tells whether a request is chosen; a caller who `reads` no contents searches no messages."""
        error = f"{record.code}: {record.message}" if reads else record.code
        return (
            (not self.state or record.state in self.state)
            and self.tenant in (None, record.tenant)
            and self._fits(record.version, shown_id(record.address), error, now_s - record.created_at)
        )

    def fits_letter(self, letter: DeadLetter, now_s: float, *, reads: bool = True) -> bool:
        """Tells as `fits` whether a dead letter is chosen; it has no state."""
        error = f"{letter.code}: {letter.reason}" if reads else letter.code
        return self.tenant in (None, letter.tenant) and self._fits(
            letter.lane.version, letter_request(letter), error, now_s - letter.buried_at
        )

    def _fits(self, version: int, request_id: str, error: str, age_s: float) -> bool:
        return (
            self.version in (0, version)
            and request_id.startswith(self.id_prefix)
            and self.error.lower() in error.lower()
            and self.older_than_s <= age_s <= (math.inf if self.newer_than_s is None else self.newer_than_s)
        )


def letter_request(letter: DeadLetter) -> str:
    """Returns the id of a dead letter's request as its client knows it."""
    return shown_id(EntryAddress(letter.lane.model, letter.lane.partition, letter.request_id))


FILTER_QUERY: tuple[Json, ...] = (
    query("model", "Only requests of this model, or of the models of this endpoint's targets.", type="string"),
    query("version", "Only requests of this version.", type="integer", minimum=1),
    query("state", "Only requests in this state; repeat it for several.", enum=list(RequestState)),
    query(
        "tenant", "Only requests of this tenant; other tenants than one's own need the scope `admin`.", type="string"
    ),
    query("id_prefix", "Only requests whose id begins so.", type="string"),
    query(
        "error",
        "Only requests with this text in `<code>: <message>` of their error. A key with the scope `viewer` searches "
        "the codes alone.",
        type="string",
    ),
    query("older_than_s", "Only requests that were accepted at least so many seconds ago.", type="number", minimum=0),
    query("newer_than_s", "Only requests that were accepted at most so many seconds ago.", type="number", minimum=0),
)
LIST_QUERY: tuple[Json, ...] = (
    *FILTER_QUERY,
    query("after", "`next` of the page before.", type="string"),
    query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=DEFAULT_LIMIT),
)


class RequestsBody(msgspec.Struct, frozen=True):
    """A page of stored requests: model by model, the unfinished ones first, then failed, expired, cancelled, succeeded.

    Attributes:
        next: Give it as `after` for the next page; `null` after the last one. A page may be short, or empty, although
            more follow.
    """

    requests: list[RequestBody]
    next: str | None


def read_filter(values: Any, *, strict: bool = True) -> RequestFilter:
    """Reads a filter; without `strict`, numbers may be texts."""
    try:
        return msgspec.convert(values, RequestFilter, strict=strict)
    except msgspec.ValidationError as error:
        fields = ", ".join(RequestFilter.__struct_fields__)
        raise InvalidRequest(f"the filter can't be read: {error}; its fields are {fields}") from None


def filter_of(params: QueryParams) -> RequestFilter:
    """Reads the filter of a list's query."""
    values: dict[str, Any] = {name: params[name] for name in params if name not in ("after", "limit", "state")}
    return read_filter(values | {"state": params.getlist("state")}, strict=False)


def own_filter(chosen: RequestFilter, context: CallerContext) -> RequestFilter:
    """Returns the filter with the caller's tenant, unless the caller sees all."""
    if context.sees_all:
        return chosen
    if chosen.tenant not in (None, context.tenant):
        raise Forbidden(
            "this key sees requests of its own tenant only; leave 'tenant' out, or use a key of scope admin"
        )
    return msgspec.structs.replace(chosen, tenant=context.tenant)


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    model: str
    place: ListPlace

    @classmethod
    def read(cls, text: str) -> "_Cursor":
        """Reads a cursor as `written` wrote it."""
        try:
            found = msgspec.msgpack.decode(base64.urlsafe_b64decode(text[:2048]), type=cls)
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise InvalidRequest(f"after: '{text[:60]}' is no cursor; give `next` of the page before") from None
        score = found.place.score
        is_place = score.isascii() and (not score or score.isdecimal()) and len(score) <= 20
        if found.place.name not in LISTED or not is_model_name(found.model) or not is_place:
            raise InvalidRequest(f"after: '{text[:60]}' is no cursor; give `next` of the page before")
        return found

    def written(self) -> str:
        """Writes a cursor as a text for URLs."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()


class RequestPage(NamedTuple):
    """A page of requests, and the cursor of the next one; empty = it is the last."""

    records: list[RequestRecord]
    next: str


async def list_page(
    requests: AsyncRequests, context: CallerContext, chosen: RequestFilter, after: str, limit: int
) -> RequestPage:
    """Returns a page of the requests that a caller may see."""
    chosen, now_s = own_filter(chosen, context), requests.now_s()
    start = _Cursor.read(after) if after else None
    stored, read, found = requests.delivery.requests, 0, list[RequestRecord]()
    for model in await _with_requests(requests, chosen.model, "" if start is None else start.model):
        place = start.place if start is not None and model == start.model else ListPlace()
        while True:
            before = place
            listed = await stored.list_requests(model, _PARTITION, place, AT_ONCE, chosen.indexes)
            for one in listed:
                place = one.place
                if one.record is not None and chosen.fits(one.record, now_s, reads=context.reads):
                    found.append(one.record)
                if len(found) == limit:
                    return RequestPage(found, _cursor(context, model, one, before))
            read += max(len(listed), _EMPTY_COSTS)
            if len(listed) < AT_ONCE:
                break
            if read >= MOST_READ:
                return RequestPage(found, _cursor(context, model, listed[-1], before))
    return RequestPage(found, "")


async def _with_requests(requests: AsyncRequests, name: str, first: str) -> list[str]:
    chosen = chosen_models(requests, name, first)
    have_any = await asyncio.gather(*(requests.delivery.requests.has_any(model, _PARTITION) for model in chosen))
    return [model for model, has_any in zip(chosen, have_any, strict=True) if has_any]


def chosen_models(requests: AsyncRequests, name: str, first: str) -> list[str]:
    """Returns the models that a filter's `model` names, from `first` on; empty = all."""
    catalog, endpoints = requests.catalog, requests.dispatcher.endpoints.by_name
    if name in endpoints:
        names = {target.model for target in endpoints[name].endpoint.targets}
    elif name:
        names = {name} if is_model_name(name) else set()
    else:
        names = {*catalog.known(), *(model for model, _ in catalog.unloaded())}
    return sorted(model for model in names if model >= first)


def _cursor(context: CallerContext, model: str, last: ListedRequest, before: ListPlace) -> str:
    """Returns the cursor behind a place; behind another tenant's request, it leads to the requests of that instant."""
    place = last.place
    if last.record is None or not context.sees(last.record.tenant):
        place = place._replace(id="")
        if (place.name, place.score) == (before.name, before.score):  # one instant has more requests than a read
            place = place._replace(score=str(int(place.score) + (1 if place.name == UNFINISHED else -1)))
    return _Cursor(model, place).written()


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a request.

    Attributes:
        event: queued | fetched | executing | executed | succeeded | failed | expired | cancelled
        at: The time of the step; `null` = it is not known, as while a worker holds the request.
        by: The worker; empty = a gateway.
        attempt: The number of times that a worker had taken the request.
        rows: The rows of the request in its batch.
        batch_rows: The rows of the whole batch.
    """

    event: str
    at: str | None
    by: str = ""
    attempt: int | UnsetType = UNSET
    rows: int | UnsetType = UNSET
    batch_rows: int | UnsetType = UNSET


class TimelineBody(msgspec.Struct, frozen=True):
    """The steps of a stored request, of its last execution only.

    Example:
        {"id": "01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits", "model": "digits", "version": 1, "state": "succeeded",
         "events": [{"event": "queued", "at": "2026-01-31T12:00:00.000Z", "by": ""},
                    {"event": "fetched", "at": "2026-01-31T12:00:00.102Z", "by": "w1", "attempt": 1},
                    {"event": "executing", "at": "2026-01-31T12:00:00.104Z", "by": "w1", "rows": 1, "batch_rows": 8},
                    {"event": "executed", "at": "2026-01-31T12:00:00.131Z", "by": "w1"},
                    {"event": "succeeded", "at": "2026-01-31T12:00:00.132Z", "by": "w1"}]}
    """

    id: str
    model: str
    version: int
    state: RequestState
    events: list[TimelineEvent]


def timeline_of(record: RequestRecord) -> TimelineBody:
    """Returns the steps of a request, as its record tells them."""
    address, events = record.address, [*_events(record)]
    return TimelineBody(shown_id(address), address.model, record.version, record.state, events)


def _events(record: RequestRecord) -> Iterator[TimelineEvent]:
    done, worker = record.execution, record.worker
    yield TimelineEvent(event="queued", at=written(record.created_at))
    if worker:
        yield TimelineEvent(event="fetched", at=None, by=worker, attempt=record.attempts)
    elif done is not None:
        worker = done.worker
        yield TimelineEvent(event="fetched", at=instant(done.fetched_at), by=worker, attempt=record.attempts)
        if done.began_at:
            began = {"rows": done.rows, "batch_rows": done.batch_rows}
            yield TimelineEvent(event="executing", at=written(done.began_at), by=worker, **began)
            yield TimelineEvent(event="executed", at=written(done.ended_at), by=worker)
    if record.state.is_terminal:
        yield TimelineEvent(event=record.state.value, at=instant(record.finished_at), by=worker)


def checked_limit(text: str | None) -> int:
    """Reads the size of a page."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is a number from 1 to {MAX_LIMIT}; got '{text[:40]}'")
    return int(text)
