"""The intake of a worker: leases become items that may be batched; others are answered, released, or dead letters.

    leases ─▶ decode ─▶ tried too often? ─▶ payload apart? ─▶ ready        rejected items go to the publisher

Tenants may use the same sequence id, so a request waits until Redis has given the id that the model gets (`ToldIds`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from qinfer.batching.execution import WorkItem
from qinfer.core.messages import Failure, InferRequest, MemoryReference, Response, ToldSequence
from qinfer.core.retry import OutageLog
from qinfer.errors import BrokerUnavailable, CorruptEntry, InferenceFailed, InvalidRequest, QinferError, StreamBroken
from qinfer.models.config.to_spec import EXECUTE_TIMEOUT
from qinfer.models.sequence_spec import check_sequence
from qinfer.models.spec import ModelSpec
from qinfer.queue.entries import Lease, Payload
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.records import SequenceId, told_id
from qinfer.queue.values import NoSpace
from qinfer.segments.connector import TensorConnector
from qinfer.segments.memory import PIECE_BYTES
from qinfer.segments.reading import OVER, SegmentReader, TensorsGone, TensorsUnreachable
from qinfer.segments.slabs import LARGE_BYTES
from qinfer.submission.validate import validate
from qinfer.tensors import Bytes
from qinfer.wire.frame import (
    PayloadApart,
    RequestReader,
    TensorPlace,
    decode_request,
    encode_responses,
    take_apart,
    tensors_at,
)
from qinfer.wire.versions import NewerVersion
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher
from qinfer_workers.inference.publisher import Publisher
from qinfer_workers.inference.serving import LaneBatcher

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""This worker may fetch a released entry again at once."""

LEAST_DELIVERIES = 2
"""A first delivery may fail because of the other requests in its batch."""
BROKEN = "the worker that executed the request ended in the middle of its responses; send the request again"


_TOLD_S = 60.0
"""Redis keeps the id for five minutes."""

_MOST_TOLD = 65536


class IntakeItems(NamedTuple):
    """Ready items, and items that still lack something."""

    ready: list[WorkItem]
    external: list[WorkItem]


class ToldIds:
    """The sequence ids that models without sequences get."""

    def __init__(self, queue: Queue, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._monotonic_s = monotonic_s
        self._known: dict[tuple[str, SequenceId], tuple[int | str, float]] = {}

    def set_told_id(self, request: InferRequest) -> bool:
        """Puts the id into a request; returns false if it is unknown."""
        flags = request.sequence
        if flags is None or not flags.id or not request.tenant or isinstance(flags, ToldSequence):
            return True
        told_id, until_s = self._known.get(_named(request), ("", 0.0))
        if self._monotonic_s() >= until_s:
            return False
        request.sequence = flags.told(told_id)
        return True

    async def ask(self, request: InferRequest, spec: ModelSpec) -> None:
        """Asks Redis for a request's id, and puts it in."""
        model, sequence = named = _named(request)
        bits = 64 if spec.sequences is None else spec.sequences.told_bits
        told = await self._queue.sequences(model, request.partition).assign_id(sequence, bits)
        if len(self._known) >= _MOST_TOLD:
            self._known.clear()
        self._known[named] = told_id(sequence, told), self._monotonic_s() + _TOLD_S
        self.set_told_id(request)


_LETTER_S = 600.0
"""The time that a dead letter's tensors wait for it, while Redis is away."""


class LeaseIntake:
    """Turns leases into items that may be batched.

    `memory` has the tensors that callers of this machine keep, `far` those of other machines.
    """

    def __init__(
        self,
        queue: Queue,
        publisher: Publisher,
        max_deliveries: int,
        memory: SegmentReader | None = None,
        far: TensorConnector | None = None,
    ) -> None:
        self._queue = queue
        self._memory, self._far = memory, far
        self._publisher = publisher
        self._most = max(max_deliveries, LEAST_DELIVERIES)
        self._reader = RequestReader()
        self._told = ToldIds(queue)
        self._outage = OutageLog(logger, "payloads not read, trying again", "payloads are read again")
        self._unread = OutageLog(
            logger, "memory of a caller not read, leaving requests to others", "memory of callers is read again"
        )

    def items(self, batcher: LaneBatcher, leases: Iterable[Lease]) -> IntakeItems:
        """Decodes leases; buries, answers or releases those that can't be executed."""
        taken = IntakeItems([], [])
        copies_once = batcher.model.spec.copies_once
        near = ""  # the last caller that was found on this machine
        for lease in leases:
            places: Sequence[TensorPlace] = ()
            try:
                request = self._reader.decode(lease.frame)
            except PayloadApart as external:
                request, places = external.request, external.places
            except CorruptEntry as error:
                self._unreadable(batcher, lease, error)
                continue
            item = self._pending(batcher, lease, request)
            if lease.deliveries > 1 and not self._is_tried(batcher, item):
                continue
            is_told = request.sequence is None or self._is_told(batcher, request)
            memory = request.memory
            if memory is not None and memory.owner != near and not self._is_far(request):
                near = memory.owner
            if not is_told or _takes_long(request) or (memory is not None and memory.owner != near):
                taken.external.append(item)
            elif memory is not None:
                tensors = self._shared(batcher, item, in_place=copies_once)
                near = "" if tensors is None else near  # it may be mapped no longer
                if tensors is not None and self._complete(batcher, item, tensors, places):
                    taken.ready.append(item)
            elif self._is_ready(batcher, item):
                taken.ready.append(item)
        return taken

    async def whole(self, batcher: LaneBatcher, leases: Sequence[Lease]) -> list[Lease]:
        """Answers entries whose responses a dead worker has sent in part; returns the other leases."""
        spec = batcher.model.spec
        if not spec.decoupled or spec.stream_resume:
            return list(leases)
        whole = [lease for lease in leases if not await self._queue.marks.was_sent(lease.entry)]
        for lease in leases:
            if lease not in whole:
                self._break(batcher, lease)
        return whole

    def _break(self, batcher: LaneBatcher, lease: Lease) -> None:
        try:
            request = self._reader.decode(lease.frame)
        except PayloadApart as external:
            request = external.request
        except CorruptEntry as error:
            self._unreadable(batcher, lease, error)
            return
        item = self._pending(batcher, lease, request)
        logger.warning("stream broken", extra={**_log_data(lease), "request_id": request.id})
        self._publisher.hold([item])
        batcher.fail([item], StreamBroken(BROKEN))

    async def complete(self, batcher: LaneBatcher, external: Sequence[WorkItem]) -> list[WorkItem]:
        """Reads missing payloads and ids; drops cancelled and expired items.

        A cancelled call gives all items back.
        """
        reads = [asyncio.ensure_future(self._rest(batcher, item)) for item in external]
        try:
            payloads = await asyncio.gather(*reads)
        except asyncio.CancelledError:
            await asyncio.wait(reads)
            left = [
                item
                for item, read in zip(external, reads, strict=True)
                if read.cancelled() or read.result() is not None
            ]
            self._publisher.give_back(left)
            raise
        # No await from here on: the model may change at each.
        return [
            item
            for item, payload in zip(external, payloads, strict=True)
            if payload is not None and not item.lost and self._complete(batcher, item, payload)
        ]

    def put_off(self, external: Iterable[WorkItem]) -> None:
        """Releases items later."""
        for item in external:
            self._publisher.release_later(item, PAUSE_S)

    def is_readable(self, batcher: LaneBatcher, lease: Lease) -> bool:
        """Returns whether an entry can be read; releases one of a newer qinfer."""
        try:
            decode_request(lease.frame)
        except NewerVersion:
            self._release_newer(batcher, lease)
            return False
        except (PayloadApart, CorruptEntry):
            pass
        return True

    def fits(self, batcher: LaneBatcher, item: WorkItem) -> bool:
        """Validates an item of another generation; answers a misfit."""
        try:
            item.rows = validate(item.request, batcher.model.spec)
            if batcher.model.spec.sequences is not None:
                check_sequence(item.request, item.rows, batcher.model.spec.sequences)
        except InvalidRequest as error:
            batcher.fail([item], error)
            return False
        batcher.classify(item)
        return True

    def _is_tried(self, batcher: LaneBatcher, item: WorkItem) -> bool:
        batcher.tally.redelivered()
        if item.lease.deliveries <= self._most:
            return True
        self._bury(batcher, item, given_up(item.lease.deliveries, batcher.model.spec))
        return False

    def _unreadable(self, batcher: LaneBatcher, lease: Lease, error: CorruptEntry) -> None:
        if isinstance(error, NewerVersion):
            self._release_newer(batcher, lease)
            return
        logger.error("corrupt entry", extra={**_log_data(lease), "reason": error.message})
        self._publisher.bury(lease, error, batcher.tally)

    def _pending(self, batcher: LaneBatcher, lease: Lease, request: InferRequest) -> WorkItem:
        enqueued_s = lease.entry.enqueued_s
        request.version = batcher.model.version  # changed if the entry was moved
        return WorkItem(
            rows=1,
            key=None,
            enqueued_s=enqueued_s,
            deadline_s=enqueued_s + (request.timeout_s or batcher.model.spec.default_timeout_s),
            alone=lease.suspect,
            lease=lease,
            request=request,
        )

    def _is_ready(self, batcher: LaneBatcher, item: WorkItem) -> bool:
        if item.request.generation != batcher.model.generation:
            return self.fits(batcher, item)
        inputs = item.request.inputs
        if inputs and (shape := inputs[0].shape) and batcher.model.spec.max_batch_size:
            item.rows = shape[0]
        batcher.classify(item)
        return True

    def _release_newer(self, batcher: LaneBatcher, lease: Lease) -> None:
        logger.warning("frame of a newer qinfer released", extra=_log_data(lease))
        unknown = InferRequest(model=batcher.model.spec.name, inputs=())
        self._publisher.release_later(self._pending(batcher, lease, unknown), PAUSE_S)

    def _is_told(self, batcher: LaneBatcher, request: InferRequest) -> bool:
        return isinstance(batcher, EnsembleBatcher) or self._told.set_told_id(request)

    def _shared(self, batcher: LaneBatcher, item: WorkItem, *, in_place: bool) -> Bytes | None:
        """Returns an item's tensors, `in_place` or copied; puts it off, or finishes it if the request has ended."""
        reference = item.request.memory
        assert reference is not None
        try:
            if self._memory is None:
                raise TensorsUnreachable("QINFER_SEGMENTS__DIRECTORY is not set for this worker")
            view = self._memory.view(reference) if in_place else None
            tensors = self._memory.read(reference) if view is None else view.tensors
            item.is_current = None if view is None else view.is_current
            if self._unread.is_out:
                self._unread.over()
            return tensors
        except CorruptEntry as error:
            self._bury(batcher, item, error)
        except TensorsGone:
            self._publisher.discard(item)
        except TensorsUnreachable as error:
            if item.deadline_s <= self._queue.clock.now_s():  # no worker knows that its caller has died
                self._publisher.discard(item)
            else:
                self._unread.failed(error.message)
                self.put_off([item])
        return None

    async def _copied(self, batcher: LaneBatcher, item: WorkItem) -> Bytes | None:
        """Copies many tensors, or finishes the item if its request has ended."""
        tensors, is_current = self._shared(batcher, item, in_place=True), item.is_current
        if tensors is None or is_current is None:
            return None
        item.is_current = None
        copy = await _copy(tensors, is_current)
        if copy is None:
            self._publisher.discard(item)
        return copy

    async def _rest(self, batcher: LaneBatcher, item: WorkItem) -> Bytes | None:
        """Reads an item's tensors, puts it off, finishes it if they are gone, or buries it if the store lacks them."""
        try:
            if not self._is_told(batcher, item.request):
                await self._told.ask(item.request, batcher.model.spec)
            request = item.request
            if request.memory is not None and not self._is_far(request):
                if _takes_long(request):
                    return await self._copied(batcher, item)
                return self._shared(batcher, item, in_place=batcher.model.spec.copies_once)
            payload: Bytes | None = b""
            if request.memory is not None:
                payload = await self._fetched(item, request.memory)
            if request.payload:
                payload = await self._queue.payload(item.lease.entry, request.id, request.tenant)
        except CorruptEntry as error:
            self._bury(batcher, item, error)
            return None
        except TensorsUnreachable as error:
            self._unread.failed(error.message)
            self.put_off([item])
            return None
        except QinferError as error:
            self._outage.failed(error.message)
            self.put_off([item])
            return None
        self._outage.over()
        if payload is None:
            self._publisher.discard(item)
        return payload

    def _is_far(self, request: InferRequest) -> bool:
        return request.memory is not None and self._far is not None and self._far.knows(request.memory.owner)

    async def _fetched(self, item: WorkItem, reference: MemoryReference) -> Bytes | None:
        """Reads tensors on another machine, or in Redis, where its caller stores them if told so; `None` = over."""
        assert self._far is not None
        request = item.request
        try:
            tensors = await self._far.read(reference)
        except TensorsGone:
            return None
        except TensorsUnreachable:
            entry = item.lease.entry
            stored = await self._queue.payload(entry, request.id, request.tenant)
            if stored is None and item.deadline_s > self._queue.clock.now_s():
                told = Response(request_id=request.id, model=request.model, version=request.version, final=False)
                nothing = msgspec.structs.replace(reference, size=0)
                await self._queue.publish(request.reply_to, encode_responses([told], {request.id: nothing}))
                raise
            return stored
        self._unread.over()
        return tensors

    def _complete(
        self, batcher: LaneBatcher, item: WorkItem, payload: Bytes, places: Sequence[TensorPlace] = ()
    ) -> bool:
        flags = item.request.sequence
        try:
            if places:
                item.request.inputs = tensors_at(places, payload)
            elif item.request.payload or item.request.memory is not None:
                item.request = decode_request(item.lease.frame, payload)
            item.request.version, item.request.sequence = batcher.model.version, flags
        except CorruptEntry as error:
            self._bury(batcher, item, error)
            return False
        return self._is_ready(batcher, item)

    def _bury(self, batcher: LaneBatcher, item: WorkItem, error: QinferError) -> None:
        deliveries, failure = item.lease.deliveries, Failure.from_error(error)
        extra = {**_log_data(item.lease), "request_id": item.request.id, "deliveries": deliveries, "code": failure.code}
        logger.error("request given up", extra=extra)
        batcher.tally.failed(failure.code)
        response = Response(
            request_id=item.request.id,
            model=batcher.model.spec.name,
            version=batcher.model.version,
            failure=failure,
            attempt=deliveries,
        )
        self._publisher.bury(item.lease, error, batcher.tally, (item, response), partial(self._letter, item))

    async def _letter(self, item: WorkItem) -> tuple[Lease, bytes]:
        """Stores tensors that a caller keeps; returns the lease on them, and a frame.

        Raises:
            BrokerUnavailable: The store can't be reached now.
        """
        lease, request = item.lease, item.request
        if request.memory is None or self._memory is None:
            return lease, b""
        try:
            if self._far is not None and self._far.knows(request.memory.owner):
                try:
                    tensors: Bytes | None = await self._far.read(request.memory)
                except TensorsUnreachable:  # its caller may have stored them
                    tensors = await self._queue.payload(lease.entry, request.id, request.tenant)
            else:
                view = self._memory.view(request.memory)
                tensors = await _copy(view.tensors, view.is_current)
            if tensors is None:
                raise TensorsGone(OVER)
            frame, data = take_apart(lease.frame, tensors)
            entry = msgspec.structs.replace(lease.entry, payload_id=f"{request.id}.letter")
            await self._queue.put_payload(entry, Payload(entry.payload_id, data, _LETTER_S), request.tenant)
        except QinferError as error:
            if isinstance(error, BrokerUnavailable) and not isinstance(error, NoSpace):
                raise
            extra = {"request_id": request.id, "reason": error.message}
            logger.warning("the tensors of a dead letter are not kept", extra=extra)
            return lease, b""
        return msgspec.structs.replace(lease, entry=entry), frame


async def _copy(tensors: Bytes, is_current: Callable[[], bool]) -> Bytes | None:
    """Copies in pieces, between which the event loop has other work; `None` = not current."""
    copy = np.empty(len(tensors), np.uint8).data
    for begin in range(0, len(copy), PIECE_BYTES):
        copy[begin : begin + PIECE_BYTES] = tensors[begin : begin + PIECE_BYTES]
        await asyncio.sleep(0)
    return copy.toreadonly() if is_current() else None


def _takes_long(request: InferRequest) -> bool:
    """Returns whether tensors are to be read beside other work: from the store, or many from memory."""
    return request.payload or (request.memory is not None and request.memory.size > LARGE_BYTES)


def _named(request: InferRequest) -> tuple[str, SequenceId]:
    assert request.sequence is not None, "it names one"
    return request.model, SequenceId(request.tenant, request.sequence.id)


def given_up(deliveries: int, spec: ModelSpec) -> InferenceFailed:
    """Returns the error of too many deliveries."""
    text = f"the request was given up: {deliveries - 1} executions did not end"
    if spec.execute_timeout_s:
        text += f"; the limit of each is {spec.execute_timeout_s:g} s ({EXECUTE_TIMEOUT})"
    return InferenceFailed(text)


def _log_data(lease: Lease) -> dict[str, object]:
    entry = lease.entry
    return {"model": entry.lane.model, "version": entry.lane.version, "entry_id": entry.entry_id}
