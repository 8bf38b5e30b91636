"""Steps of sequences on their way to a worker: their order, what becomes of them, and how they end their sequence."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from qinfer.core.messages import OutgoingRequest, Response, SequenceFlags
from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, InvalidRequest, ModelNotReady, QinferError, QueueFull
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import ModelSpec, Routes, lanes_of
from qinfer.observe.stats import GatewayTally
from qinfer.queue.entries import CHUNK_BYTES, Lane, Payload
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_step
from qinfer.queue.sequences.ownership import AT_ONCE, Appended, OwnersLane, Sequences
from qinfer.queue.sequences.records import SequenceId, StepPlace, SubmitLimits
from qinfer.queue.tenants import Places
from qinfer.submission.pending import PendingCall, PendingRequests
from qinfer.submission.steps import ModelSteps
from qinfer.tensors import Bytes, Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.auth import ANONYMOUS
from qinfer_api.dispatcher import Dispatcher
from tests.support.servers.servers import Database
from tests.support.step_worker import StepWorker, sum_spec

INLINE_BYTES = 100
SHORT_S = 0.02


class Models:
    """A catalog of the model that sums."""

    def __init__(self) -> None:
        self.spec: ModelSpec = sum_spec()
        self.wait_s = 0.0

    def asked(self, model: str, version: int) -> ServedVersion:
        routes = Routes(self.spec, 1)
        lane = routes.default.lane
        return ServedVersion(spec=self.spec, version=1, generation=1, lane=lane, routes=routes, wait_s=self.wait_s)

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        return lanes_of(self.spec, 1)

    def capacity(self, model: str, version: int) -> Capacity:
        return Capacity()


class ShortQueue(Queue):
    """A queue whose replies come at once."""

    scene: "Scene"

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        self.scene.replies.append(blob)
        self.scene.dispatcher.submission.pending.receive(bytes(blob))
        return True


class Scene:
    """A gateway's dispatcher, a worker played by hand, and what the caller gets: by the value that it has sent."""

    def __init__(self, queue: ShortQueue) -> None:
        queue.scene = self
        self.queue, self.models = queue, Models()
        self.replies: list[Bytes] = []
        self.answers: dict[str, list[Response]] = {}
        self.use()

    def use(self, **limits: Any) -> None:
        settings = LimitSettings(inline_max_bytes=INLINE_BYTES, **limits)
        self.dispatcher = Dispatcher(self.queue, cast(Catalog, self.models), GatewayTally(), settings, "me")

    def submit(
        self,
        value: int,
        of: int | str = 7,
        *,
        start: bool = False,
        end: bool = False,
        step: int = 0,
        size: int = 1,
        within_s: float = math.inf,
    ) -> "Asked":
        x = Tensor("x", "UINT8", (1, size), bytes([value]) * size)
        sequence = SequenceFlags(of, start=start, end=end, step=step)
        request = OutgoingRequest(model="sum", client_id="c", inputs=(x,), sequence=sequence)
        asked = Asked()
        asked.pending = self.dispatcher.submit(ANONYMOUS, request, asked, within_s)
        return asked


class Asked:
    """A request, and its responses."""

    no_stream = ""
    pending: PendingCall

    def __init__(self) -> None:
        self.responses: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.responses.append(response)

    async def response(self) -> Response:
        await eventually(lambda: bool(self.responses), description="a response")
        (response,) = self.responses
        return response

    async def value(self) -> int:
        response = await self.response()
        assert response.failure is None, response.failure
        assert response.request_id == self.pending.request_id
        return bytes(response.outputs[0].data)[0]

    async def failure(self) -> tuple[str, str]:
        failure = (await self.response()).failure
        assert failure is not None
        return failure.code, failure.message

    @property
    def number(self) -> int:
        """The number of the step in its sequence."""
        assert self.pending.step is not None
        assert self.pending.step.place is not None
        return self.pending.step.place.number

    async def placed(self) -> None:
        """Waits until the broker has confirmed it."""
        await eventually(lambda: self.pending.entry is not None or bool(self.responses), description="its place")
        assert self.responses == []


@pytest.fixture
async def scene(database: Database) -> AsyncIterator[Scene]:
    one = Scene(await database.delivery(ShortQueue))
    runs = [asyncio.create_task(one.dispatcher.submission.run())]
    yield one
    for task in runs:
        task.cancel()
    await asyncio.wait(runs)


@pytest.fixture
async def worker(scene: Scene) -> StepWorker:
    return await StepWorker(scene.queue).join()


@pytest.fixture
async def small(database: Database) -> AsyncIterator[Scene]:
    """One that takes two steps of a sequence, and two sequences."""
    one = Scene(await database.delivery(ShortQueue))
    one.use(max_sequence_steps=2, max_sequences=2)
    task = asyncio.create_task(one.dispatcher.submission.run())
    yield one
    task.cancel()
    await asyncio.wait([task])


async def ended(scene: Scene, of: int | str = 7) -> str:
    """Waits until a sequence has ended by an error; returns what a later step is told."""

    async def is_over() -> bool:
        return (await scene.queue.sequences("sum", 0).sizes([1])).open == 0

    await eventually(is_over, description="the end of the sequence")
    _, message = await scene.submit(9, of).failure()
    return message


# --- on the way -------------------------------------------------------------------------------------------------------


async def test_a_sequence_is_answered_step_by_step(scene: Scene, worker: StepWorker) -> None:
    """Its owner is told whose they are, and who waits for them."""
    asked = [scene.submit(1, start=True), scene.submit(2), scene.submit(3, end=True)]

    steps = await worker.take(3)
    for step in steps:
        await worker.answer(step)

    assert [await each.value() for each in asked] == [1, 3, 6]
    assert [step.request.sequence for step in steps] == [
        SequenceFlags(7, start=True),
        SequenceFlags(7),
        SequenceFlags(7, end=True),
    ]
    assert {(step.request.version, step.request.reply_to, step.request.timeout_s) for step in steps} == {
        (1, "reply:me", 60.0)
    }
    assert scene.dispatcher.in_flight == 0


async def test_steps_keep_the_order_of_the_calls(scene: Scene, worker: StepWorker) -> None:
    """Large tensors are stored first, and are not overtaken meanwhile."""
    sizes = (1, INLINE_BYTES + 1, 1, INLINE_BYTES + 1, 1, 1)
    asked = [scene.submit(n, start=n == 1, size=size) for n, size in enumerate(sizes, start=1)]

    steps = await worker.take(len(sizes))

    assert [step.value for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [len(step.request.inputs[0].data) for step in steps] == list(sizes)
    await worker.work(len(sizes))
    assert [await each.value() for each in asked] == [1, 3, 6, 10, 15, 21]


async def test_a_step_does_not_overtake_those_of_the_tick_before(scene: Scene) -> None:
    """Of which there are more than one script takes."""
    sequences = range(1, 2 * AT_ONCE)
    firsts = [scene.submit(1, of, start=True) for of in sequences]
    for _ in range(3):
        await asyncio.sleep(0)  # the first script is on its way
    seconds = [scene.submit(2, of, size=(INLINE_BYTES + 1) if of % 2 else 1) for of in sequences]

    for each in (*firsts, *seconds):
        await each.placed()

    assert [each.number for each in firsts] == [1] * len(sequences)
    assert [each.number for each in seconds] == [2] * len(sequences)


async def test_large_outputs_are_fetched(scene: Scene, worker: StepWorker) -> None:
    asked = scene.submit(5, start=True)
    (step,) = await worker.take(1)

    await worker.answer(step, size=CHUNK_BYTES + 1)

    assert (await asked.response()).outputs[0].nbytes == CHUNK_BYTES + 1
    assert await asked.value() == 5
    assert scene.dispatcher.in_flight == 0


async def test_a_response_that_comes_twice_is_delivered_once(scene: Scene, worker: StepWorker) -> None:
    asked = scene.submit(5, start=True)
    await worker.work(1)
    assert await asked.value() == 5

    scene.dispatcher.submission.pending.receive(bytes(scene.replies[0]))

    assert len(asked.responses) == 1


# --- sent again -------------------------------------------------------------------------------------------------------


async def test_a_number_that_is_sent_again_gets_the_stored_response(scene: Scene, worker: StepWorker) -> None:
    """By its own id; a START too, which is known by its content."""
    for number, again in ((1, {"start": True}), (2, {})):
        first = scene.submit(number, step=number, **again)
        await worker.work(1)
        second = scene.submit(number, step=number, **again)
        await worker.work(1)

        assert await first.value() == await second.value()
        assert first.pending.request_id != second.pending.request_id
    assert scene.dispatcher.in_flight == 0


async def test_another_start_begins_anew(scene: Scene, worker: StepWorker) -> None:
    """With other content, or without a number."""
    asked = [scene.submit(1, start=True, step=1), scene.submit(2, start=True, step=1), scene.submit(2, start=True)]

    await worker.work(3)

    assert [await each.value() for each in asked] == [1, 2, 2]


async def test_a_number_that_is_sent_again_meanwhile_waits_for_the_first(scene: Scene, worker: StepWorker) -> None:
    """It is executed once."""
    asked = [scene.submit(4, start=True, step=1), scene.submit(4, start=True, step=1), scene.submit(1, step=2)]

    await worker.work(3)

    assert [await each.value() for each in asked] == [4, 4, 5]


async def test_a_stored_response_may_be_gone(scene: Scene, worker: StepWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks."""
    scene.submit(1, start=True, step=1)
    await worker.work(1)

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(Sequences, "response", nothing)
    again = scene.submit(1, start=True, step=1)
    (step,) = await worker.take(1)
    await answer_step(scene.queue, worker.sequences, step.unanswered)

    code, message = await again.failure()
    assert code == "sequence_ended"
    assert "the response to this step of the sequence is no longer kept; begin it again" in message
    assert scene.dispatcher.in_flight == 0


@pytest.mark.parametrize("blob", [b"junk", encode_responses([Response(request_id="a"), Response(request_id="b")])])
async def test_a_stored_response_may_be_damaged(
    scene: Scene, worker: StepWorker, monkeypatch: pytest.MonkeyPatch, blob: bytes
) -> None:
    """That fails the one who asks for it, and nobody else."""
    scene.submit(1, start=True, step=1)
    await worker.work(1)

    async def damaged(*_: object) -> bytes:
        return blob

    monkeypatch.setattr(Sequences, "response", damaged)
    again = scene.submit(1, start=True, step=1)
    (step,) = await worker.take(1)
    await answer_step(scene.queue, worker.sequences, step.unanswered)

    code, _ = await again.failure()
    assert code == "corrupt_entry"
    await scene.submit(2, of="other", start=True).placed()


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [0, ""])
async def test_a_step_names_its_sequence(scene: Scene, of: int | str) -> None:
    with pytest.raises(InvalidRequest, match="must specify a non-zero or non-empty correlation ID"):
        scene.submit(1, of, start=True)
    assert scene.dispatcher.in_flight == 0


async def test_a_sequence_begins_with_start(scene: Scene) -> None:
    code, message = await scene.submit(1).failure()

    assert code == "invalid_request"
    assert "inference request for sequence 7 to model 'sum' must specify the START flag" in message
    assert scene.dispatcher.in_flight == 0


async def test_a_gap_is_told_with_the_number_that_is_missing(scene: Scene) -> None:
    scene.submit(1, start=True, step=1)

    code, message = await scene.submit(1, step=3).failure()

    assert code == "invalid_request"
    assert message.endswith("step 3 of sequence 7 to model 'sum' leaves a gap: send step 2 first")


async def test_limits_of_steps_and_sequences(small: Scene) -> None:
    asked = [small.submit(1, of, start=True) for of in ("a", "b", "c")]
    more = [small.submit(2, "a"), small.submit(3, "a")]

    for refused in (asked[2], more[1]):
        code, message = await refused.failure()
        assert (code, message) == (
            "queue_full",
            "[request id: c] too many steps or sequences wait at model 'sum'; try again later",
        )
    assert small.dispatcher.in_flight == 3


async def test_no_more_are_in_flight_than_may_be(scene: Scene) -> None:
    scene.use(max_in_flight=1)
    scene.submit(1, start=True)

    with pytest.raises(QueueFull):
        scene.submit(2)


@pytest.mark.parametrize("size", [1, INLINE_BYTES + 1])
async def test_without_a_queue_a_step_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    async def away(*_: object) -> None:
        raise BrokerUnavailable("Redis can't be reached")

    monkeypatch.setattr(Sequences, "submit", away)
    monkeypatch.setattr(Sequences, "submit_together", away)

    asked = scene.submit(1, start=True, size=size)

    assert await asked.failure() == ("broker_unavailable", "Redis can't be reached")
    assert scene.dispatcher.in_flight == 0


# --- given up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_step_that_is_cancelled_ends_its_sequence(scene: Scene, worker: StepWorker, *, is_placed: bool) -> None:
    """Also before the broker has confirmed it; its owner is told, and steps behind it are answered."""
    first, second, third = scene.submit(1, start=True), scene.submit(2), scene.submit(3)
    if is_placed:
        await worker.take(3)

    scene.dispatcher.cancel(second.pending)

    if is_placed:
        await worker.end_cancelled()
    text = (
        "sequence 7 of model 'sum' was ended at step 2: the request was cancelled; begin it again with the START flag"
    )
    assert (await ended(scene)).endswith(text)
    await worker.answer_rest()
    for each in (first, third):
        assert (await each.failure())[1].endswith(text)
    assert second.responses == []
    assert scene.dispatcher.in_flight == 0


async def test_a_gateway_that_stops_ends_a_sequence_that_is_being_ended(scene: Scene, worker: StepWorker) -> None:
    """The one that stops waits for what is under way."""
    first = scene.submit(1, start=True)
    await worker.take(1)
    pending = scene.dispatcher.submission.pending

    scene.dispatcher.cancel(first.pending)
    await asyncio.gather(pending.discard(), pending.discard())

    await worker.end_cancelled()
    assert "was ended at step 1: the request was cancelled" in await ended(scene)


@pytest.mark.parametrize("step", [0, 2])
async def test_a_step_that_expires_ends_its_sequence(scene: Scene, worker: StepWorker, step: int) -> None:
    """Whether it has a number or not."""
    scene.submit(1, start=True, step=step and 1)
    await worker.work(1)

    late = scene.submit(2, step=step, within_s=SHORT_S)
    await worker.take(1)

    assert await late.failure() == ("deadline_exceeded", "Request timeout expired")
    await worker.end_cancelled()
    assert "was ended at step 2: Request timeout expired" in await worker.meanwhile(ended(scene))


async def test_a_numbered_step_may_be_cancelled_and_sent_again(scene: Scene, worker: StepWorker) -> None:
    """A connection that breaks ends no sequence: the response of the first goes to the second."""
    scene.submit(1, start=True, step=1)
    await worker.work(1)
    first = scene.submit(2, step=2)
    await worker.take(1)

    scene.dispatcher.cancel(first.pending)
    second = scene.submit(2, step=2)
    await worker.take(2)
    await worker.work(2)

    assert await second.value() == 3
    assert first.responses == []
    assert scene.dispatcher.in_flight == 0


async def test_the_end_of_the_gateway_ends_no_sequence(scene: Scene, worker: StepWorker) -> None:
    """Its callers get an error, and go on at another one."""
    asked = scene.submit(1, start=True)
    await asked.placed()

    scene.dispatcher.submission.pending.fail_all(BrokerUnavailable("over"))

    assert await asked.failure() == ("broker_unavailable", "over")
    await worker.work(1)
    second = scene.submit(2)
    await worker.work(1)
    assert await second.value() == 3


# --- without a worker -------------------------------------------------------------------------------------------------


async def test_what_no_worker_owns_in_time_is_refused(scene: Scene) -> None:
    """Its sequence has not begun: it may be tried again."""
    scene.models.wait_s = SHORT_S

    code, message = await scene.submit(1, start=True).failure()

    assert code == ModelNotReady.code
    assert "no worker took the request for 'sum' version 1 within 0.02 s" in message
    assert "was ended at step 1" in await ended(scene)


async def test_what_a_worker_owns_is_waited_for(scene: Scene, worker: StepWorker) -> None:
    """A version that is kept loaded for its open sequences is no longer what the catalog gives; they go on."""
    scene.submit(1, start=True)
    await worker.work(1)
    scene.models.wait_s = SHORT_S
    late = scene.submit(2)
    (step,) = await worker.take(1)

    await eventually(lambda: late.pending.late is not None, description="the end of the wait for a worker")
    soon = scene.submit(3, of="other", start=True)  # its withdrawal comes behind
    await soon.response()

    await worker.answer(step)
    assert await late.value() == 3


# --- models that keep nothing -----------------------------------------------------------------------------------------


async def test_a_model_without_sequences_ignores_their_parameters(scene: Scene) -> None:
    """As Triton does."""
    scene.models.spec = ModelSpec(
        name="sum", backend="stub", inputs=sum_spec().inputs, outputs=sum_spec().outputs, max_batch_size=2
    )
    await scene.queue.ensure([Lane("sum", 1)])

    scene.submit(1, step=5)

    (lease,) = await scene.queue.fetch([Lane("sum", 1)], "w", 1, 10.0)
    assert decode_request(lease.frame).parameters == {}


# --- in the lane of an owner ------------------------------------------------------------------------------------------


class OwnersLanes:
    """Sequences with known owners, whose replies come when a test gives them."""

    def __init__(self) -> None:
        self.is_known = True
        self.replies: list[tuple[bytes, Appended]] = []
        self.by_script: list[list[bytes]] = []

    def check_up(self) -> None:
        """Redis is there."""

    def owners_lane(self, sequence: SequenceId, limit: int, *, is_end: bool) -> OwnersLane | None:
        place = StepPlace(sequence, 1, 0)
        return OwnersLane(Lane("sum", 1, "seq@w1"), place, token=1, until_s=math.inf) if self.is_known else None

    def append(self, lane: OwnersLane, frame: bytes, appended: Appended) -> None:
        self.replies.append((frame, appended))

    async def submit_together(self, steps: list[Any], limits: object) -> list[QinferError]:
        self.by_script.append([step.frame for _, step in steps])
        return [BrokerUnavailable("away")] * len(steps)

    def reply(self, outcome: QinferError | None) -> bytes:
        """Answers the append that has waited for longest; returns its frame."""
        frame, appended = self.replies.pop(0)
        appended(outcome)
        return frame


class OwnedSteps:
    """Steps on their way to known owners, and what became of them."""

    def __init__(self) -> None:
        self.lanes, self.ended = OwnersLanes(), list[bytes]()
        sequences, pending = cast(Sequences, self.lanes), cast(PendingRequests, self)
        self.steps = ModelSteps(sequences, Places(time.monotonic), SubmitLimits(), pending, lambda: None)

    def submitted(self, pending: PendingCall, outcome: object) -> None:
        self.ended.append(pending.request_id.encode())

    def send(self, frame: bytes, of: int = 1, *, start: bool = False, payload: Payload | None = None) -> None:
        request = OutgoingRequest(model="sum", inputs=(), sequence=SequenceFlags(of, start=start))
        pending = PendingCall(frame.decode(), "", "sum", 1, Asked(), 0.0)
        self.steps.submit(pending, request, Models().asked("sum", 1), frame, payload)

    async def run_scripts(self) -> None:
        for steps in list(self.steps.take_waiting()):
            await self.steps.submit_together(steps)


@pytest.fixture
def owned() -> OwnedSteps:
    return OwnedSteps()


def test_a_caller_that_fails_holds_no_other_step_up(owned: OwnedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback of Redis' replies may raise."""

    def fail(*_: object) -> None:
        raise ValueError("a caller's mistake")

    monkeypatch.setattr(owned, "submitted", fail)
    for frame in (b"a1", b"a2"):
        owned.send(frame)
    for _ in range(2):
        with pytest.raises(ValueError, match="a caller's mistake"):
            owned.lanes.reply(BrokerUnavailable("the reply is lost"))
    owned.send(b"a3")

    assert [frame for frame, _ in owned.lanes.replies] == [b"a3"]


def test_a_step_is_sent_after_the_reply_to_the_one_before(owned: OwnedSteps) -> None:
    """Those of other sequences don't wait."""
    for frame, of in ((b"a1", 1), (b"a2", 1), (b"b1", 2), (b"a3", 1)):
        owned.send(frame, of)
    sent = [frame for frame, _ in owned.lanes.replies]
    for _ in range(4):
        owned.lanes.reply(BrokerUnavailable("the reply is lost"))

    assert sent == [b"a1", b"b1"]
    assert owned.ended == [b"a1", b"b1", b"a2", b"a3"]
    assert not owned.steps._behind


async def test_a_step_that_finds_its_lane_closed_goes_before_those_behind_it(owned: OwnedSteps) -> None:
    for frame in (b"1", b"2", b"3"):
        owned.send(frame)
    owned.lanes.reply(None)
    owned.send(b"4")

    await owned.run_scripts()

    assert owned.lanes.by_script == [[b"1", b"2", b"3", b"4"]]
    assert owned.lanes.replies == []
    assert owned.ended == [b"1", b"2", b"3", b"4"]
    assert not owned.steps._behind


async def test_starts_and_large_steps_go_by_script_in_their_turn(owned: OwnedSteps) -> None:
    owned.send(b"1")
    owned.send(b"2", payload=Payload("r", b"", 1.0))
    owned.send(b"3")
    owned.lanes.reply(BrokerUnavailable("the reply is lost"))
    await owned.run_scripts()
    owned.send(b"4", start=True)
    owned.send(b"5")
    await owned.run_scripts()

    assert owned.lanes.by_script == [[b"2", b"3"], [b"4", b"5"]]
    assert owned.ended == [b"1", b"2", b"3", b"4", b"5"]


def test_without_a_queue_the_steps_that_wait_fail(owned: OwnedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise BrokerUnavailable("Redis can't be reached")

    for frame in (b"1", b"2", b"3"):
        owned.send(frame)
    monkeypatch.setattr(owned.lanes, "append", away)
    owned.lanes.reply(BrokerUnavailable("the reply is lost"))

    assert owned.ended == [b"1", b"2", b"3"]
    with pytest.raises(BrokerUnavailable):
        owned.send(b"4")
    assert not owned.steps._behind
