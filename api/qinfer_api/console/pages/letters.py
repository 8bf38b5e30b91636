"""Dead letters: lists by a filter, one with its tensors; replay and removal of some, or of all that fit."""

import asyncio
from typing import NamedTuple

from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.core.messages import InferRequest
from qinfer.errors import CorruptEntry, Forbidden, InvalidRequest, RequestNotFound
from qinfer.queue.dead_letters import GONE, NOT_KEPT, DeadLetter, DeadLetters, head_of, id_of
from qinfer.wire.frame import decode_request
from qinfer_api.console.pages.requests import asked_filter, operate, query_of
from qinfer_api.console.tensors import ShownTensor, view_of
from qinfer_api.console.visit import PAGE_ROWS, PageActs, Pages, Visit
from qinfer_api.requests.letters import find_letter, letter_page, read_letter
from qinfer_api.requests.listing import letter_request

MOST_TABS = 8


class LetterContent(NamedTuple):
    """The request in a dead letter, as far as it can be read."""

    kind: str = "unreadable"
    timeout_s: float = 0.0
    parameters: tuple[tuple[str, object], ...] = ()
    inputs: tuple[ShownTensor, ...] = ()
    problem: str = ""


def letters_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    some: PageActs = {
        "replay": (_replay, Scope.INFER),
        "purge": (_purge, Scope.INFER),
        "operate": (operate, Scope.INFER),
    }
    one: PageActs = {"replay": (_replay_one, Scope.INFER), "purge": (_purge_one, Scope.INFER)}
    return [
        pages.route("/letters", letters, Scope.VIEWER, some),
        pages.route("/letters/{model}/{letter}", letter, Scope.INFER, one),
    ]


async def letters(visit: Visit) -> Response:
    """Lists dead letters, model by model, the oldest first."""
    chosen = asked_filter(visit, has_state=False)
    requests = visit.parts.services.requests
    try:
        rows, following = await letter_page(requests, visit.context, chosen, visit.query("after"), PAGE_ROWS)
    except (InvalidRequest, Forbidden) as error:
        visit.problem, rows, following = error.message, [], ""
    state = await visit.parts.live.now()
    counts = sorted(((count, model) for model, count in state.letters.items() if count), reverse=True)
    return visit.render(
        "letters.html",
        "Dead letters",
        "letters",
        rows=[(one, letter_request(one)) for one in rows],
        counts=counts[:MOST_TABS] if visit.user.is_admin else [],
        following=following,
        chosen=chosen,
        query=query_of(visit),
        is_filtered=bool(query_of(visit)),
        models=visit.parts.services.catalog.known()[:500],
        reads=visit.context.reads,
        now_s=requests.now_s(),
    )


async def letter(visit: Visit) -> Response:
    """Shows one dead letter with its tensors."""
    model, letter_id = visit.name("model"), visit.name("letter")
    try:
        found = await read_letter(visit.parts.services.requests, visit.context, model, letter_id, visit.room())
    except RequestNotFound:
        if not visit.done:
            raise
        return visit.render("gone.html", f"Dead letter {letter_id}", "letters", back="letters", what="Dead letters")
    content = await asyncio.to_thread(content_of, found)
    return visit.render("letter.html", f"Dead letter {letter_id}", "letters", name=model, letter=found, content=content)


def content_of(found: DeadLetter) -> LetterContent:
    """Reads the request in a dead letter."""
    try:
        request = decode_request(found.frame, found.payload)
    except CorruptEntry as error:
        return LetterContent(problem=_why_unreadable(found, head_of(found.frame), error.message))
    return LetterContent(
        kind="synchronous" if request.reply_to else "asynchronous",
        timeout_s=request.timeout_s,
        parameters=tuple(request.parameters.items()),
        inputs=tuple(view_of(tensor) for tensor in request.inputs),
    )


def _why_unreadable(found: DeadLetter, head: InferRequest | None, message: str) -> str:
    if head is not None and head.memory is not None:
        return NOT_KEPT.format(found.id)
    return GONE.format(found.id) if head is not None and head.payload and not found.payload else message


def _letters_of(visit: Visit) -> DeadLetters:
    return visit.parts.services.requests.delivery.dead_letters


async def _chosen(visit: Visit) -> list[tuple[str, str]]:
    """Returns model and id of the ticked dead letters, which the user must see."""
    pairs = [each.rpartition("/")[::2] for each in visit.form.get("id", [])][:PAGE_ROWS]
    if not pairs:
        raise InvalidRequest("no dead letter is chosen; tick those that you mean")
    if not visit.user.is_admin:
        requests = visit.parts.services.requests
        await asyncio.gather(*(find_letter(requests, visit.context, *pair) for pair in pairs))
    return [(model, letter_id) for model, letter_id in pairs if id_of(letter_id)]


async def _replay(visit: Visit) -> str:
    replayed, problems = 0, []
    for model, letter_id in await _chosen(visit):
        try:
            replayed += await _letters_of(visit).replay(model, letter_id)
        except CorruptEntry as error:
            problems.append(error.message)
    if problems:
        raise InvalidRequest(f"{_told(replayed)} replayed; {len(problems)} not: {problems[0]}")
    return f"{_told(replayed)} replayed: the requests are at the end of their lanes."


async def _purge(visit: Visit) -> str:
    removed = 0
    for model, letter_id in await _chosen(visit):
        removed += await _letters_of(visit).purge(model, [letter_id])
    return f"{_told(removed)} removed for good."


async def _replay_one(visit: Visit) -> str:
    model, letter_id = visit.name("model"), visit.name("letter")
    await find_letter(visit.parts.services.requests, visit.context, model, letter_id)
    if not await _letters_of(visit).replay(model, letter_id):
        raise RequestNotFound("the dead letter is gone; it was replayed or removed")
    return "The request is at the end of its lane again; its timeout starts anew."


async def _purge_one(visit: Visit) -> str:
    model, letter_id = visit.name("model"), visit.name("letter")
    await find_letter(visit.parts.services.requests, visit.context, model, letter_id)
    await _letters_of(visit).purge(model, [letter_id])
    return "The dead letter is removed for good."


def _told(count: int) -> str:
    return "1 dead letter was" if count == 1 else f"{count} dead letters were"
