"""Requests to endpoints: their counts by target, their evidence, and their shadows.

A shadow is a copy of a request, executed by another target and compared in a thread:

    request ─▶ stable target ─▶ reply to the caller, and then ─┐
       └─────▶ shadow's lane ─▶ ………………………………………………………………………─┴─▶ thread: compared ─▶ counts, samples

Replies do not wait for shadows, which are lost with their gateway, and dropped if too many are in flight.

The ends of stored requests are evidence for canaries on trial, and for shadows. The time in the queue does not count,
because it says nothing about the version. A request is chosen when it is accepted, before its end is known, so that the
evidence has no bias.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings_sections import EndpointSettings
from qinfer.errors import DeadlineExceeded, ErrorCode, InvalidRequest, Overloaded, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.queue.entries import RequestState
from qinfer.submission.memory import tensor_bytes
from qinfer.submission.pending import Inner, PendingCall, ResponseSink
from qinfer.submission.submit import Submission
from qinfer.tensors import Tensor
from qinfer.traffic.differences import Differences, Found
from qinfer.traffic.endpoints import Target
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.tally import Key, ShadowOutcome, TargetTally, key_of, witness_of
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Ending, timeout_of
from qinfer_api.stages import Passage, SinkWrapper, Stage
from qinfer_api.turns import SharedLimit

logger = logging.getLogger(__name__)

MOST_TARGETS = 64
"""The most targets whose differences are kept: those compared last."""

MOST = 128
"""The most watched requests of a target: each costs a read a second, and a slow target must not starve others."""

SHADOW_WAIT_S = 60.0
"""A shadow's longest wait for the request's own answer."""

_NOT_EXECUTED = frozenset({ErrorCode.DEADLINE_EXCEEDED.value, ErrorCode.CANCELLED.value})


class OnlineShadows(Stage):
    """Counts requests and their shadows; shadows leave half of `max_in_flight` to callers, `waiting` have no answer."""

    def __init__(
        self,
        submission: Submission,
        endpoints: Endpoints,
        tally: TargetTally,
        settings: EndpointSettings,
        max_in_flight: int,
    ) -> None:
        self.waiting = 0
        self._submission = submission
        self._endpoints = endpoints
        self._tally = tally
        self._settings = settings
        self._max_pending = max_in_flight // 2
        self._thread = ThreadPoolExecutor(1, "shadows")
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        self._differences: dict[Key, Differences] = {}
        self._in_flight = self._bytes = 0
        self._is_closed = False

    def before(self, passage: Passage) -> None:
        """Draws the shadows of a request to an endpoint, and wraps its sink."""
        request = passage.request
        entrance = self._submission.asked(request.model, request.version)
        timeout_s = timeout_of(entrance, passage.asked_s, passage.within_s)
        given_s = timeout_s if timeout_s < entrance.usual_timeout_s else math.inf
        given_s = min(given_s, request.timeout_s or math.inf)
        request.tenant = passage.context.tenant  # whose evidence it is
        passage.sink = TargetSink(self._tally, passage.sink, request, self.drawn(request), given_s)

    def accepted(self, context: CallerContext, request: OutgoingRequest, request_id: str) -> None:
        """Counts a stored request by its target."""
        self._tally.accepted(request)

    def drawn(self, request: OutgoingRequest) -> "Sequence[Shadow]":
        """Draws a request's shadows; call `start` or `left` on each."""
        targets = self._endpoints.shadows(request)
        return [shadow for target in targets if (shadow := self._shadow(target, request)) is not None]

    def _shadow(self, target: Target, request: OutgoingRequest) -> "Shadow | None":
        key, witness = (request.endpoint, target.label), witness_of(request)
        try:
            served, size = self._endpoints.catalog.find(*target.place), tensor_bytes(request)
            if served is not None and self._has_room(size):
                self._in_flight += 1
                self._bytes += size
                return Shadow(self, key, served, size, witness)
        except Exception:  # the request continues
            logger.exception("shadow not drawn", extra={"target": key[1]})
        self._tally.shadow(key, ShadowOutcome.DROPPED, witness)
        return None

    def _has_room(self, size: int) -> bool:
        settings = self._settings
        return (
            self._in_flight < settings.max_shadows
            and self._bytes + size <= settings.max_shadow_bytes
            and len(self._submission.pending) < self._max_pending
        )

    def submit(self, shadow: "Shadow", request: OutgoingRequest) -> PendingCall:
        """Submits a shadow of a submitted request."""
        model = shadow.served.spec.name
        copy = msgspec.structs.replace(
            request, model=model, trace="", priority=0, payload=False, inputs_digest=b"", endpoint=""
        )
        pending = self._submission.of(shadow.served).lane.submit_shadow(copy, shadow)
        self.waiting += 1
        return pending

    def took(self, size: int) -> bool:
        """Counts a shadow's bytes, if they fit."""
        self._bytes += size
        return self._bytes <= self._settings.max_shadow_bytes

    def compare(self, shadow: "Shadow", stable: Sequence[Tensor], other: Sequence[Tensor]) -> None:
        """Compares both answers, then calls `Shadow.compared`."""
        if self._is_closed:
            shadow.left()
            return
        is_batched = shadow.served.spec.max_batch_size > 0
        differences = self._of(shadow.key)
        found = self._thread.submit(differences.add, shadow.name, stable, other, is_batched=is_batched)
        found.add_done_callback(lambda each: self._on_compared(shadow, each))

    def _on_compared(self, shadow: "Shadow", found: "Future[bool]") -> None:
        with suppress(RuntimeError):
            self._call_soon(shadow.compared, found)

    def _of(self, key: Key) -> Differences:
        """Returns the differences of a target; they begin anew if the rules have changed."""
        routed, known = self._endpoints.by_name.get(key[0]), self._differences.pop(key, None)
        rules = {} if routed is None else routed.endpoint.compare
        if known is None or known.rules != rules:
            settings = self._settings
            known = Differences(rules, settings.sample_bytes, redact=settings.redact_samples)
        self._differences[key] = known
        while len(self._differences) > MOST_TARGETS:
            del self._differences[next(iter(self._differences))]
        return known

    def release_shadow(
        self, shadow: "Shadow", outcome: ShadowOutcome, size: int, pending: PendingCall | None = None
    ) -> None:
        """Counts an ended shadow, releases its memory, and cancels its call."""
        if pending is not None:
            self.waiting -= 1
            self._submission.pending.cancel(pending)
        self._in_flight -= 1
        self._bytes -= size
        self._tally.shadow(shadow.key, outcome, shadow.witness)

    async def found(self, endpoint: str) -> dict[str, Found]:
        """Returns an endpoint's findings, by target."""
        loop = asyncio.get_running_loop()
        known = {target: one for (name, target), one in self._differences.items() if name == endpoint}
        return {target: await loop.run_in_executor(self._thread, one.found) for target, one in known.items()}

    def close(self) -> None:
        """Stops comparing."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


class TargetSink(SinkWrapper):
    """Counts the end of a request by its target; its shadows get the answer after the caller.

    `given_s` is the caller's timeout, infinite if the model's configuration set it.
    """

    __slots__ = ("_given_s", "_key", "_shadows", "_tally", "_version", "_witness")

    def __init__(
        self,
        tally: TargetTally,
        inner: ResponseSink,
        request: OutgoingRequest,
        shadows: "Sequence[Shadow]" = (),
        given_s: float = math.inf,
    ) -> None:
        super().__init__(inner)
        self._tally = tally
        self._shadows = shadows
        self._key = key_of(request)
        self._version = request.version
        self._witness = witness_of(request)
        self._given_s = given_s

    def submitted(self, request: OutgoingRequest, pending: PendingCall) -> None:
        """Starts the shadows."""
        for shadow in self._shadows:
            shadow.start(request)

    def refused(self, error: QinferError) -> None:
        """Counts a refusal, and drops the shadows."""
        for shadow in self._shadows:
            shadow.left()
        if isinstance(error, InvalidRequest | Overloaded):
            self._tally.failed(self._key, error.code, self._witness, self._given_s)

    def deliver(self, response: Response) -> None:
        """Passes responses on; counts the last."""
        if response.final:
            took_s = time.monotonic() - self.began_s
            if response.version not in (self._version, 0):
                self._tally.moved((self._key[0], f"{response.model}:{response.version}"), took_s, response)
            elif response.failure is None:
                self._tally.count_answered(self._key, took_s, response, self._witness)
            else:
                self._tally.failed(self._key, response.failure.code, self._witness, self._given_s)
        self.inner.deliver(response)
        if response.final:
            for shadow in self._shadows:
                shadow.stable_answered(response)

    def left(self, request_id: str, version: int) -> None:
        """Counts a caller that went away."""
        del request_id, version
        self._tally.failed(self._key, ErrorCode.CANCELLED, self._witness)
        for shadow in self._shadows:
            shadow.left()


class Shadow(Inner):
    """One shadow; takes both targets' answers in any order.

    `witness` is the tenant whose evidence it is. `name` identifies the request in samples.
    """

    __slots__ = ("_has_ended", "_other", "_pending", "_shadows", "_size", "_stable", "key", "name", "served", "witness")

    def __init__(
        self, shadows: OnlineShadows, key: Key, served: ServedVersion, size: int, witness: str | None = ""
    ) -> None:
        self.key, self.served, self.name, self.witness = key, served, "", witness
        self._shadows = shadows
        self._size = size
        self._pending: PendingCall | None = None
        self._stable: Sequence[Tensor] | None = None
        self._other: Sequence[Tensor] | None = None
        self._has_ended = False

    def start(self, request: OutgoingRequest) -> None:
        """Submits the shadow, or drops it."""
        if self._has_ended:
            return
        try:
            self._pending = self._shadows.submit(self, request)
        except QinferError as error:
            logger.debug("shadow refused", extra={"target": self.key[1], "reason": error.message})
            self._end_shadow(ShadowOutcome.DROPPED)
        except Exception:  # the request continues
            logger.exception("shadow not submitted", extra={"target": self.key[1]})
            self._end_shadow(ShadowOutcome.DROPPED)
        else:
            self.name = request.client_id or self._pending.request_id

    def stable_answered(self, response: Response) -> None:
        """Stores the caller's answer."""
        if self._has_ended:
            return
        if response.failure is not None:
            self._end_shadow(ShadowOutcome.DROPPED)
            return
        try:
            self._stable = self._copy_outputs(response)
            self._compare()
        except Exception:  # the caller has its answer
            logger.exception("shadow not compared", extra={"target": self.key[1]})
            self._end_shadow(ShadowOutcome.DROPPED)

    def left(self) -> None:
        """Drops the shadow of an unanswered request."""
        self._end_shadow(ShadowOutcome.DROPPED)

    def deliver(self, response: Response) -> None:
        """Stores the shadow's answer."""
        self._take_pending()
        if self._has_ended:
            return
        if response.failure is not None:
            self._fail(response.failure.code)
            return
        self._other = self._copy_outputs(response)
        self._compare()

    def fail(self, error: Exception) -> None:
        """Takes a failure of the queue or the gateway in place of a response."""
        self._take_pending()
        self._fail(error.code.value if isinstance(error, DeadlineExceeded) else ErrorCode.CANCELLED.value)

    def compared(self, found: "Future[bool]") -> None:
        """Handles the result of the comparison."""
        error = None if found.cancelled() else found.exception()
        if found.cancelled():
            self._end_shadow(ShadowOutcome.DROPPED)
        elif error is not None:
            if not isinstance(error, InvalidRequest):
                logger.error("shadow not compared", exc_info=error, extra={"target": self.key[1]})
            self._end_shadow(ShadowOutcome.FAILED)
        else:
            self._end_shadow(ShadowOutcome.AGREED if found.result() else ShadowOutcome.DISAGREED)

    def _fail(self, code: str) -> None:
        self._end_shadow(ShadowOutcome.DROPPED if code in _NOT_EXECUTED else ShadowOutcome.FAILED)

    def _copy_outputs(self, response: Response) -> Sequence[Tensor]:
        """Copies outputs that may share memory."""
        size = sum(len(tensor.data) for tensor in response.outputs)
        self._size += size
        if not self._shadows.took(size):
            self._end_shadow(ShadowOutcome.DROPPED)
            return ()
        return [Tensor(each.name, each.datatype, each.shape, bytes(each.data)) for each in response.outputs]

    def _compare(self) -> None:
        if self._stable is not None and self._other is not None and not self._has_ended:
            self._shadows.compare(self, self._stable, self._other)

    def _take_pending(self) -> None:
        if self._pending is not None:
            self._pending = None
            self._shadows.waiting -= 1

    def _end_shadow(self, outcome: ShadowOutcome) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._stable = self._other = None
        pending, self._pending = self._pending, None
        self._shadows.release_shadow(self, outcome, self._size, pending)


class StoredEnds:
    """Watches the ends of stored requests; each gateway has one."""

    def __init__(self, targets: TargetTally, shadows: OnlineShadows) -> None:
        self._targets = targets
        self._shadows = shadows
        self._waiting: dict[Key, SharedLimit] = defaultdict(SharedLimit)
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, request: OutgoingRequest, ending: Ending, tenant: str, given_s: float) -> None:
        """Watches a stored request; `given_s` is the caller's timeout, infinite if the model's configuration set it."""
        key, witness = key_of(request), witness_of(request)
        if not self._waiting[key].has_room(MOST, tenant):
            return
        drawn = self._shadows.drawn(request)
        is_evidence = witness is not None and key in self._targets.observed.by_target
        if not drawn and not is_evidence:
            return
        loop = asyncio.get_running_loop()
        for shadow in drawn:
            shadow.start(request)
            loop.call_later(SHADOW_WAIT_S, shadow.left)
        self._waiting[key].take_place(tenant)
        task = loop.create_task(self._follow(key, drawn, ending, witness, given_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._waiting[key].free_place(tenant))

    async def close(self) -> None:
        """Stops watching."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(
        self, key: Key, shadows: Sequence[Shadow], ending: Ending, witness: str | None, given_s: float
    ) -> None:
        try:
            async with ending() as (record, last):
                response = last if record is not None and record.state is RequestState.SUCCEEDED else None
                waiting, shadows = shadows, ()
                for shadow in waiting:
                    shadow.left() if response is None else shadow.stable_answered(response)
                on_trial = self._targets.observed.by_target.get(key)
                if witness is None or on_trial is None or record is None or not record.state.is_terminal:
                    return
                if response is not None:
                    on_trial.executed(response, witness)
                elif record.state is not RequestState.SUCCEEDED:
                    on_trial.failed(record.code, witness, given_s)
        except QinferError as error:
            logger.debug("the outcome of a stored request can't be counted", extra={"reason": error.message})
        except Exception:  # a failing watcher must not disturb other work of the gateway
            logger.exception("the outcome of a stored request can't be counted")
        finally:
            for shadow in shadows:
                shadow.left()
