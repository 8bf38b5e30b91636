"""Recordings of requests: `/v1/recordings`, with the scope `admin`, and the entrances that copy what arrives.

While a model is recorded, its entrances are composed with one that copies; all others stay as they are. Copies wait in
bounded memory for a task that writes them; requests never wait for it. Callers, headers and ids are not copied.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.messages import OutgoingRequest, Scalar
from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, InvalidRequest, RequestNotFound
from qinfer.queue.entries import EntryAddress
from qinfer.submission.pending import Counter, PendingCall, ResponseSink
from qinfer.submission.submit import Entrance, StampedRequest, Submission
from qinfer.traffic.recordings import COPIES, COPY_BYTES, LONGEST_S, MOST_BYTES, MOST_REQUESTS, RecordingStore
from qinfer.wire.bodies import RecordedPage, RecordedRequest, RecordedTensor, Recording
from qinfer_api.auth import administrative
from qinfer_api.http.infer import HttpReply, compile_forward
from qinfer_api.rest.openapi import body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, authorize, guarded, peer_of, read_json, send, send_json

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
"""The longest delay until a gateway without a wake-up knows of a recording, or of its end."""

_RETRY_S = 1.0
_WAITING_BYTES = 16 * 2**20
_BATCH_BYTES = 2**20


class RunningRecording:
    """A recording in this gateway: copies that wait to be written, within `_WAITING_BYTES`."""

    def __init__(self, of: Recording, now_s: Callable[[], float], written: asyncio.Event) -> None:
        self.of = of
        self.is_full = False
        self._now_s, self._news = now_s, written
        self._waiting: deque[RecordedRequest] = deque()
        self._nbytes = 0
        self._copied = 0
        self._dropped = 0

    def copy_of(self, request: OutgoingRequest, without: tuple[re.Pattern[str], ...]) -> RecordedRequest | None:
        """Copies a request before it is submitted, unless the recording is over; counts one that has no room."""
        now_s = self._now_s()
        if self.is_full or now_s >= self.of.ends_at:
            return None
        nbytes = _size(request)
        if nbytes > COPY_BYTES or self._nbytes + nbytes > _WAITING_BYTES:
            self._dropped += 1
            self._news.set()
            return None
        parameters: dict[str, Scalar] = {
            name: value
            for name, value in request.parameters.items()
            if not any(pattern.fullmatch(name) for pattern in without)
        }
        if (step := request.sequence) is not None:
            known = sha256(f"{self.of.id} {step.callers_id!r}".encode()).digest()
            parameters |= {"sequence_id": 1 + int.from_bytes(known[:4], "big") // 2}
            parameters |= {"sequence_start": step.start, "sequence_end": step.end}
        tensors = tuple(
            RecordedTensor(name=one.name, datatype=one.datatype, shape=one.shape, data=bytes(one.data))
            for one in request.inputs
        )
        arrival_ms = max(round((now_s - self.of.begins_at) * 1000, 3), 0.0)
        return RecordedRequest(arrival_ms=arrival_ms, inputs=tensors, parameters=parameters)

    def keep_copy(self, copy: RecordedRequest) -> None:
        """Keeps the copy of a request that was accepted, to be written."""
        self._waiting.append(copy)
        self._nbytes += _size(copy)
        self._copied += 1
        # copies of other gateways are counted when they are written
        self.is_full = self._copied >= self.of.requests
        self._news.set()

    async def write_copies(self, store: RecordingStore) -> None:
        """Writes the copies that wait; those that Redis does not take are dropped, and counted."""
        while self._waiting or self._dropped:
            batch, nbytes = list[bytes](), 0
            while self._waiting and nbytes < _BATCH_BYTES:
                copy = self._waiting.popleft()
                self._nbytes -= _size(copy)
                batch.append(COPIES.encode(copy))
                nbytes += len(batch[-1])
            dropped, self._dropped = self._dropped, 0
            try:
                is_full = await store.append_copies(self.of, batch, dropped)
            except BrokerUnavailable:
                self._dropped += dropped + len(batch)
                raise
            if is_full:
                self.is_full = True
                self._waiting.clear()
                self._nbytes = 0
                with suppress(RequestNotFound):  # its copies have expired
                    await store.end_recording(self.of.id)


def _size(one: OutgoingRequest | RecordedRequest) -> int:
    return 256 + sum([len(tensor.data) for tensor in one.inputs])


class RecordingEntrance(Entrance):
    """Copies the requests that the entrance behind it accepts."""

    def __init__(self, inner: Entrance, to: RunningRecording, without: tuple[re.Pattern[str], ...]) -> None:
        super().__init__(inner.served, inner)
        self.lands = inner.lands
        self._inner, self._to, self._without = inner, to, without

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        copy = self._to.copy_of(request, self._without)
        pending = self._inner.submit(request, sink, timeout_s, quota)
        if copy is not None:
            self._to.keep_copy(copy)
        return pending

    def store(self, request: OutgoingRequest, address: EntryAddress, timeout_s: float) -> Callable[[], StampedRequest]:
        """See `Entrance.store`."""
        copy = self._to.copy_of(request, self._without)
        prepared = self._inner.store(request, address, timeout_s)
        if copy is not None:
            self._to.keep_copy(copy)
        return prepared


class Recorder:
    """Follows the recordings of the installation, puts their entrances in place, and writes the copies."""

    def __init__(
        self, store: RecordingStore, submission: Submission, settings: Settings, now_s: Callable[[], float]
    ) -> None:
        self.store, self.now_s = store, now_s
        self._submission, self._plain = submission, submission.outermost
        patterns = (
            compile_forward("QINFER_HTTP__HEADER_FORWARD_PATTERN", settings.http.header_forward_pattern),
            compile_forward("QINFER_GRPC__HEADER_FORWARD_PATTERN", settings.grpc.header_forward_pattern),
        )
        self._without = tuple(pattern for pattern in patterns if pattern is not None)
        self._by_model: dict[str, RunningRecording] = {}
        self._news = asyncio.Event()
        self._following = asyncio.Lock()
        submission.outermost = self._wrap

    async def run(self) -> None:
        """Follows recordings and writes copies until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._write())

    async def refresh_recordings(self) -> None:
        """Reads the recordings that run, and composes the entrances of models whose recording begins or ends."""
        async with self._following:
            wanted = {one.model: one for one in await self.store.running()}
            before = {model: running.of for model, running in self._by_model.items()}
            for model in wanted.keys() | before.keys():
                now, last = wanted.get(model), before.get(model)
                if now == last:
                    continue
                ended = self._by_model.pop(model, None)
                if now is not None:
                    self._by_model[model] = RunningRecording(now, self.now_s, self._news)
                self._submission.recompose(model)
                logger.info("recording begins" if now else "recording has ended", extra={"model": model})
                if ended is not None:
                    await ended.write_copies(self.store)

    def _wrap(self, entrance: Entrance) -> Entrance:
        entrance = self._plain(entrance)
        recording = self._by_model.get(entrance.spec.name)
        return entrance if recording is None else RecordingEntrance(entrance, recording, self._without)

    async def _follow(self) -> None:
        outage = OutageLog(logger, "recordings can't be read", "recordings can be read again")
        while True:
            with outage.noted(BrokerUnavailable):
                await self.store.wait(FOLLOW_EVERY_S)
                await self.refresh_recordings()
            if outage.is_out:
                await asyncio.sleep(_RETRY_S)  # the store can't wake it

    async def _write(self) -> None:
        outage = OutageLog(logger, "copies of requests can't be written", "copies of requests can be written again")
        while True:
            await self._news.wait()
            self._news.clear()
            with outage.noted(BrokerUnavailable):
                for running in list(self._by_model.values()):
                    await running.write_copies(self.store)
            if outage.is_out:
                await asyncio.sleep(_RETRY_S)
                self._news.set()


class RecordingCall(msgspec.Struct, frozen=True):
    """The bounds of a recording; it ends with the first that is reached.

    Attributes:
        requests: The most requests, up to 100,000.
        bytes: The most bytes of all copies, up to 256 MiB.
        seconds: The longest time, up to an hour.

    Example:
        {"requests": 1000, "seconds": 60}
    """

    requests: Annotated[int, msgspec.Meta(ge=1, le=MOST_REQUESTS)] = 1000
    bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)] = 64 * 2**20
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)] = 60.0


_BEGIN = operation(
    "Record a model's requests",
    {200: describe_response("The recording.", Recording), **errors(400, 401, 403, 404, 409, 503)},
    takes=body(RecordingCall, required=False),
)
_AFTER = query("after", "The `next` of the page before; the first copies if omitted.", type="string", examples=["1-0"])
_PAGE = operation(
    "Read a recording",
    {200: describe_response("The next copies.", RecordedPage), **errors(400, 401, 403, 404, 503)},
    _AFTER,
    scope=Scope.ADMIN,
)
_RUNNING = operation(
    "List the recordings", {200: describe_response("The recordings.", list[Recording]), **errors(401, 403, 503)}
)
_STOP = operation("Stop a recording", {200: describe_response("Done."), **errors(401, 403, 404, 503)})


def recording_routes(services: Services, recorder: Recorder) -> APIRouter:
    """Returns the routes of recordings."""
    router, store = APIRouter(tags=["models"]), recorder.store
    admin: Any = {"dependencies": guarded(services, "model-repository", Scope.ADMIN)}
    listed: Any = {"dependencies": guarded(services, "model-repository", Scope.VIEWER)}

    @router.post("/v1/models/{model}/recordings", name="record", **admin, **_BEGIN)
    async def begin_recording(model: str, request: Request) -> HttpResponse:
        """Begins to copy the requests for a model that arrive at any gateway, synchronous and stored ones.

        Copies have inputs, parameters and the time of arrival; no headers, keys, tenants or ids. Requests that
        models and bridges send are not copied, nor are requests above 4 MiB. A copy that would delay a request is
        dropped.
        """
        if model in services.dispatcher.endpoints.by_name and model not in services.catalog.known():
            raise InvalidRequest(f"'{model}' is an endpoint; record the model of a target")
        services.catalog.status(model)
        call = await read_json(services, request, RecordingCall, may_be_empty=True)
        made = await store.open_recording(model, call.requests, call.bytes, call.seconds, recorder.now_s())
        await recorder.refresh_recordings()
        return send_json(made)

    @router.get("/v1/recordings", name="recordings", **listed, **_RUNNING)
    async def list_recordings() -> HttpResponse:
        """Lists the recordings that run."""
        return send_json(await store.running())

    @router.get(
        "/v1/recordings/{recording}", name="recording", dependencies=guarded(services, "model-repository"), **_PAGE
    )
    async def read_recording(recording: str, request: Request) -> HttpResponse:
        """Returns the copies behind `after`; waits a moment if there are no further ones yet.

        Copies are kept for ten minutes after the end. The audit log has a line for the first page.
        """
        context, after = authorize(services, request, Scope.ADMIN), request.query_params.get("after", "")
        if after:
            return send_json(await store.page_of_copies(recording, after, recorder.now_s()))
        with administrative(context, request.method, request.scope["path"], peer_of(request)):
            return send_json(await store.page_of_copies(recording, after, recorder.now_s()))

    @router.delete("/v1/recordings/{recording}", name="stop_recording", **admin, **_STOP)
    async def stop_recording(recording: str) -> HttpResponse:
        """Ends a recording; its copies can be read for ten minutes."""
        await store.end_recording(recording)
        await recorder.refresh_recordings()
        return send(HttpReply(200, b""))

    return router
