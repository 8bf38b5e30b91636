"""Dead letters over HTTP: lists by a filter, and one with its tensors. Operations replay and discard them."""

import asyncio
from typing import NamedTuple

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Response
from qinfer.errors import CorruptEntry, RequestNotFound
from qinfer.models.repository.open import is_model_name
from qinfer.queue.dead_letters import GONE, DeadLetter, id_of, place_after
from qinfer.queue.values import LARGE_BYTES, Room
from qinfer.wire.frame import decode_request
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import CallerContext
from qinfer_api.requests.listing import (
    AT_ONCE,
    LIST_QUERY,
    MOST_READ,
    RequestFilter,
    checked_limit,
    chosen_models,
    filter_of,
    letter_request,
    own_filter,
)
from qinfer_api.requests.records import written
from qinfer_api.requests.service import AsyncRequests
from qinfer_api.rest.openapi import describe_response, errors, operation
from qinfer_api.rest.services import OUTPUTS, Services, authorize_read, room_of_answer, send_json, send_outputs

_NO_STATE = [one for one in LIST_QUERY if one["name"] != "state"]


class LetterBody(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: a request that was given up.

    Attributes:
        request_id: Empty for a shard of a bulk job, and for an entry that can't be decoded.
        code: The kind of failure, such as `inference_failed`.
        reason: Its message; empty for a key with the scope `viewer`.
        deliveries: The number of times that a worker had taken it.
        size: Bytes of the request with its tensors.
        tenant: The tenant; omitted if it is the caller's own.
    """

    id: str
    model: str
    version: int
    lane: str
    request_id: str
    code: str
    reason: str
    deliveries: int
    buried_at: str
    size: int
    tenant: str | UnsetType = UNSET


class LettersBody(msgspec.Struct, frozen=True):
    """A page of dead letters, model by model, the oldest first.

    Attributes:
        next: Give it as `after` for the next page; `null` after the last one. A page may be short although more follow.
    """

    dead_letters: list[LetterBody]
    next: str | None


class LetterPage(NamedTuple):
    """A page of dead letters, and the cursor of the next one; empty = it is the last."""

    letters: list[DeadLetter]
    next: str


async def letter_page(
    requests: AsyncRequests, context: CallerContext, chosen: RequestFilter, after: str, limit: int
) -> LetterPage:
    """Returns a page of the dead letters that a caller may see."""
    chosen, stored, now_s = own_filter(chosen, context), requests.delivery.dead_letters, requests.now_s()
    first, _, place = after.rpartition(":")
    place_after(place)
    models, read, found = chosen_models(requests, chosen.model, first), 0, list[DeadLetter]()
    counts = await asyncio.gather(*map(stored.count, models))
    for model in (model for model, count in zip(models, counts, strict=True) if count):
        at = place if model == first else ""
        while letters := await stored.list(model, after=at, count=AT_ONCE):
            for letter in letters:
                at = letter.id
                if chosen.fits_letter(letter, now_s, reads=context.reads):
                    found.append(letter)
                if len(found) == limit:
                    return LetterPage(found, f"{model}:{at}")
            read += len(letters)
            if read >= MOST_READ:
                return LetterPage(found, f"{model}:{at}")
    return LetterPage(found, "")


async def find_letter(requests: AsyncRequests, context: CallerContext, model: str, letter_id: str) -> DeadLetter:
    """Returns a dead letter that a caller may see, without its bytes, or raises `RequestNotFound`."""
    is_named = is_model_name(model) and id_of(letter_id) is not None
    found = await requests.delivery.dead_letters.find(model, letter_id) if is_named else None
    if found is None or not context.sees(found.tenant):
        raise _unknown(model, letter_id)
    return found


async def read_letter(
    requests: AsyncRequests, context: CallerContext, model: str, letter_id: str, room: Room
) -> DeadLetter:
    """Returns a dead letter as `find_letter`, with its bytes, once there is room for them."""
    letter = await find_letter(requests, context, model, letter_id)
    if letter.size > LARGE_BYTES:
        await room(letter.size)
    found = await requests.delivery.dead_letters.show(model, letter_id)
    if found is None:
        raise _unknown(model, letter_id)
    return found


def _unknown(model: str, letter_id: str) -> RequestNotFound:
    return RequestNotFound(f"model '{model[:100]}' has no dead letter '{letter_id[:60]}'")


def _shown(letter: DeadLetter, context: CallerContext) -> LetterBody:
    return LetterBody(
        id=letter.id,
        model=letter.lane.model,
        version=letter.lane.version,
        lane=letter.lane.name,
        request_id=letter_request(letter),
        code=letter.code,
        reason=letter.reason if context.reads else "",
        deliveries=letter.deliveries,
        buried_at=written(letter.buried_at),
        size=letter.size,
        tenant=UNSET if letter.tenant == context.tenant else letter.tenant,
    )


_REFUSALS = errors(401, 403, 404, 500, 503, s404="No such dead letter.")
_LIST = operation(
    "List the dead letters",
    {200: describe_response("The dead letters.", LettersBody), **errors(400, 401, 403, 503)},
    *_NO_STATE,
    scope=Scope.VIEWER,
)
_SHOW = operation("Look at a dead letter", {200: describe_response("The dead letter.", LetterBody), **_REFUSALS})
_INPUTS = operation("Read the inputs of a dead letter", {200: OUTPUTS, **_REFUSALS})


def letter_routes(services: Services) -> APIRouter:
    """Returns the routes of dead letters."""
    router, requests = APIRouter(tags=["asynchronous requests"]), services.requests
    one = "/v1/dead-letters/{model}/{letter_id}"

    @router.get("/v1/dead-letters", name="dead_letters", **_LIST)
    async def list_letters(request: Request) -> HttpResponse:
        """Lists the dead letters of the caller's tenant, with the scope `admin` all, by a filter."""
        context, params = authorize_read(services, request, Scope.VIEWER), request.query_params
        limit = checked_limit(params.get("limit"))
        page = await letter_page(requests, context, filter_of(params), params.get("after", ""), limit)
        return send_json(LettersBody([_shown(letter, context) for letter in page.letters], page.next or None))

    @router.get(one, name="dead_letter", **_SHOW)
    async def show_letter(model: str, letter_id: str, request: Request) -> HttpResponse:
        """Returns a dead letter without its tensors."""
        context = authorize_read(services, request)
        return send_json(_shown(await find_letter(requests, context, model, letter_id), context))

    @router.get(f"{one}/inputs", name="dead_letter_inputs", **_INPUTS)
    async def show_inputs(model: str, letter_id: str, request: Request) -> HttpResponse:
        """Returns the inputs of a dead letter, as `outputs`, in the form of an inference's answer."""
        context, room = authorize_read(services, request), room_of_answer(services, request)
        letter = await read_letter(requests, context, model, letter_id, room)
        try:
            found = decode_request(letter.frame, letter.payload)
        except CorruptEntry:
            raise CorruptEntry(GONE.format(letter.id)) from None
        answer = Response(request_id=found.id, model=model, version=letter.lane.version, outputs=found.inputs)
        return await send_outputs(services, request, answer, found.client_id, OutputPlan())

    return router
