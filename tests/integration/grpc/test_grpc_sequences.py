"""Steps of sequences over gRPC: through a gateway, to workers in this process, and back."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc.aio import InferenceServerClient, InferInput

from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.errors import START_MISSING
from qinfer.queue.sequences.records import SequenceId
from qinfer.testing import eventually
from qinfer_api.rpc.protocol import LARGE_BYTES
from tests.support.both_protocols import over_grpc
from tests.support.sequences_served import (
    SMALL_BYTES,
    SequencesServed,
    message_of,
    refused,
    sequences_served,
    sum_of,
)

ONE = "oldest { max_candidate_sequences: 1 }"


@pytest.fixture
async def sums() -> AsyncIterator[SequencesServed]:
    async with sequences_served() as one:
        await one.start()
        yield one


async def streamed(sums: SequencesServed, requests: Iterable[Any]) -> list[tuple[str, Any]]:
    """Sends requests on one stream, all before the first answer; returns id and sum, or error, of each."""
    call = sums.stub.ModelStreamInfer()
    count = 0
    for request in requests:
        await call.write(request)
        count += 1
    await call.done_writing()
    replies = [reply async for reply in call]
    assert len(replies) == count
    return [(reply.infer_response.id, reply.error_message or sum_of(reply.infer_response)) for reply in replies]


async def test_steps_are_summed_in_order(sums: SequencesServed) -> None:
    answers = [sum_of(await sums.call(n, start=n == 1, end=n == 3)) for n in (1, 2, 3)]

    assert answers == [1, 3, 6]
    assert await sums.open() == 0


async def test_the_client_keeps_a_sequence(sums: SequencesServed) -> None:
    """Through tritonclient, whose streams carry sequences."""
    x = InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(np.ones((1, 2), "f4"))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            flags = {"sequence_start": number == 0, "sequence_end": number == 2}
            yield {"model_name": "stub", "inputs": [x], "sequence_id": 2**63 - 1, **flags}

    async with InferenceServerClient(sums.gateway.rpc.url.partition("://")[2]) as client:  # type: ignore[union-attr]
        replies = [reply async for reply in client.stream_infer(requests())]

    assert [error for _, error in replies] == [None] * 3
    assert [float(reply.as_numpy("y")[0, 0]) for reply, _ in replies] == [1.0, 2.0, 3.0]


async def test_a_sequence_goes_over_both_protocols(sums: SequencesServed) -> None:
    """Text ids, too."""
    for name in (7, "7"):
        assert sum_of(await sums.call(1, name, start=True)) == 1
        assert sum_of(await sums.post(2, name)) == 3
        assert sum_of(await sums.call(3, name, end=True)) == 6


async def test_one_stream_carries_a_sequence(sums: SequencesServed) -> None:
    """All of its steps are sent before the first is answered."""
    answers = await streamed(sums, [message_of(n, id=str(n), start=n == 1, end=n == 20) for n in range(1, 21)])

    assert answers == [(str(n), n * (n + 1) / 2) for n in range(1, 21)]


@pytest.mark.parametrize("width", [SMALL_BYTES, LARGE_BYTES])
async def test_large_and_small_steps_of_one_stream_keep_their_order(width: int) -> None:
    """Large ones are stored beside the request, and the largest decoded in a thread; small ones wait behind them."""
    async with sequences_served(dims=-1) as sums:
        await sums.start()
        requests = [message_of(n, width=width if n % 2 else 1, start=n == 1, end=n == 6) for n in range(1, 7)]

        answers = await streamed(sums, requests)

    assert [answer for _, answer in answers] == [1, 3, 6, 10, 15, 21]


async def test_one_stream_carries_several_sequences(sums: SequencesServed) -> None:
    """Their steps alternate, and answers come in the order of all requests."""
    requests = [
        message_of(of * n, of, id=f"{of}.{n}", start=n == 1, end=n == 10) for n in range(1, 11) for of in range(1, 31)
    ]

    answers = await streamed(sums, requests)

    assert answers == [(f"{of}.{n}", of * n * (n + 1) / 2) for n in range(1, 11) for of in range(1, 31)]


async def test_an_error_leaves_the_stream_and_the_sequence(sums: SequencesServed) -> None:
    requests = [
        message_of(1, id="a", start=True, step=1),
        message_of(1, 9, id="b"),
        message_of(5, id="c", step=3),
        message_of(2, id="d", step=2),
    ]

    answers = await streamed(sums, requests)

    assert answers == [
        ("a", 1),
        ("b", f"inference request for sequence 9 to model 'stub' {START_MISSING}"),
        ("c", "step 3 of sequence 1 to model 'stub' leaves a gap: send step 2 first"),
        ("d", 3),
    ]


async def test_a_step_that_is_sent_again_gets_its_response_again(sums: SequencesServed) -> None:
    """With the id of the new request; also the first and the last of a sequence."""
    answers = []
    for number in (1, 2, 3):
        flags = {"start": number == 1, "end": number == 3, "step": number}
        for attempt in "ab":
            reply = await sums.call(number, id=f"{number}{attempt}", **flags)
            answers.append((reply.id, sum_of(reply)))

    assert answers == [("1a", 1), ("1b", 1), ("2a", 3), ("2b", 3), ("3a", 6), ("3b", 6)]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({}, f"inference request for sequence 1 to model 'stub' {START_MISSING}"),
        (
            {"sequence_id": 0, "start": True},
            "inference request to model 'stub' must specify a non-zero or non-empty correlation ID",
        ),
        (
            {"sequence_id": "", "step": 1},
            "parameter 'qinfer_step' numbers the requests of a sequence: send 'sequence_id' with it",
        ),
        ({"step": "1", "start": True}, "invalid value type for 'qinfer_step' parameter, expected int64_param."),
        ({"step": True, "start": True}, "invalid value type for 'qinfer_step' parameter, expected int64_param."),
        ({"step": -1, "start": True}, "invalid value for 'qinfer_step', expected value >= 0."),
        ({"step": 0, "start": True}, "parameter 'qinfer_step' is '0'; number the requests of a sequence 1, 2, …"),
    ],
)
async def test_requests_that_are_no_step(sums: SequencesServed, flags: dict[str, Any], text: str) -> None:
    code, details = await over_grpc(sums.call(1, **flags))

    assert (code, details) == ("INVALID_ARGUMENT", text)
    assert await sums.open() == 0


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("step", [0, 2])
async def test_a_caller_that_leaves(sums: SequencesServed, *, is_stream: bool, step: int) -> None:
    """A step without a number ends its sequence, and the next one is told why; one with a number may be sent again."""
    first, second = ({"step": 1}, {"step": 2}) if step else ({}, {})
    assert sum_of(await sums.call(1, start=True, **first)) == 1
    sums.scene.hold()
    left: Any = sums.stub.ModelStreamInfer() if is_stream else sums.call(2, **second)
    if is_stream:
        await left.write(message_of(2, **second))
    else:
        left = asyncio.ensure_future(left)
    await sums.submitted(1)

    left.cancel()
    await eventually(lambda: sums.gateway.dispatcher.in_flight == 0, description="the end of the request")
    if not step:
        await sums.ended()
    sums.scene.go()

    if step:
        assert sum_of(await sums.call(2, **second)) == 3
    else:
        code, details = await over_grpc(sums.call(2))
        assert code == "INVALID_ARGUMENT"
        assert "sequence 1 of model 'stub' was ended at step 2: the request was cancelled; " in details


async def test_a_deadline_that_passes_ends_the_sequence(sums: SequencesServed) -> None:
    """That of the call: whether its caller gives it up first, or the gateway."""
    assert sum_of(await sums.call(1, start=True)) == 1
    sums.scene.hold()

    code, _ = await over_grpc(sums.stub.ModelInfer(message_of(2), timeout=0.3))
    await sums.ended()
    behind = await sums.post(3)
    sums.scene.go()

    assert code == grpc.StatusCode.DEADLINE_EXCEEDED.name
    assert refused(behind)[0] == 400
    assert "was ended at step 2: " in refused(behind)[1]


async def test_steps_that_wait_behind_one_that_was_given_up_are_told(sums: SequencesServed) -> None:
    assert sum_of(await sums.call(1, start=True)) == 1
    sums.scene.hold()
    given_up = asyncio.ensure_future(sums.call(2))
    await sums.submitted(1)
    behind = asyncio.ensure_future(over_grpc(sums.call(3)))
    await sums.submitted(2)

    given_up.cancel()
    code, details = await behind
    sums.scene.go()

    assert code == "CANCELLED"
    assert "sequence 1 of model 'stub' was ended at step 2: the request was cancelled; " in details


async def test_steps_that_wait_are_cancelled_together_and_the_one_that_executes_is_answered(
    sums: SequencesServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, cancel = asyncio.Event(), SequenceBatcher.cancel

    def told_of(batcher: SequenceBatcher, sequence: SequenceId, number: int) -> bool:
        told.set()
        return cancel(batcher, sequence, number)

    monkeypatch.setattr(SequenceBatcher, "cancel", told_of)
    sums.scene.hold()
    executing = asyncio.ensure_future(sums.call(1, start=True))
    await sums.scene.started()
    waiting = [asyncio.ensure_future(sums.call(2)), asyncio.ensure_future(over_grpc(sums.call(3)))]
    await sums.submitted(3)

    waiting[0].cancel()
    await told.wait()
    sums.scene.go()

    assert sum_of(await executing) == 1
    assert (await waiting[1])[0] == "CANCELLED"
    await sums.ended()
    assert await sums.metric("nv_inference_request_failure", 'reason="CANCELED"') == 2


async def test_a_sequence_in_the_backlog_is_cancelled_with_one_of_its_steps() -> None:
    async with sequences_served(strategy=ONE) as sums:
        await sums.start()
        assert sum_of(await sums.call(1, start=True)) == 1
        waiting = [asyncio.ensure_future(sums.call(1, 2, start=True))]
        await sums.submitted(1)
        waiting.append(asyncio.ensure_future(over_grpc(sums.call(2, 2))))
        await sums.submitted(2)

        waiting[0].cancel()

        assert (await waiting[1])[0] == "CANCELLED"
        assert await sums.metric("nv_inference_request_failure", 'reason="CANCELED"') == 2
        assert sum_of(await sums.call(2, end=True)) == 3
        assert sum_of(await sums.call(7, 2, start=True)) == 7


async def test_more_sequences_than_may_be_open() -> None:
    async with sequences_served(limits={"max_sequences": 1}) as sums:
        await sums.start()
        assert sum_of(await sums.call(1, 1, start=True)) == 1

        code, details = await over_grpc(sums.call(1, 2, start=True))

        assert code == "UNAVAILABLE"
        assert details.endswith("too many steps or sequences wait at model 'stub'; try again later")
        assert sum_of(await sums.call(1, 1, end=True)) == 2
        assert sum_of(await sums.call(1, 2, start=True)) == 1
