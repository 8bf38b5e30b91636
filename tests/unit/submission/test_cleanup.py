"""Requests that need more than a way in and a way out: queue timeouts, tensors and outputs beside the streams."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, cast

import pytest

from qinfer.core.api_keys import ApiKey, hash_key
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, ModelNotReady, QueueFull, QuotaExceeded
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import BatchingSpec, ModelSpec, QueuePolicy, Routes, TensorSpec, lanes_of
from qinfer.observe.stats import GatewayTally
from qinfer.queue import keys
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.queue.values import LARGE_BYTES, Room
from qinfer.submission.pending import PendingCall
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import PayloadApart, decode_request, encode_responses
from qinfer_api.auth import ANONYMOUS, Auth, CallerContext
from qinfer_api.dispatcher import Dispatcher
from tests.support.servers.servers import Database

SHORT_S = 0.02
KEY = ApiKey(id="k", sha256=hash_key("secret"), tenant="acme", max_in_flight=1)


class Models:
    """A catalog of one model, whose queue policy is set by hand."""

    def __init__(self) -> None:
        self.policy = QueuePolicy()
        self.wait_s = 0.0
        self.refusal: ModelNotReady | None = None

    def asked(self, model: str, version: int) -> ServedVersion:
        if self.refusal is not None:
            raise self.refusal
        port = TensorSpec(name="x", datatype="UINT8", dims=(-1,))
        batching = BatchingSpec(preferred_sizes=(8,), default_policy=self.policy)
        spec = ModelSpec(name="m", backend="stub", inputs=(port,), outputs=(port,), max_batch_size=8, batching=batching)
        routes = Routes(spec, 1)
        return ServedVersion(spec=spec, version=1, generation=1, lane=Lane("m", 1), routes=routes, wait_s=self.wait_s)

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        return lanes_of(self.asked(model, version).spec, 1)

    def capacity(self, model: str, version: int) -> Capacity:
        return Capacity()


class SpyQueue(Queue):
    """A queue whose stored results can be out of reach, and that tells what was to be withdrawn."""

    is_down = False
    reads = 0
    withdrawals = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_withdraw = asyncio.Event()
        self.may_withdraw.set()

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        await self.may_withdraw.wait()
        withdrawn = await super().withdraw(entries)
        self.withdrawals += 1
        return withdrawn

    async def take_result(
        self, lane: Lane, request_id: str, tenant: str = "", room: Room | None = None
    ) -> bytes | None:
        self.reads += 1
        if self.is_down:
            raise BrokerUnavailable("Redis can't be reached")
        return await super().take_result(lane, request_id, tenant, room)


class Setup:
    no_stream = ""

    def __init__(self, queue: SpyQueue) -> None:
        self.queue, self.models, self.responses = queue, Models(), list[Response]()
        self.use(LimitSettings(inline_max_bytes=1000))

    def use(self, limits: LimitSettings, auth: Auth | None = None) -> None:
        catalog = cast(Catalog, self.models)
        self.dispatcher = Dispatcher(self.queue, catalog, GatewayTally(), limits, "me", auth)
        self.waiting = self.dispatcher.submission.pending

    def deliver(self, response: Response) -> None:
        self.responses.append(response)

    def submit(self, size: int = 4, timeout_s: float = 0.0, context: CallerContext = ANONYMOUS) -> PendingCall:
        x = Tensor("x", "UINT8", (1, size), bytes(size))
        request = OutgoingRequest(model="m", client_id="c", inputs=(x,), timeout_s=timeout_s)
        return self.dispatcher.submit(context, request, self)

    async def submit_and_fetch(self) -> tuple[PendingCall, Lease]:
        """Submits a request that a worker takes before it may be withdrawn, however slow the machine is."""
        self.queue.may_withdraw.clear()
        pending = self.submit()
        lease = await self.fetch()
        self.queue.may_withdraw.set()
        return pending, lease

    async def fetch(self) -> Lease:
        (lease,) = await self.queue.fetch(self.models.lanes("m", 1), "w", 1, 10.0)
        return lease

    async def depth(self) -> int:
        return sum(await self.queue.depth(self.models.lanes("m", 1)))

    def texts(self) -> list[str]:
        return [response.failure.message for response in self.responses if response.failure is not None]


@pytest.fixture
async def setup(database: Database) -> AsyncIterator[Setup]:
    one = Setup(await database.delivery(SpyQueue))
    await one.queue.ensure([Lane("m", 1)])
    runs = [asyncio.create_task(one.dispatcher.submission.run())]
    yield one
    for task in runs:
        task.cancel()
    await asyncio.wait(runs)


async def test_what_waits_longer_than_its_queue_timeout_is_taken_out(setup: Setup) -> None:
    """With zero workers too, and with Triton's text."""
    setup.models.policy = QueuePolicy(timeout_s=SHORT_S)

    setup.submit()

    await eventually(lambda: bool(setup.responses), description="the refusal")
    assert setup.texts() == ["Request timeout expired"]
    assert setup.responses[0].failure is not None
    assert setup.responses[0].failure.code == "deadline_exceeded"
    assert await setup.depth() == 0
    assert setup.dispatcher.in_flight == 0


async def test_what_no_worker_takes_in_time_is_taken_out(setup: Setup) -> None:
    """As after a queue timeout, with an error that says that it may be tried again."""
    setup.models.wait_s = SHORT_S
    setup.submit()

    await eventually(lambda: bool(setup.responses), description="the refusal")
    failure = setup.responses[0].failure
    assert failure is not None
    assert (failure.code, failure.retryable) == ("model_not_ready", True)
    assert "no worker took the request for 'm' version 1 within 0.02 s" in failure.message
    assert await setup.depth() == 0
    assert setup.dispatcher.in_flight == 0


async def test_what_a_worker_has_taken_is_waited_for(setup: Setup) -> None:
    """The worker that loaded the model has come in time; the request has its own timeout from there."""
    setup.models.wait_s = SHORT_S
    pending, _ = await setup.submit_and_fetch()

    await eventually(lambda: setup.queue.withdrawals == 1, description="the end of the wait for a worker")

    assert setup.responses == []
    assert pending in setup.waiting


async def test_what_can_not_be_loaded_any_more_is_told_so(setup: Setup) -> None:
    setup.models.wait_s = SHORT_S
    setup.submit()
    setup.models.refusal = ModelNotReady("the file is damaged")

    await eventually(lambda: bool(setup.responses), description="the refusal")
    assert setup.texts() == ["the file is damaged"]
    setup.models.refusal = None
    assert await setup.depth() == 0


async def test_what_waits_behind_others_once_a_worker_came_has_its_own_timeout(setup: Setup) -> None:
    """The wait was for a worker; the queue before it is no reason to refuse."""
    setup.models.wait_s = SHORT_S
    first = setup.submit()
    setup.models.wait_s = 0.0
    setup.models.policy = QueuePolicy(timeout_s=2 * SHORT_S)
    setup.submit()

    await eventually(lambda: bool(setup.responses), description="the end of the second's queue timeout")

    assert setup.texts() == ["Request timeout expired"]
    assert first in setup.waiting
    assert await setup.depth() == 1


async def test_what_is_executed_delays_no_other_requests_queue_timeout(setup: Setup) -> None:
    """It is noted again for its deadline, which is later than theirs."""
    setup.models.policy = QueuePolicy(timeout_s=SHORT_S)
    first, _ = await setup.submit_and_fetch()
    setup.models.policy = QueuePolicy(timeout_s=2 * SHORT_S)
    setup.submit()

    await eventually(lambda: bool(setup.responses), description="the refusal of the second")

    assert setup.texts() == ["Request timeout expired"]
    assert first in setup.waiting


async def test_the_shorter_of_two_waits_counts(setup: Setup) -> None:
    setup.models.wait_s = 60.0
    setup.models.policy = QueuePolicy(timeout_s=SHORT_S)
    setup.submit()

    await eventually(lambda: bool(setup.responses), description="the refusal")
    assert setup.texts() == ["Request timeout expired"]


async def test_what_is_executed_may_take_longer_than_its_queue_timeout(setup: Setup) -> None:
    """It concerns waiting only: the answer still comes."""
    setup.models.policy = QueuePolicy(timeout_s=SHORT_S)
    pending, lease = await setup.submit_and_fetch()

    await eventually(lambda: setup.queue.withdrawals == 1, description="the end of the queue timeout")
    setup.waiting.receive(encode_responses([Response(request_id=pending.request_id)]))

    assert decode_request(lease.frame).queue_timeout_s == SHORT_S
    assert [response.failure for response in setup.responses] == [None]
    assert await setup.depth() == 1


async def test_what_is_delayed_is_not_refused(setup: Setup) -> None:
    """The worker moves it; the gateway sets no timer."""
    setup.models.policy = QueuePolicy(timeout_s=SHORT_S, delay=True)

    pending = setup.submit()

    assert pending.deadline_s == 0.0
    assert decode_request((await setup.fetch()).frame).queue_timeout_s == SHORT_S


@pytest.mark.parametrize(("asked_s", "stamped_s"), [(0.0, 5.0), (2.0, 2.0), (9.0, 5.0)])
async def test_a_request_may_shorten_its_queue_timeout(setup: Setup, asked_s: float, stamped_s: float) -> None:
    """Where the policy allows it; its deadline stays the model's."""
    setup.models.policy = QueuePolicy(timeout_s=5.0, allow_override=True)

    setup.submit(timeout_s=asked_s)

    request = decode_request((await setup.fetch()).frame)
    assert (request.queue_timeout_s, request.timeout_s) == (stamped_s, 60.0)


async def test_without_a_policy_a_timeout_has_no_effect(setup: Setup) -> None:
    """Triton's rule: nothing is shortened where there is nothing (reference §3.3)."""
    setup.submit(timeout_s=0.001)

    request = decode_request((await setup.fetch()).frame)
    assert (request.queue_timeout_s, request.timeout_s) == (0.0, 60.0)


async def test_max_queue_size_is_counted_by_the_queue(setup: Setup) -> None:
    """Exactly: one more than may wait is refused, with the request's id in front."""
    setup.models.policy = QueuePolicy(max_queue_size=3)

    for _ in range(4):
        setup.submit()

    await eventually(lambda: bool(setup.responses), description="the refusal")
    assert setup.texts() == ["[request id: c] Exceeds maximum queue size"]
    assert await setup.depth() == 3


async def test_large_tensors_travel_beside_the_stream(setup: Setup) -> None:
    """The frame stays small, and names no tensor's bytes."""
    pending = setup.submit(size=1001)

    lease = await setup.fetch()
    payload = await setup.queue.payload(lease.entry, pending.request_id)

    assert len(lease.frame) < 500
    with pytest.raises(PayloadApart):
        decode_request(lease.frame)
    assert payload is not None
    assert decode_request(lease.frame, payload).inputs[0].nbytes == 1001


async def stored_answer(setup: Setup, pending: PendingCall, attempt: int = 1, data: bytes = b"abc") -> bytes:
    """Stores outputs as a worker does, in some attempt; returns the reply that tells of the first attempt's."""
    y = Tensor("y", "UINT8", (1, len(data)), data)
    whole = Response(request_id=pending.request_id, model="m", version=1, outputs=(y,), attempt=attempt)
    await setup.queue.store_result(Lane("m", 1), pending.request_id, encode_responses([whole]), 60.0)
    return encode_responses([Response(request_id=pending.request_id, model="m", version=1, stored=True)])


async def outputs_end(setup: Setup, pending: PendingCall) -> None:
    """Waits until the outputs of a request are no longer stored."""
    key = keys.result("m", 0, pending.request_id)

    async def are_gone() -> bool:
        return not await setup.queue.router.call(keys.slot(key), b"EXISTS", key)

    await eventually(are_gone, description="the end of the outputs")


async def test_stored_outputs_are_fetched(setup: Setup) -> None:
    """And delivered once, however often the reply comes."""
    pending = setup.submit()
    reply = await stored_answer(setup, pending)

    setup.waiting.receive(reply)
    setup.waiting.receive(reply)

    await eventually(lambda: bool(setup.responses), description="the answer")
    (response,) = setup.responses
    assert bytes(response.outputs[0].data) == b"abc"
    assert setup.dispatcher.in_flight == 0


class Lent:
    """The memory of an answer, which is lent once it is allowed; the holder of it, too."""

    def __init__(self, *, comes_behind: bool = False) -> None:
        self.allowed, self.asked = asyncio.Event(), list[int]()
        self.is_released = False
        self.comes_behind = comes_behind

    async def lend(self, pending: PendingCall, nbytes: int) -> Self:
        self.asked.append(nbytes)
        await self.allowed.wait()
        return self

    def is_behind(self) -> bool:
        return self.comes_behind

    def become(self, size: int) -> None:
        """Does nothing."""

    def watch(self, arrived: object, late: object) -> None:
        """Does nothing."""

    def release(self) -> None:
        self.is_released = True


LONG = bytes(LARGE_BYTES)


async def test_large_outputs_wait_in_redis_for_their_memory(setup: Setup) -> None:
    lent, pending = Lent(), setup.submit()
    setup.waiting.lend = lent.lend

    setup.waiting.receive(await stored_answer(setup, pending, data=LONG))
    await eventually(lambda: bool(lent.asked), description="the question for memory")
    assert setup.responses == []
    lent.allowed.set()

    await eventually(lambda: bool(setup.responses), description="the answer")
    assert lent.asked[0] > len(LONG)
    await eventually(lambda: lent.is_released, description="the end of the loan: the caller has no holder")


async def test_a_holder_keeps_the_memory_of_outputs(setup: Setup) -> None:
    lent, pending = Lent(), setup.submit()
    setup.waiting.lend, pending.holder = lent.lend, lent
    lent.allowed.set()

    setup.waiting.receive(await stored_answer(setup, pending, data=LONG))
    await eventually(lambda: bool(setup.responses), description="the answer")
    assert not lent.is_released
    pending.forget_memory()

    assert lent.is_released


async def test_the_memory_of_outputs_that_nobody_waits_for_is_given_back(setup: Setup) -> None:
    lent, pending = Lent(), setup.submit()
    setup.waiting.lend, pending.holder = lent.lend, lent
    setup.waiting.receive(await stored_answer(setup, pending, data=LONG))
    await eventually(lambda: bool(lent.asked), description="the question for memory")

    setup.dispatcher.cancel(pending)
    lent.allowed.set()

    await outputs_end(setup, pending)
    assert lent.is_released
    assert setup.responses == []


async def test_outputs_that_are_sent_behind_others_ask_for_no_memory_before(setup: Setup) -> None:
    """The others would wait for what these hold."""
    lent, pending = Lent(comes_behind=True), setup.submit()
    setup.waiting.lend, pending.holder = lent.lend, lent
    lent.allowed.set()

    setup.waiting.receive(await stored_answer(setup, pending, data=LONG))
    await eventually(lambda: pending.turn is not None, description="the wait for its turn")
    assert lent.asked == []
    lent.comes_behind = False
    pending.comes_first()

    await eventually(lambda: bool(setup.responses), description="the answer")


async def test_outputs_that_wait_for_their_turn_are_dropped_with_the_reply_stream(setup: Setup) -> None:
    lent, pending = Lent(comes_behind=True), setup.submit()
    setup.waiting.lend, pending.holder = lent.lend, lent
    setup.waiting.receive(await stored_answer(setup, pending, data=LONG))
    await eventually(lambda: pending.turn is not None, description="the wait for its turn")

    setup.waiting.lose_all()

    await outputs_end(setup, pending)
    assert lent.asked == []


async def test_outputs_that_come_after_their_caller_has_left_are_dropped(setup: Setup) -> None:
    pending = setup.submit()
    await setup.fetch()
    setup.dispatcher.cancel(pending)

    setup.waiting.receive(await stored_answer(setup, pending))

    await outputs_end(setup, pending)


async def test_outputs_that_are_gone_are_a_failure(setup: Setup) -> None:
    """Nobody waits for them until the deadline."""
    pending = setup.submit()
    reply = await stored_answer(setup, pending)
    await setup.queue.take_result(Lane("m", 1), pending.request_id)

    setup.waiting.receive(reply)

    await eventually(lambda: bool(setup.responses), description="the failure")
    assert setup.texts() == ["the outputs were stored and are gone; send the request again"]
    assert setup.dispatcher.in_flight == 0


async def test_outputs_out_of_reach_are_read_again(setup: Setup) -> None:
    """The queue is back before the deadline: nothing was lost."""
    pending = setup.submit()
    reply = await stored_answer(setup, pending)
    setup.queue.is_down = True

    setup.waiting.receive(reply)
    await eventually(lambda: setup.queue.reads >= 2, description="a second try")
    setup.queue.is_down = False

    await eventually(lambda: bool(setup.responses), description="the answer")
    assert bytes(setup.responses[0].outputs[0].data) == b"abc"


async def test_outputs_out_of_reach_are_not_read_for_ever(setup: Setup) -> None:
    """The deadline, or the client who leaves, ends it."""
    pending = setup.submit()
    reply = await stored_answer(setup, pending)
    setup.queue.is_down = True
    setup.waiting.receive(reply)
    await eventually(lambda: setup.queue.reads == 1, description="the first try")

    setup.dispatcher.cancel(pending)

    def is_over() -> bool:
        return all(task.get_name() != "stored outputs" for task in asyncio.all_tasks())

    await eventually(is_over, description="the end of the tries")
    assert setup.responses == []


async def test_outputs_of_another_attempt_are_as_good(setup: Setup) -> None:
    """A second execution stored its outputs over those that were announced, before they were read."""
    pending = setup.submit()

    setup.waiting.receive(await stored_answer(setup, pending, attempt=2))

    await eventually(lambda: bool(setup.responses), description="the answer")
    assert bytes(setup.responses[0].outputs[0].data) == b"abc"
    assert setup.dispatcher.in_flight == 0


async def test_a_lane_at_its_capacity_takes_no_more(setup: Setup) -> None:
    """Own requests count from the moment they are submitted, and no more once they are answered."""
    setup.use(LimitSettings(max_in_flight=10))
    load = setup.dispatcher.submission.backlog.load(setup.models.asked("m", 1), Lane("m", 1))
    load.others = 9_999
    pending = setup.submit()

    with pytest.raises(QueueFull, match=r"^\[request id: c\] Exceeds maximum queue size$"):
        setup.submit()

    setup.waiting.receive(encode_responses([Response(request_id=pending.request_id)]))
    setup.submit()


async def test_in_flight_quotas_end_with_their_requests(setup: Setup) -> None:
    """By answer, cancel and shutdown alike."""
    setup.use(LimitSettings(), Auth([KEY]))
    context = CallerContext(key="secret")

    answered = setup.submit(context=context)
    with pytest.raises(QuotaExceeded):
        setup.submit(context=context)
    setup.waiting.receive(encode_responses([Response(request_id=answered.request_id)]))
    setup.dispatcher.cancel(setup.submit(context=context))
    setup.submit(context=context)
    setup.waiting.fail_all(QueueFull("over"))
    setup.submit(context=context)

    assert decode_request((await setup.fetch()).frame).tenant == "acme"
    assert setup.dispatcher.in_flight == 1
