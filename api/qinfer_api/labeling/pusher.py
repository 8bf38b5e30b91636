"""Pushes predictions to Label Studio: a role of every gateway, without a leader.

A gateway takes endings, pushes those of a project together, and then confirms them. An ending that was taken before may
have been pushed, so Label Studio is asked first: no prediction is stored twice. While Label Studio is unreachable
everything stays queued; a prediction that it refuses fails alone, with its reason.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from qinfer.core.messages import Failure
from qinfer.core.retry import OutageLog, pause_s
from qinfer.core.settings import Settings
from qinfer.errors import CorruptEntry, DeliveryError, InferenceFailed, QinferError, QueueFull
from qinfer.labeling.mapping import MappingBook
from qinfer.labeling.rules import parse_label_config
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.observe.stats import LabelFailure
from qinfer.queue.deliveries import outbox
from qinfer.queue.entries import Ending, RequestState
from qinfer.queue.lanes import Queue
from qinfer.wire.frame import decode_responses
from qinfer_api.labeling.intake import OUTBOX, Notes, TaskIntake
from qinfer_api.labeling.predict import prediction_of
from qinfer_api.labeling.studio import LabelStudio, StudioAway, StudioFailed, StudioRefused

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0

_QUEUE_PAUSE_S = 5.0
_FEED_PAUSES = 4  # other gateways' tasks can wait
_REMEMBERED = 10_000
# The only partition, until models are spread over several.
_PARTITION = 0
_GONE = "its result expired before Label Studio took it"
_DELETED = "the outputs are gone; have the task scored again"
_NOT_TAKEN = "Label Studio left the prediction out: it does not fit the project's label config"


class Made(NamedTuple):
    """A prediction to be pushed; `item` is its JSON for Label Studio."""

    ending: Ending
    entry: LabelTask
    item: dict[str, Any]


class Pusher:
    """Turns tasks into requests, and pushes predictions."""

    def __init__(
        self,
        settings: Settings,
        delivery: Queue,
        intake: TaskIntake,
        book: MappingBook,
        studio: LabelStudio,
    ) -> None:
        self._settings = settings.labeling
        self._requests = delivery.requests
        self._deliveries = delivery.deliveries
        self._tasks = LabelTasks(delivery)
        self._intake = intake
        self._book = book
        self._studio = studio
        self._pause_s = settings.requests.sweep_every_s
        self._kind = outbox(OUTBOX, 2 * settings.labeling.call_timeout_s + 10.0)
        self._step_s = self._kind.pause_s / 2  # then others may take over
        # Models that may have tasks; a removed mapping may have tasks left.
        self._models: dict[str, None] = {}
        # Models that may have ended requests.
        self._outboxes: dict[str, None] = {}
        self._outbox = ""
        self._finished: set[str] = set()
        # The failures to push, by the id of the ended request; the last to fail is last.
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Feeds and pushes until cancelled."""
        async with asyncio.TaskGroup() as group:
            feeding = self._again("feed", self.feed, _FEED_PAUSES * self._pause_s, self._intake.arrived)
            group.create_task(feeding, name="feed labeling tasks")
            group.create_task(self._again("push", self.push, self._pause_s, asyncio.Event()), name="push predictions")

    async def feed(self) -> int:
        """Turns tasks into requests, project by project; returns the number of requests."""
        count = 0
        fed: set[Board] = set()
        while left := [b for model in await self._mapped() for b in await self._tasks.boards(model) if b not in fed]:
            for board in random.sample(left, len(left)):  # spreads a tenant's rate
                taken = await self._intake.feed(board)
                count += taken
                if not taken:
                    fed.add(board)
        return count

    async def push(self) -> int:
        """Pushes the predictions of ended requests; returns how many it pushed."""
        count = 0
        for mapped in await self._mapped():
            self._outboxes |= dict.fromkeys(self._intake.outboxes(mapped))
        for model in list(self._outboxes):
            self._outbox = model
            while endings := await self._requests.endings(model, _PARTITION, self._kind, self._settings.push_batch):
                count += len(endings)
                await self._push(model, endings)
        return count

    async def _again(self, what: str, work: Callable[[], Awaitable[int]], usual_s: float, news: asyncio.Event) -> None:
        failures, away_s = 0, 0.0
        outage = OutageLog(logger, "predictions can't be pushed now", "predictions are pushed again", step=what)
        while True:
            try:
                async with asyncio.timeout(max(usual_s, away_s) * random.uniform(0.75, 1.25)):  # noqa: S311 - drift apart
                    await news.wait()
            except TimeoutError:
                pass
            news.clear()
            try:
                await work()
            except (DeliveryError, QueueFull, StudioAway, StudioFailed) as error:
                is_studio = isinstance(error, StudioAway | StudioFailed)
                failures += 1
                away_s = pause_s(failures, 2 * usual_s, LONGEST_PAUSE_S if is_studio else _QUEUE_PAUSE_S)
                outage.failed(error.message)
            except Exception as error:
                failures += 1
                away_s = pause_s(failures, 2 * usual_s, LONGEST_PAUSE_S)
                logger.exception("labeling step failed", extra={"reason": what, "error": str(error)})
            else:
                failures, away_s = 0, 0.0
                outage.over()

    async def _mapped(self) -> list[str]:
        self._models |= dict.fromkeys(mapping.model for mapping in await self._book.current())
        return list(self._models)

    async def _push(self, model: str, endings: Sequence[Ending]) -> None:
        """One project's failure does not delay the others."""
        by_board: dict[Board, list[tuple[Ending, Notes]]] = {}
        unread: list[str] = []
        for ending in endings:
            try:
                notes = msgspec.msgpack.decode(ending.notes, type=Notes)
            except (msgspec.DecodeError, msgspec.ValidationError):
                logger.error("ended request dropped: its notes are unreadable", extra={"request_id": ending.request_id})
                unread.append(ending.id)
                continue
            board = Board(notes.endpoint or model, notes.tenant, notes.project)
            by_board.setdefault(board, []).append((ending, notes))
        await self._confirm(unread)
        self._finished.clear()
        ends_s = time.monotonic() + self._step_s
        for board, found in by_board.items():
            pairs = await self._current(board, found)
            try:
                await self._push_all(board, await self._made(board, pairs, ends_s - self._step_s / 2), ends_s)
            except StudioAway as error:
                left = [entry for ending, entry in pairs if ending.id not in self._finished]
                late = [msgspec.structs.replace(entry, error=error.message) for entry in left]
                await self._intake.move_all(board, late, LabelState.SENDING)
                raise

    async def _current(self, board: Board, found: Sequence[tuple[Ending, Notes]]) -> list[tuple[Ending, LabelTask]]:
        """Returns current ends; confirms those that a newer request of the task replaced."""
        entries = await self._tasks.get(board, [notes.task for _, notes in found], with_data=True)
        pairs, late = [], []
        for (ending, notes), known in zip(found, entries, strict=True):
            name = ending.request_id.partition("@")[0]
            version = ending.record.version if ending.record is not None else 0
            entry = known or LabelTask(task=notes.task, request_id=name, version=version)
            if entry.request_id == name:
                pairs.append((ending, entry))
            else:
                late.append(ending.id)
        await self._confirm(late)
        return pairs

    async def _made(self, board: Board, pairs: Sequence[tuple[Ending, LabelTask]], ends_s: float) -> list[Made]:
        made = []
        for ending, entry in pairs:
            if time.monotonic() > ends_s:
                break
            try:
                made.append(Made(ending, entry, await self._item(board, ending, entry)))
            except (StudioAway, DeliveryError):
                raise
            except StudioFailed as error:
                await self._try_later(board, ending, entry, error)
            except QinferError as error:
                await self._fail(board, ending, entry, error.message, LabelFailure.NOT_PREDICTED)
            except Exception as error:  # the others continue
                about = {"request_id": entry.request_id, "model": board.model}
                logger.exception("prediction can't be made", extra=about)
                await self._fail(board, ending, entry, Failure.from_error(error).message, LabelFailure.NOT_PREDICTED)
        return made

    async def _item(self, board: Board, ending: Ending, entry: LabelTask) -> dict[str, Any]:
        record = ending.record
        if record is None:
            raise InferenceFailed(_GONE)
        if record.state is not RequestState.SUCCEEDED:
            raise InferenceFailed(record.message or f"its request was {record.state.value}")
        if ending.blob is None:
            raise InferenceFailed(_DELETED)
        try:
            response = decode_responses(ending.blob)[-1]
        except (CorruptEntry, IndexError):
            raise InferenceFailed(_DELETED) from None
        mapping = await self._book.mapping_for(board.model, board.project)
        label_config = parse_label_config(await self._studio.label_config(board.project))
        task = await self._intake.task_of(board, entry)
        return {"task": entry.task, **await prediction_of(mapping, task, response, label_config)}

    async def _push_all(self, board: Board, made: Sequence[Made], ends_s: float) -> None:
        """Pushes predictions one by one if some are refused."""
        fresh = await self._fresh(board, made, ends_s - self._step_s / 4)
        if not fresh or time.monotonic() > ends_s:
            return
        if len(fresh) == 1:
            await self._push_one(board, fresh[0])
            return
        try:
            created = await self._studio.push(board.project, [each.item for each in fresh])
        except StudioRefused:
            created = 0
        except StudioFailed:
            created = -1  # unknown
        if created == len(fresh):
            await self._done(board, fresh)
            return
        for each in fresh:
            if time.monotonic() > ends_s:
                return
            if created and await self._has(board, each):
                await self._done(board, [each])
            else:
                await self._push_one(board, each)

    async def _fresh(self, board: Board, made: Sequence[Made], ends_s: float) -> list[Made]:
        """Returns the predictions that Label Studio lacks; confirms the others."""
        there: list[Made] = []
        fresh: list[Made] = []
        for each in made:
            if time.monotonic() > ends_s:
                break
            was_tried = each.ending.attempts > 1 or each.entry.state is LabelState.SENDING
            (there if was_tried and await self._has(board, each) else fresh).append(each)
        await self._done(board, there)
        return fresh

    async def _push_one(self, board: Board, made: Made) -> None:
        try:
            if await self._studio.push(board.project, [made.item]):
                await self._done(board, [made])
            else:
                await self._fail(board, made.ending, made.entry, _NOT_TAKEN, LabelFailure.REFUSED)
        except StudioRefused as error:
            await self._fail(board, made.ending, made.entry, error.message, LabelFailure.REFUSED)
        except StudioFailed as error:
            await self._try_later(board, made.ending, made.entry, error)

    async def _has(self, board: Board, made: Made) -> bool:
        wanted = msgspec.json.decode(msgspec.json.encode(made.item))
        try:
            found = await self._studio.predictions(made.entry.task)
        except (StudioRefused, StudioFailed):
            return False
        return any(
            each.get("model_version") == wanted["model_version"] and each.get("result") == wanted["result"]
            for each in found
        )

    async def _done(self, board: Board, made: Sequence[Made]) -> None:
        if not made:
            return
        entries = [msgspec.structs.replace(each.entry, error="", score=each.item["score"]) for each in made]
        await self._intake.move_all(board, entries, LabelState.DONE)
        await self._confirm([each.ending.id for each in made])

    async def _fail(self, board: Board, ending: Ending, entry: LabelTask, error: str, why: LabelFailure) -> None:
        await self._intake.fail(board, entry, error, why)
        await self._confirm([ending.id])

    async def _try_later(self, board: Board, ending: Ending, entry: LabelTask, error: StudioFailed) -> None:
        failures = self._failures.pop(ending.id, 0) + 1  # `attempts` also counts rounds of outage
        if len(self._failures) >= _REMEMBERED:
            del self._failures[next(iter(self._failures))]  # failed longest ago: another gateway may have ended it
        self._failures[ending.id] = failures
        if failures >= self._settings.max_attempts:
            await self._fail(board, ending, entry, error.message, LabelFailure.PUSH_FAILED)
        else:
            self._finished.add(ending.id)
            await self._intake.move(board, entry, LabelState.SENDING, error=error.message)

    async def _confirm(self, ids: Sequence[str]) -> None:
        if ids:
            self._finished.update(ids)
            for each in ids:
                self._failures.pop(each, None)
            await self._deliveries.done(self._outbox, _PARTITION, self._kind, ids)
