"""Operations on many stored requests or dead letters (`/v1/operations`), and the work on them.

A role of every gateway: it takes the lease of each open operation, and works on it in portions of `AT_ONCE`. An
operation concerns what was there when it was created; so it ends, and a letter that fails again is replayed once.
Replays wait while half of the model's lane is full.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.retry import OutageLog
from qinfer.errors import Cancelled, CorruptEntry, InvalidRequest, Overloaded, QinferError, RequestNotFound
from qinfer.models.repository.open import is_model_name
from qinfer.observe.logs import AUDIT
from qinfer.queue.dead_letters import DeadLetter
from qinfer.queue.entries import RequestRecord, RequestState, Settlement
from qinfer.queue.operations import MOST_OPEN, Operation, OperationProgress, Operations, OperationState
from qinfer.queue.requests import LISTED, UNFINISHED, ListPlace
from qinfer_api.auth import CallerContext, administrative
from qinfer_api.requests.listing import AT_ONCE, RequestFilter, checked_limit, letter_request, own_filter, read_filter
from qinfer_api.requests.records import failed_outcome, instant, made_by_server, shown_id, written
from qinfer_api.requests.service import AsyncRequests
from qinfer_api.rest.openapi import body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, authorize_read, peer_of, read_json, send_json
from qinfer_api.turns import SharedLimit

audit = logging.getLogger(AUDIT)
logger = logging.getLogger(__name__)

SAMPLE = 10
BY_FILTER = "the operation was asked for by a filter"

_PARTITION = 0


class OperationAction(StrEnum):
    """The change: `cancel` and `purge` of requests, `replay` and `discard` of dead letters."""

    CANCEL = "cancel"
    PURGE = "purge"
    REPLAY = "replay"
    DISCARD = "discard"

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes of the requests that it changes; none for dead letters."""
        if self is OperationAction.CANCEL:
            return (UNFINISHED,)
        return tuple(index for index in LISTED if index != UNFINISHED) if self is OperationAction.PURGE else ()


class NewOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation.

    Attributes:
        action: cancel (unfinished requests) | purge (the results of ended requests) | replay (dead letters, which are
            executed again) | discard (dead letters)
        filter: The choice of requests or dead letters; it names a model. Dead letters have no `state`.
        dry_run: Only count, and show a sample.

    Example:
        {"action": "replay", "filter": {"model": "digits", "error": "out of memory"}, "dry_run": true}
    """

    action: OperationAction
    filter: dict[str, Any]
    dry_run: bool = False


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """The stored description; the filter's tenant is that of the caller, unless it sees all."""

    action: OperationAction
    filter: RequestFilter
    dry_run: bool
    tenant: str
    key: str


class OperationBody(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on many requests or dead letters; it is kept for a week.

    Attributes:
        state: running | done | stopped
        total: Requests in the states that the action changes, or dead letters, of all tenants, when it was created;
            only with the scope `admin`.
        looked: The number of these that it has read.
        found: The number that it chose; a portion that a killed gateway had changed is not chosen again.
        changed: The number that it has cancelled, purged, replayed or discarded; exact, even if processes die.
        refused: The number that could not be changed, such as dead letters without tensors; `reason` is of the last.
        sample: Ids of the first requests that it chose.
        by: The id of the API key; empty where keys are not required.
    """

    id: str
    action: OperationAction
    model: str
    filter: RequestFilter
    dry_run: bool
    state: OperationState
    created_at: str
    ended_at: str | None
    total: int | None
    looked: int | None
    found: int
    changed: int
    refused: int
    reason: str
    sample: list[str]
    by: str


class OperationsBody(msgspec.Struct, frozen=True):
    """The newest operations."""

    operations: list[OperationBody]


class _Portion(NamedTuple):
    """A portion: the number that it has read, the chosen ids, how to change them, and the place behind it."""

    place: tuple[str, ...]
    looked: int
    chosen: Sequence[str]
    change: Callable[[], Awaitable[Sequence[CorruptEntry]]]

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.looked < AT_ONCE


class RequestOperations:
    """The operations of a gateway, whose name is `owner`."""

    def __init__(self, requests: AsyncRequests, owner: str) -> None:
        self._requests = requests
        self._stored, self._letters = requests.delivery.requests, requests.delivery.dead_letters
        self._operations = Operations(requests.delivery.router)
        self._owner = owner
        self._news = asyncio.Event()

    async def create(self, context: CallerContext, new: NewOperation) -> OperationBody:
        """Creates an operation, which a gateway begins at once."""
        chosen = own_filter(read_filter(new.filter), context)
        if not is_model_name(chosen.model) or chosen.model in self._requests.dispatcher.endpoints.by_name:
            raise InvalidRequest("the filter of an operation names a model; give each model its own operation")
        if chosen.state and not new.action.indexes:
            raise InvalidRequest(f"'{new.action}' changes dead letters, which have no state; leave 'state' out")
        await self._check_room(context.tenant)
        key = "" if context.principal is None else context.principal.key_id
        about = _Description(action=new.action, filter=chosen, dry_run=new.dry_run, tenant=context.tenant, key=key)
        created = Operation(
            id=self._requests.ids.request_id(chosen.model, _PARTITION),
            model=chosen.model,
            about=msgspec.json.encode(about),
            created_at=self._requests.now_s(),
            total=await self._total(chosen.model, new.action),
        )
        await self._operations.create(created)
        self._news.set()
        return _shown(context, created, about)

    async def find(self, context: CallerContext, operation_id: str) -> OperationBody:
        """Returns an operation of the caller's tenant."""
        found, about = await self._own(context, operation_id)
        return _shown(context, found, about)

    async def newest(self, context: CallerContext, count: int) -> list[OperationBody]:
        """Returns the caller's among the newest operations."""
        ids = await self._operations.newest(count)
        bodies = []
        for found in await asyncio.gather(*map(self._operations.find, ids), return_exceptions=True):
            with suppress(CorruptEntry):  # a damaged record must not hide others
                if isinstance(found, BaseException):
                    raise found
                if found is not None and context.sees((about := _about(found)).tenant):
                    bodies.append(_shown(context, found, about))
        return bodies

    async def stop(self, context: CallerContext, operation_id: str) -> OperationBody:
        """Stops an operation; its changes stay."""
        await self._own(context, operation_id)
        await self._operations.end(operation_id, OperationState.STOPPED, self._requests.now_s())
        return await self.find(context, operation_id)

    async def run(self) -> None:
        """Works on open operations until cancelled."""
        outage = OutageLog(logger, "operations on requests don't go on", "operations on requests go on again")
        try:
            while True:
                is_busy = False
                try:
                    with outage.noted():
                        is_busy = await self.round()
                except Exception as error:  # noqa: BLE001 - the boundary: one record must not cost the gateway
                    outage.failed(type(error).__name__, error)
                if not is_busy:
                    self._news.clear()
                    await _within(self._news.wait(), self._requests.settings.sweep_every_s)
        finally:
            await _within(self._give_back(), 1.0)

    async def round(self) -> bool:
        """Works on a portion of each operation that no other gateway leads; returns whether there may be more.

        An error of one operation is raised once the others have no more.
        """
        is_busy, failure = False, None
        for operation_id in await self._operations.open():
            try:
                if await self._operations.lead(operation_id, self._owner):
                    is_busy |= await self._advance(operation_id)
            except (QinferError, TypeError, ValueError) as error:  # one model's node, or one damaged record
                failure = error
        if failure is not None and not is_busy:
            raise failure
        return is_busy

    async def _advance(self, operation_id: str) -> bool:
        found = await self._operations.find(operation_id)
        if found is None or found.state is not OperationState.RUNNING:
            await self._operations.close(operation_id)
            return False
        about = _about(found)
        if about.action is OperationAction.REPLAY and not about.dry_run and await self._is_crowded(found.model):
            return False
        portion = await (self._of_requests if about.action.indexes else self._of_letters)(found, about)
        refused = [] if about.dry_run or not portion.chosen else await portion.change()
        before = found.progress
        progress = OperationProgress(
            place=portion.place or before.place,
            looked=before.looked + portion.looked,
            found=before.found + len(portion.chosen),
            refused=before.refused + len(refused),
            reason=refused[-1].message if refused else before.reason,
            sample=(*before.sample, *portion.chosen)[:SAMPLE],
        )
        if not await self._operations.save(found, progress) or not portion.is_last:
            return True
        ended = await self._operations.find(operation_id) or found
        counts = {"found": progress.found, "changed": ended.changed, "refused": progress.refused}
        who = {"tenant": about.tenant, "key": about.key, "dry_run": about.dry_run}
        what = {"operation": operation_id, "action": about.action.value, "model": found.model}
        audit.info("operation done", extra=what | who | counts)  # first: after a crash twice rather than never
        await self._operations.end(operation_id, OperationState.DONE, self._requests.now_s())
        return True

    async def _of_requests(self, found: Operation, about: _Description) -> _Portion:
        place = ListPlace(*found.progress.place)
        indexes = [index for index in about.action.indexes if index in about.filter.indexes]
        listed = await self._stored.list_requests(found.model, _PARTITION, place, AT_ONCE, indexes) if indexes else []
        records = [one.record for one in listed if one.record is not None]
        chosen = [record for record in records if about.filter.fits(record, found.created_at)]
        ids = [shown_id(record.address) for record in chosen]
        after = tuple(listed[-1].place) if listed else ()
        act = self._cancel if about.action is OperationAction.CANCEL else self._purge
        return _Portion(after, len(listed), ids, lambda: act(chosen, found.key))

    async def _of_letters(self, found: Operation, about: _Description) -> _Portion:
        (after,) = found.progress.place or ("",)
        letters = await self._letters.list(found.model, after=after, count=AT_ONCE)
        chosen = [letter for letter in letters if about.filter.fits_letter(letter, found.created_at)]
        ids = [letter_request(letter) for letter in chosen]
        act = self._replay if about.action is OperationAction.REPLAY else self._discard
        return _Portion((letters[-1].id,) if letters else (), len(letters), ids, lambda: act(chosen, found))

    async def _cancel(self, records: Sequence[RequestRecord], key: bytes) -> Sequence[CorruptEntry]:
        settlements = [
            Settlement(
                address=record.address,
                outcome=failed_outcome(record.address, RequestState.CANCELLED, Cancelled(BY_FILTER), record.version),
            )
            for record in records
        ]
        firsts = await self._stored.settle(settlements, key)
        for record, is_first in zip(records, firsts, strict=True):
            if is_first:
                self._requests.count_cancelled(record)
        return []

    async def _purge(self, records: Sequence[RequestRecord], key: bytes) -> Sequence[CorruptEntry]:
        await asyncio.gather(*(self._stored.remove_result(record.address, key) for record in records))
        return []

    async def _replay(self, letters: Sequence[DeadLetter], found: Operation) -> Sequence[CorruptEntry]:
        calls = (self._letters.replay(found.model, letter.id, found.key) for letter in letters)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, CorruptEntry):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, CorruptEntry)]

    async def _discard(self, letters: Sequence[DeadLetter], found: Operation) -> Sequence[CorruptEntry]:
        await self._letters.purge_counted(found.model, [letter.id for letter in letters], found.key)
        return []

    async def _is_crowded(self, model: str) -> bool:
        """Tells whether half of a lane's capacity is used in any version."""
        catalog = self._requests.catalog
        spec = catalog.spec(model)
        lanes = [lane for version in catalog.versions(model) for lane in catalog.lanes(model, version)]
        return spec is not None and max(await self._requests.delivery.depth(lanes), default=0) > spec.lane_capacity / 2

    async def _check_room(self, tenant: str) -> None:
        """Raises `Overloaded` if all places of open operations, or a tenant's share of them, are taken."""
        ids = await self._operations.open()
        found = await asyncio.gather(*map(self._operations.find, ids), return_exceptions=True)
        limit = SharedLimit()
        for one in found:
            if isinstance(one, Operation):
                with suppress(CorruptEntry):
                    limit.take_place(_about(one).tenant)
        if len(ids) >= MOST_OPEN or not limit.has_room(MOST_OPEN, tenant):
            raise Overloaded(f"{len(ids)} operations are running; wait until some have ended, or stop some")

    async def _total(self, model: str, action: OperationAction) -> int:
        if action.indexes:
            return await self._stored.count(model, _PARTITION, action.indexes)
        return await self._letters.count(model)

    async def _own(self, context: CallerContext, operation_id: str) -> tuple[Operation, _Description]:
        made = made_by_server(operation_id)
        found = await self._operations.find(operation_id) if made and is_model_name(made.model) else None
        if found is None or not context.sees((about := _about(found)).tenant):
            raise RequestNotFound(f"operation '{operation_id[:100]}' is not known; operations are kept for a week")
        return found, about

    async def _give_back(self) -> None:
        for operation_id in await self._operations.open():
            await self._operations.lead(operation_id, self._owner, 0.0)


async def _within(work: Awaitable[object], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except (TimeoutError, QinferError):
        return


def _about(operation: Operation) -> _Description:
    try:
        return msgspec.json.decode(operation.about, type=_Description)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"the description of operation '{operation.id}' is damaged: {error}") from None


def _shown(context: CallerContext, found: Operation, about: _Description) -> OperationBody:
    progress, sees_all = found.progress, context.sees_all
    return OperationBody(
        id=found.id,
        action=about.action,
        model=found.model,
        filter=about.filter,
        dry_run=about.dry_run,
        state=found.state,
        created_at=written(found.created_at),
        ended_at=instant(found.ended_at),
        total=found.total if sees_all else None,
        looked=progress.looked if sees_all else None,
        found=progress.found,
        changed=found.changed,
        refused=progress.refused,
        reason=progress.reason if context.reads else "",
        sample=list(progress.sample),
        by=about.key,
    )


_ONE = describe_response("The operation.", OperationBody)
_REFUSALS = {"s404": "No such operation."}
_CREATE = operation("Change many requests", {202: _ONE, **errors(400, 401, 403, 503)}, takes=body(NewOperation))
_LIST = operation(
    "List the operations",
    {200: describe_response("The operations.", OperationsBody), **errors(400, 401, 403, 503)},
    query("limit", "How many to look at, at most.", type="integer", minimum=1, maximum=1000, default=100),
    scope=Scope.VIEWER,
)
_SHOW = operation("Look at an operation", {200: _ONE, **errors(401, 403, 404, 503, **_REFUSALS)}, scope=Scope.VIEWER)
_STOP = operation("Stop an operation", {200: _ONE, **errors(401, 403, 404, 503, **_REFUSALS)})


def operation_routes(services: Services, operations: RequestOperations) -> APIRouter:
    """Returns the routes of operations."""
    router = APIRouter(tags=["asynchronous requests"])

    @router.post("/v1/operations", name="create_operation", **_CREATE)
    async def create(request: Request) -> HttpResponse:
        """Cancels or purges requests, or replays or discards dead letters, by a filter, in the background.

        The requests are those of the caller's tenant, with the scope `admin` of all tenants. A second operation with
        the same filter finds only what the first one has left: a dead letter that both replay becomes one request.
        """
        context = authorize_read(services, request)
        with administrative(context, request.method, request.scope["path"], peer_of(request)):
            return send_json(await operations.create(context, await read_json(services, request, NewOperation)), 202)

    @router.get("/v1/operations", name="operations", **_LIST)
    async def list_operations(request: Request) -> HttpResponse:
        """Lists the newest operations, of the caller's tenant unless it is an administrator."""
        context = authorize_read(services, request, Scope.VIEWER)
        limit = checked_limit(request.query_params.get("limit"))
        return send_json(OperationsBody(await operations.newest(context, limit)))

    @router.get("/v1/operations/{operation_id}", name="operation", **_SHOW)
    async def show_operation(operation_id: str, request: Request) -> HttpResponse:
        """Returns an operation with its progress."""
        return send_json(await operations.find(authorize_read(services, request, Scope.VIEWER), operation_id))

    @router.delete("/v1/operations/{operation_id}", name="stop_operation", **_STOP)
    async def stop(operation_id: str, request: Request) -> HttpResponse:
        """Stops an operation after its present portion; its changes stay."""
        context = authorize_read(services, request)
        with administrative(context, request.method, request.scope["path"], peer_of(request)):
            return send_json(await operations.stop(context, operation_id))

    return router
