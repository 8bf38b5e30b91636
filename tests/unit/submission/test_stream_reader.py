"""The reader of a stream: which responses it delivers, what it counts as taken, and what workers are told."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from qinfer.core.messages import Credit, Failure, Response
from qinfer.errors import BrokerUnavailable
from qinfer.queue.lanes import Queue
from qinfer.submission.streams import Credits, ResponseFate, StreamReader
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_credits

DELIVER, DROP, BREAK = ResponseFate.DELIVER, ResponseFate.DROP, ResponseFate.BREAK
BROKEN = Failure("stream_broken", "its worker ended", retryable=True)


class Owed(list[int]):
    def note(self, stream: StreamReader) -> None:
        self.append(stream.taken_bytes)


def reader(*, resumes: bool = False, owed: Owed | None = None, now_s: float = 100.0) -> StreamReader:
    return StreamReader("r", resumes, 60.0, 1000.0, lambda: now_s, (owed if owed is not None else Owed()).note)


def response(
    index: int, attempt: int = 1, *, final: bool = False, size: int = 10, failure: Failure | None = None
) -> Response:
    outputs = (Tensor("y", "UINT8", (size,), bytes(size)),) if size and failure is None else ()
    return Response(
        request_id="r",
        attempt=attempt,
        index=index,
        final=final,
        outputs=outputs,
        failure=failure,
        credit_to="" if final else f"reply:worker-{attempt}",
    )


def verdicts(stream: StreamReader, responses: Sequence[Response]) -> list[ResponseFate]:
    return [stream.judge(one) for one in responses]


def test_responses_that_come_again_are_dropped() -> None:
    """As after a reconnect, when the reply stream is read anew."""
    came = [response(0), response(1), response(0), response(1), response(2, final=True)]

    assert verdicts(reader(), came) == [DELIVER, DELIVER, DROP, DROP, DELIVER]


def test_a_response_that_is_missing_breaks_the_stream() -> None:
    assert verdicts(reader(), [response(0), response(2)]) == [DELIVER, BREAK]


def test_a_later_execution_is_followed_before_anything_is_delivered() -> None:
    """The earlier one is not heard any more."""
    stream = reader()

    assert verdicts(stream, [response(0, 2), response(0, 1), response(1, 2)]) == [DELIVER, DROP, DELIVER]


def test_a_later_execution_breaks_a_stream_that_has_begun() -> None:
    stream = reader()

    assert verdicts(stream, [response(0), response(1), response(0, 2)]) == [DELIVER, DELIVER, BREAK]
    assert "after 2 responses; send the request again" in stream.broken().message
    assert stream.broken().retryable


def test_a_model_that_repeats_itself_goes_on() -> None:
    """What the caller has is dropped; the earlier execution is not heard any more, though it may be ahead."""
    stream = reader(resumes=True)
    came = [response(0), response(1), response(0, 2), response(2), response(1, 2), response(2, 2, final=True)]

    assert verdicts(stream, came) == [DELIVER, DELIVER, DROP, DROP, DROP, DELIVER]


def test_a_model_that_does_not_repeat_itself_breaks_the_stream() -> None:
    """It ends with fewer responses than the caller has."""
    stream = reader(resumes=True)

    assert verdicts(stream, [response(0), response(1), response(0, 2, final=True)]) == [DELIVER, DELIVER, BREAK]


def test_a_failure_ends_a_stream_whatever_its_number() -> None:
    """Who answers instead of the model knows no number: a dead letter, an expired request."""
    failure = Failure("inference_failed", "its worker was killed too often")
    stream = reader(resumes=True)

    assert verdicts(stream, [response(0), response(0, 2, final=True, failure=failure)]) == [DELIVER, DELIVER]


def test_an_error_among_responses_is_one_of_them() -> None:
    """Models may send errors and go on."""
    failure = Failure("inference_failed", "this frame is damaged")
    came = [response(0), response(1, failure=failure), response(2, final=True)]

    assert verdicts(reader(), came) == [DELIVER] * 3


def test_who_does_not_execute_again_breaks_the_stream() -> None:
    assert verdicts(reader(), [response(0), response(0, 2, final=True, failure=BROKEN)]) == [DELIVER, BREAK]
    assert verdicts(reader(), [response(0, 2, final=True, failure=BROKEN)]) == [BREAK]


def test_bytes_are_owed_when_they_are_taken() -> None:
    owed = Owed()
    stream = reader(owed=owed)
    verdicts(stream, [response(0, size=10), response(1, size=20)])

    stream.took(10)
    stream.took(20)

    assert owed == [10, 30]
    assert (stream.held_bytes, stream.credit_to) == (0, "reply:worker-1")


def test_what_the_caller_has_counts_as_taken_of_the_next_execution() -> None:
    """But what it has been given and not taken yet: that is on its way still."""
    owed = Owed()
    stream = reader(resumes=True, owed=owed)
    verdicts(stream, [response(0), response(1)])
    stream.took(10)

    verdicts(stream, [response(0, 2), response(1, 2), response(2, 2)])
    on_its_way = stream.taken_bytes
    stream.took(10)
    stream.took(10)

    assert (on_its_way, stream.taken_bytes, stream.credit_to) == (10, 30, "reply:worker-2")


def test_a_stream_lives_from_response_to_response() -> None:
    """And as long as its caller has one to take: its worker ends the stream of who takes nothing."""
    stream = reader(now_s=500.0)
    unheard_s = stream.until_s
    stream.judge(response(0))
    held_s = stream.until_s
    stream.took(10)

    assert (unheard_s, held_s, stream.until_s) == (60.0, 560.0, 560.0)


def test_a_stream_ends_with_its_deadline() -> None:
    stream = reader(now_s=990.0)
    stream.judge(response(0))

    assert stream.until_s == 1000.0


class Replies:
    """A queue that publishes credits, and may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.published: list[tuple[str, list[Credit]]] = []

    async def publish(self, reply_to: str, blob: bytes) -> bool:
        if self.is_away:
            raise BrokerUnavailable("Redis can't be reached")
        self.published.append((reply_to, decode_credits(blob)))
        return True


def credits_of(replies: Replies, window_bytes: int = 100, closed: Sequence[str] = ()) -> Credits:
    return Credits(cast(Queue, replies), window_bytes, lambda request_id: request_id not in closed)


def held(owing: Credits, name: str, *sizes: int) -> StreamReader:
    """Returns the reader of a stream that was delivered responses of these sizes."""
    stream = StreamReader(name, False, 60.0, 1000.0, lambda: 0.0, owing.owe)
    for index, size in enumerate(sizes):
        stream.judge(response(index, size=size))
    return stream


async def test_streams_of_one_worker_are_told_together() -> None:
    replies = Replies()
    owing = credits_of(replies)
    for name in ("a", "b"):
        held(owing, name, 30).took(30)

    await owing.send_credits()

    assert replies.published == [("reply:worker-1", [Credit("a", 1, 30), Credit("b", 1, 30)])]


async def test_little_is_told_when_nothing_else_is_to_be_taken() -> None:
    """A stream of small responses makes no message of each of them."""
    replies = Replies()
    owing = credits_of(replies)
    stream = held(owing, "a", 10, 10, 10)

    told = []
    for _ in range(3):
        stream.took(10)
        await owing.send_credits()
        told.append(len(replies.published))

    assert told == [0, 0, 1]
    assert replies.published[0][1] == [Credit("a", 1, 30)]


async def test_who_takes_slowly_is_told_of_now_and_then() -> None:
    """Its worker may not think that it takes nothing."""
    replies, now_s = Replies(), 1000.0
    owing = credits_of(replies)
    stream = StreamReader("a", False, 60.0, 2000.0, lambda: now_s, owing.owe)
    for index in range(5):
        stream.judge(response(index, size=4))

    told = []
    for _ in range(3):
        now_s += 3.0
        stream.took(4)
        await owing.send_credits()
        told.append(len(replies.published))

    assert told == [1, 1, 2]


async def test_streams_that_ended_are_not_told() -> None:
    replies = Replies()
    owing = credits_of(replies, closed=["a"])
    held(owing, "a", 30).took(30)

    await owing.send_credits()

    assert replies.published == []


async def test_what_could_not_be_told_is_told_afterwards() -> None:
    """With all that was taken meanwhile: a worker that hears nothing sends nothing."""
    replies = Replies()
    owing = credits_of(replies)
    stream = held(owing, "a", 30, 30)
    replies.is_away = True
    stream.took(30)
    with pytest.raises(BrokerUnavailable):
        await owing.send_credits()

    replies.is_away = False
    stream.took(30)
    await owing.send_credits()

    assert replies.published == [("reply:worker-1", [Credit("a", 1, 60)])]


async def test_telling_goes_on_by_itself() -> None:
    """Of much and of little, whether or not Redis was away."""
    replies = Replies()
    owing = credits_of(replies)
    replies.is_away = True
    running = asyncio.create_task(owing.run())
    held(owing, "a", 30).took(30)
    await asyncio.sleep(0)

    replies.is_away = False
    held(owing, "b", 1).took(1)
    await eventually(lambda: told_of(replies) == {"a", "b"}, description="the credits")
    running.cancel()


def told_of(replies: Replies) -> set[str]:
    return {credit.request_id for _, told in replies.published for credit in told}
