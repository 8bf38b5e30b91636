"""Streams as their readers see them: executions that overlap and repeat themselves, in any interleaving."""

from hypothesis import example, given
from hypothesis import strategies as st

from qinfer.core.messages import Response
from qinfer.submission.streams import ResponseFate, StreamReader
from qinfer.tensors import Tensor


def _response(attempt: int, index: int, last: int) -> Response:
    is_final = index == last
    text = b"" if is_final else str(index).encode()
    outputs = () if is_final else (Tensor("y", "UINT8", (len(text),), text),)
    return Response(
        request_id="r",
        attempt=attempt,
        index=index,
        final=is_final,
        outputs=outputs,
        credit_to="" if is_final else f"reply:worker-{attempt}",
    )


def _reader(*, resumes: bool) -> StreamReader:
    return StreamReader("r", resumes, 60.0, 1000.0, lambda: 0.0, lambda _: None)


@st.composite
def _reply_streams(draw: st.DrawFn) -> tuple[list[Response], int]:
    """Draws what a gateway hears: executions that begin one after the other, each in order, with blobs that repeat.

    Returns:
        The responses, and the number of the last one of each whole execution.
    """
    last = draw(st.integers(1, 6))
    attempts = draw(st.integers(1, 3))
    sent = [draw(st.integers(0, last)) for _ in range(attempts - 1)] + [last + 1]  # only the last one is known to end
    places = dict.fromkeys(range(1, attempts + 1), 0)
    heard: list[Response] = []
    while open_ones := [attempt for attempt, place in places.items() if place < sent[attempt - 1]]:
        attempt = draw(st.sampled_from(open_ones))
        size = draw(st.integers(1, 3))
        begin = max(places[attempt] - draw(st.integers(0, 2)), 0)  # a blob that is published again, or read again
        end = min(places[attempt] + size, sent[attempt - 1])
        heard += [_response(attempt, index, last) for index in range(begin, end)]
        places[attempt] = end
    return heard, last


def _read(stream: StreamReader, heard: list[Response]) -> tuple[list[Response], bool]:
    """Returns what is delivered until the end, and whether the stream was broken."""
    delivered: list[Response] = []
    for response in heard:
        verdict = stream.judge(response)
        if verdict is ResponseFate.BREAK:
            return delivered, True
        if verdict is ResponseFate.DELIVER:
            delivered.append(response)
            if response.final:
                break
    return delivered, False


@given(_reply_streams())
@example(([_response(1, 0, 2), _response(2, 0, 2), _response(2, 1, 2), _response(2, 2, 2)], 2))
def test_a_stream_that_resumes_is_whole(case: tuple[list[Response], int]) -> None:
    """Each response once, in order, and the end."""
    heard, last = case

    delivered, is_broken = _read(_reader(resumes=True), heard)

    assert not is_broken
    assert [response.index for response in delivered] == list(range(last + 1))
    assert delivered[-1].final


@given(_reply_streams())
def test_a_stream_that_does_not_resume_is_of_one_execution(case: tuple[list[Response], int]) -> None:
    """Whole, or broken after its first responses; never a response twice, and none of two executions."""
    heard, last = case

    delivered, is_broken = _read(_reader(resumes=False), heard)

    assert [response.index for response in delivered] == list(range(len(delivered)))
    assert len({response.attempt for response in delivered}) <= 1
    assert is_broken or len(delivered) == last + 1


@given(_reply_streams(), st.booleans(), st.data())
def test_no_more_is_told_than_was_taken(case: tuple[list[Response], int], resumes: bool, data: st.DataObject) -> None:  # noqa: FBT001
    """Of the execution that is followed; and all of it once its caller has taken all that came."""
    stream, queue, came = _reader(resumes=resumes), list[int](), 0
    for response in case[0]:
        attempt, seen = stream.attempt, stream.seen
        verdict = stream.judge(response)
        if stream.attempt != attempt:
            came, seen = 0, 0
        if stream.seen > seen:
            came += sum(tensor.nbytes for tensor in response.outputs)
        if verdict is ResponseFate.BREAK or response.final:
            break
        if verdict is ResponseFate.DELIVER:
            queue.append(sum(tensor.nbytes for tensor in response.outputs))
        for _ in range(data.draw(st.integers(0, len(queue)))):
            before = stream.taken_bytes
            stream.took(queue.pop(0))
            assert before <= stream.taken_bytes <= came
        assert stream.held_bytes == sum(queue)
    for nbytes in queue:
        stream.took(nbytes)
    assert stream.taken_bytes == stream.arrived_bytes
