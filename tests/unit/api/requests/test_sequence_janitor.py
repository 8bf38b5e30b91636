"""The janitor's part in sequences: who waits gets a stored response or a failure, and is told only once."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from qinfer.core.messages import Failure, InferRequest, Response, SequenceFlags
from qinfer.errors import Cancelled
from qinfer.observe.stats import GatewayTally
from qinfer.queue.entries import CHUNK_BYTES, reply_address
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.records import CommittedStep, SequenceId, SequencePin, StepRequest, SubmittedStep
from qinfer.tensors import from_numpy
from qinfer.testing import EmbeddedServer, eventually
from qinfer.wire.frame import decode_responses, encode_request, encode_responses
from qinfer_api.requests.janitor import SequenceJanitor
from tests.support.servers.servers import Database

SEVEN = SequenceId("", 7)
PIN = SequencePin(version=1, generation=1, idle_s=5.0)


class StatefulModels:
    """Stands in for the catalog."""

    def stateful(self) -> list[str]:
        return ["m"]


class Bench:
    """A janitor, and a gateway that submits steps of sequence 7 and reads what is published."""

    def __init__(self, server: EmbeddedServer, queue: Queue) -> None:
        self.server, self.queue = server, queue
        self.sequences = queue.sequences("m", 0)
        self.tally = GatewayTally()
        self.janitor = SequenceJanitor(queue, StatefulModels(), self.tally)  # type: ignore[arg-type]  # all it asks
        self.heard: list[Response] = []

    async def submit(
        self, name: str, *, start: bool = False, end: bool = False, timeout_s: float = 60.0
    ) -> SubmittedStep:
        request = InferRequest(
            model="m",
            version=1,
            inputs=(),
            id=name,
            reply_to=reply_address("me"),
            sequence=SequenceFlags(7, start, end),
        )
        pin = PIN if start else None
        return await self.sequences.submit(
            SEVEN, StepRequest(frame=encode_request(request), timeout_s=timeout_s, start=pin, end=end)
        )

    async def own(self, worker: str = "w1") -> int:
        """Has a worker own the sequence; returns its token."""
        await self.sequences.join(worker, [1], 10.0)
        owned = await self.sequences.own(worker, 1, 1)
        assert owned
        return owned[0].token

    async def commit(self, step: SubmittedStep, token: int, response: Response) -> None:
        record = CommittedStep(place=step.place, token=token, response=encode_responses([response]), ends=True)
        assert await self.sequences.commit([record]) == [True]

    def take(self, blob: bytes) -> None:
        self.heard += decode_responses(blob)

    async def answers(self, count: int) -> dict[str, Response]:
        """Waits for so many responses; returns them by request."""
        await eventually(lambda: len(self.heard) >= count, description=f"{count} responses")
        return {response.request_id: response for response in self.heard}


@pytest.fixture
async def bench(timed: EmbeddedServer, database: Database) -> AsyncIterator[Bench]:
    queue = await database.delivery()
    bench = Bench(timed, queue)
    listening = asyncio.Event()
    listener = asyncio.create_task(queue.listen("me", bench.take, listening.set))
    await listening.wait()
    yield bench
    listener.cancel()
    await asyncio.wait([listener])


async def test_steps_of_a_cancelled_sequence_are_answered(bench: Bench) -> None:
    """With its own failure, and with that of the step that ended it; once."""
    first, _ = await bench.submit("a", start=True), await bench.submit("b")
    await bench.sequences.fail(first.place, Failure.from_error(Cancelled("nobody waits")))

    await bench.janitor.round()
    await bench.janitor.round()

    answers = await bench.answers(2)
    failures = {name: answer.failure for name, answer in answers.items()}
    assert failures["a"] is not None
    assert failures["a"].code == "cancelled"
    assert failures["b"] is not None
    assert failures["b"].code == "cancelled"
    assert "was ended at step 1: nobody waits" in failures["b"].message
    assert len(bench.heard) == 2
    assert bench.tally.refusals.drain() == {}


async def test_a_committed_step_of_a_dead_worker_gets_its_stored_response(bench: Bench) -> None:
    """It is published with the id of the request, however large it is."""
    step = await bench.submit("a", start=True, end=True)
    large = from_numpy("y", np.zeros(CHUNK_BYTES, "<f4"))
    await bench.commit(step, await bench.own(), Response(request_id="other", model="m", outputs=(large,)))

    bench.server.advance(11.0)
    await bench.janitor.round()

    answer = (await bench.answers(1))["a"]
    assert (answer.failure, answer.stored) == (None, True)
    assert step.entry is not None
    blob = await bench.queue.take_result(step.entry.lane, "a")
    assert blob is not None
    assert decode_responses(blob)[0].outputs[0].nbytes == large.nbytes


async def test_sequences_of_a_dead_worker_go_on_at_another(bench: Bench) -> None:
    await bench.submit("a", start=True)
    token = await bench.own("w1")

    bench.server.advance(11.0)
    await bench.janitor.round()

    assert await bench.own("w2") > token


async def test_a_sequence_that_nobody_owns_ends_at_its_deadline(bench: Bench) -> None:
    await bench.submit("a", start=True, timeout_s=1.0)

    bench.server.advance(2.0)
    await bench.janitor.round()

    failure = (await bench.answers(1))["a"].failure
    assert failure is not None
    assert failure.code == "deadline_exceeded"


async def test_a_step_that_can_not_be_read_is_removed(bench: Bench) -> None:
    broken = await bench.sequences.submit(SEVEN, StepRequest(frame=b"?", timeout_s=60.0, start=PIN))
    await bench.sequences.fail(broken.place, Failure.from_error(Cancelled("nobody waits")))

    await bench.janitor.round()

    assert await bench.sequences.unanswered() == []
    bench.server.advance(11.0)
    assert await bench.sequences.unanswered() == []
