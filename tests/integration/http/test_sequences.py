"""Steps of sequences over HTTP: through a gateway, to workers in this process, and back."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.errors import BACKLOG_TIMED_OUT, START_MISSING
from qinfer.queue import keys
from qinfer.queue.sequences.ownership import Sequences
from qinfer.submission import memory, submit
from qinfer.testing import eventually
from qinfer_api.rpc import infer
from tests.support.sequences_served import URL, SequencesServed, body_of, refused, sequences_served, sum_of

ONE = "oldest { max_candidate_sequences: 1 }"
FULL = "too many steps or sequences wait at model 'stub'; try again later"


@pytest.fixture(params=["fast", "route"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[SequencesServed]:
    """Both ways of a request into the gateway."""
    async with sequences_served(http={"fast_path": request.param == "fast"}) as one:
        await one.start()
        yield one


@pytest.fixture
async def sums() -> AsyncIterator[SequencesServed]:
    async with sequences_served() as one:
        await one.start()
        yield one


async def test_steps_are_summed_in_order(served: SequencesServed) -> None:
    assert await served.sum(1, 2, 3) == [1, 3, 6]
    assert await served.open() == 0


async def test_binary_tensors(served: SequencesServed) -> None:
    replies = [await served.post_binary(n, "a", start=n == 1, end=n == 3) for n in (1, 2, 3)]

    assert [sum_of(reply) for reply in replies] == [1, 3, 6]


@pytest.mark.parametrize("way", ["post", "post_binary", "call"])
async def test_steps_of_a_known_owner_cost_what_similar_requests_cost(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not parsed by protobuf, checked, encoded or submitted by script, as those before them were."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the fast path leaves this out")

    async with sequences_served(explicit=True) as one:
        await one.start()
        send = getattr(one, way)
        for number in range(1, 6):
            assert sum_of(await send(number, start=number == 1, end=False)) == number
            assert sum_of(await send(number, 2, start=number == 1, end=number == 5)) == number
        monkeypatch.setattr(Sequences, "submit_together", never)
        for place in (submit, memory, infer):
            for name in {"check", "encode_request", "parse_infer"} & vars(place).keys():
                monkeypatch.setattr(place, name, never)

        answers = [sum_of(await send(number, start=False, end=False)) for number in range(6, 9)]

        assert answers == [6, 7, 8]


async def test_generate(sums: SequencesServed) -> None:
    """The parameters of a sequence are members of the body, as those of any request are."""
    answers = []
    for number in (1, 2, 3):
        body = {"x": [number, number], "sequence_id": 7, "sequence_start": number == 1, "sequence_end": number == 3}
        reply = await sums.client.post("/v2/models/stub/generate", json=body)
        answers.append(reply.json().get("y"))

    assert answers == [[1, 1], [3, 3], [6, 6]]


async def test_steps_sent_at_once_over_one_connection_keep_their_order(served: SequencesServed) -> None:
    """Pipelined: none waits for the answer to the one before."""
    place = httpx.URL(served.gateway.url)
    reader, writer = await asyncio.open_connection(place.host, place.port)
    for number in range(1, 9):
        body = json.dumps(body_of(number, start=number == 1, end=number == 8)).encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (URL.encode(), len(body)) + body
        )
    answers = []
    for _ in range(8):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        answers.append(json.loads(await reader.readexactly(length))["outputs"][0]["data"][0])
    writer.close()

    assert answers == [1, 3, 6, 10, 15, 21, 28, 36]


async def test_a_text_and_a_number_are_two_sequences(sums: SequencesServed) -> None:
    for number in (1, 2):
        assert sum_of(await sums.post(number, 7, start=number == 1)) == (1 if number == 1 else 3)
        assert sum_of(await sums.post(10 * number, "7", start=number == 1)) == (10 if number == 1 else 30)

    assert await sums.open() == 2


async def test_sequences_of_tenants_do_not_meet(tmp_path: Path) -> None:
    """They have equal ids."""
    file = tmp_path / "keys.json"
    headers = [
        {"authorization": f"Bearer {add_key(file, name, (Scope.INFER,), name)[1]}"} for name in ("acme", "other")
    ]
    async with sequences_served(auth={"mode": "keys", "keys_file": str(file)}) as sums:
        await sums.start()
        answers = []
        for number in (1, 2):
            for factor, of in zip((1, 10), headers, strict=True):
                answers.append(sum_of(await sums.post(factor * number, start=number == 1, headers=of)))
        stranger = await sums.post(1, 5, headers=headers[1])

    assert answers == [1, 10, 3, 30]
    assert refused(stranger) == (400, f"inference request for sequence 5 to model 'stub' {START_MISSING}")


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        ({}, 400, f"inference request for sequence 1 to model 'stub' {START_MISSING}"),
        (
            {"rows": 2, "start": True},
            400,
            "inference request to model 'stub' must specify batch-size 1 due to requirements of sequence batcher",
        ),
        (
            {"sequence_id": 0, "start": True},
            400,
            "inference request to model 'stub' must specify a non-zero or non-empty correlation ID",
        ),
        (
            {"sequence_id": "", "start": True},
            400,
            "inference request to model 'stub' must specify a non-zero or non-empty correlation ID",
        ),
        (
            {"sequence_id": 0, "step": 1},
            400,
            "parameter 'qinfer_step' numbers the requests of a sequence: send 'sequence_id' with it",
        ),
        (
            {"step": 0, "start": True},
            400,
            "parameter 'qinfer_step' is '0'; number the requests of a sequence 1, 2, …",
        ),
        (
            {"step": "1", "start": True},
            400,
            "parameter 'qinfer_step' is '1'; number the requests of a sequence 1, 2, …",
        ),
        ({"step": 2, "start": True}, 400, "step 2 of sequence 1 to model 'stub' leaves a gap: send step 1 first"),
    ],
)
async def test_requests_that_are_no_step(sums: SequencesServed, flags: dict[str, Any], status: int, text: str) -> None:
    assert refused(await sums.post(1, **flags)) == (status, text)
    assert await sums.open() == 0


async def test_a_step_that_is_sent_again_gets_its_response_again(served: SequencesServed) -> None:
    """With the id of the new request; also the first and the last of a sequence."""
    answers = []
    for number in (1, 2, 3):
        for attempt in "ab":
            flags = {"start": number == 1, "end": number == 3, "step": number}
            reply = await served.post(number, id=f"{number}{attempt}", **flags)
            answers.append((reply.json()["id"], sum_of(reply)))

    assert answers == [("1a", 1), ("1b", 1), ("2a", 3), ("2b", 3), ("3a", 6), ("3b", 6)]


async def test_a_number_that_leaves_a_gap_or_is_long_past(sums: SequencesServed) -> None:
    """Neither ends the sequence."""
    for number in (1, 2, 3):
        await sums.post(number, start=number == 1, step=number)
    gap = await sums.post(9, step=5)
    past = await sums.post(1, step=2)

    assert refused(gap) == (400, "step 5 of sequence 1 to model 'stub' leaves a gap: send step 4 first")
    assert refused(past) == (
        400,
        "the response to step 2 of sequence 1 to model 'stub' is no longer kept: step 3 is committed",
    )
    assert sum_of(await sums.post(4, step=4)) == 10


async def test_a_start_of_a_running_sequence_begins_another(sums: SequencesServed) -> None:
    assert sum_of(await sums.post(1, start=True)) == 1

    assert sum_of(await sums.post(10, start=True)) == 10
    assert sum_of(await sums.post(1, end=True)) == 11


@pytest.mark.parametrize("step", [0, 2])
async def test_a_caller_that_leaves(served: SequencesServed, step: int) -> None:
    """A step without a number ends its sequence, and the next one is told why; one with a number may be sent again."""
    numbered = {"step": 1} if step else {}
    assert sum_of(await served.post(1, start=True, **numbered)) == 1
    served.scene.hold()
    left = asyncio.create_task(served.post(2, **({"step": 2} if step else {})))
    await served.scene.started()
    await served.submitted(1)

    left.cancel()
    await asyncio.wait([left])
    await eventually(lambda: served.gateway.dispatcher.in_flight == 0, description="the end of the request")
    if not step:
        await served.ended()
    served.scene.go()
    again = await served.post(2, **({"step": 2} if step else {}))

    if step:
        assert sum_of(again) == 3
    else:
        text = "sequence 1 of model 'stub' was ended at step 2: the request was cancelled; "
        assert refused(again) == (400, text + "begin it again with the START flag")
    assert sum_of(await served.post(5, start=True)) == 5


async def test_a_deadline_that_passes_ends_the_sequence() -> None:
    """Though the step executes: its state would not be what its caller thinks. What comes behind it is told so."""
    text = "sequence 1 of model 'stub' was ended at step 2: Request timeout expired; begin it again with the START flag"
    async with sequences_served(limits={"default_timeout_s": 1.0}) as sums:
        await sums.start()
        assert sum_of(await sums.post(1, start=True)) == 1
        sums.scene.hold()
        late = await sums.post(2)
        await sums.ended()
        behind = await sums.post(3)
        sums.scene.go()

        assert refused(late) == (503, "Request timeout expired")
        assert refused(behind) == (400, text)
        assert sum_of(await sums.post(5, start=True)) == 5


async def test_more_sequences_than_may_be_open() -> None:
    async with sequences_served(limits={"max_sequences": 2}) as sums:
        await sums.start()
        for number in (1, 2):
            assert sum_of(await sums.post(1, number, start=True)) == 1
        third = await sums.post(1, 3, start=True)
        assert sum_of(await sums.post(1, 1, end=True)) == 2

        assert (third.status_code, third.json()["error"].partition("] ")[2]) == (503, FULL)
        assert int(third.headers["retry-after"]) >= 1
        assert sum_of(await sums.post(1, 3, start=True)) == 1


async def test_more_steps_than_may_wait() -> None:
    """Those that were taken are executed."""
    async with sequences_served(limits={"max_sequence_steps": 3}) as sums:
        await sums.start()
        sums.scene.hold()
        taken = []
        for number in (1, 2, 3):
            taken.append(asyncio.create_task(sums.post(number, start=number == 1)))
            await sums.submitted(number)
        fourth = await sums.post(4)
        sums.scene.go()

        assert (fourth.status_code, fourth.json()["error"].partition("] ")[2]) == (503, FULL)
        assert int(fourth.headers["retry-after"]) >= 1
        assert [sum_of(reply) for reply in await asyncio.gather(*taken)] == [1, 3, 6]


@pytest.mark.parametrize("width", [1000, 300_000])
async def test_large_tensors(width: int) -> None:
    """Inputs beside the request, and outputs beside the reply stream; small steps come between, and all in order."""
    async with sequences_served(dims=-1) as sums:
        await sums.start()
        sums.scene.hold()
        sent = []
        for number, size in ((1, 1), (2, width), (3, width), (4, width)):
            sent.append(asyncio.create_task(sums.post(number, start=number == 1, end=number == 4, width=size)))
            await sums.submitted(number)
        sums.scene.go()
        replies = [(await reply).json()["outputs"][0] for reply in sent]

        assert [(len(output["data"]), output["data"][-1]) for output in replies] == [
            (1, 1),
            (width, 3),
            (width, 6),
            (width, 10),
        ]


async def test_a_large_response_is_given_again() -> None:
    """Of a step that is sent again."""
    async with sequences_served(dims=-1) as sums:
        await sums.start()
        sizes = [
            len((await sums.post(1, start=True, width=300_000, step=1)).json()["outputs"][0]["data"]) for _ in "ab"
        ]

    assert sizes == [300_000, 300_000]


async def test_the_timeout_of_a_request_is_its_sequences_in_the_backlog() -> None:
    """All of its steps fail as one does, also those that have none of their own."""
    async with sequences_served(strategy=ONE) as sums:
        await sums.start()
        assert sum_of(await sums.post(1, start=True)) == 1
        first = asyncio.create_task(sums.post(1, 2, start=True))
        await sums.submitted(1)
        replies = [await sums.post(2, 2, timeout=100_000), await first]

        assert [refused(reply) for reply in replies] == [(503, BACKLOG_TIMED_OUT)] * 2
        assert sum_of(await sums.post(2, end=True)) == 3
        assert sum_of(await sums.post(5, 2, start=True)) == 5


async def test_a_timeout_does_not_count_once_the_sequence_has_a_slot() -> None:
    async with sequences_served(strategy=ONE) as sums:
        await sums.start()
        assert sum_of(await sums.post(1, start=True, timeout=1)) == 1
        sums.scene.hold()
        executing = asyncio.create_task(sums.post(2))
        await sums.scene.started()
        waiting = asyncio.create_task(sums.post(3, timeout=1))
        await sums.submitted(2)
        pending = list(sums.gateway.dispatcher.submission.pending.by_id.values())[1]
        await eventually(lambda: pending.late is not None, description="the end of the timeout")
        sums.scene.go()

        assert [sum_of(await reply) for reply in (executing, waiting)] == [3, 6]


async def test_steps_that_wait_are_pending_at_once() -> None:
    """In a slot, and in the backlog; heartbeats of the worker are too rare to tell."""
    async with sequences_served(strategy=ONE) as sums:
        await sums.start(heartbeat_every_s=30.0, heartbeat_ttl_s=90.0)
        sums.scene.hold()
        sent = [asyncio.create_task(sums.post(1, start=True))]
        await sums.scene.started()
        for correlation_id in (1, 2):
            sent.append(asyncio.create_task(sums.post(2, correlation_id, start=correlation_id == 2)))
            await sums.submitted(len(sent))
        pending = await sums.metric("nv_inference_pending_request_count")
        sums.scene.go()
        await sent[1]
        await sums.post(3, end=True)
        await sent[2]

        assert pending == 2
        assert await sums.metric("nv_inference_pending_request_count") == 0


async def test_a_start_that_waits_for_a_worker_in_vain() -> None:
    """The sequence ends with it: nothing is executed later, and nothing waits."""
    async with sequences_served(limits={"wait_for_workers_s": 0.3}) as sums:
        await sums.gateway.catalog.refresh()
        lost = await sums.post(1, start=True)
        await sums.ended()

        async def is_clean() -> bool:
            return not await left(sums)

        await eventually(is_clean, description="nothing left in Redis")
        await sums.start()

        assert refused(lost) == (
            503,
            "no worker took the request for 'stub' version 1 within 0.3 s; try again when one has loaded it",
        )
        assert int(lost.headers["retry-after"]) >= 1
        assert await sums.sum(1, 2) == [1, 3]


async def left(sums: SequencesServed) -> list[bytes]:
    """Returns the keys of sequences that stay for longer than the five minutes for which their end is known."""
    client = sums.scene.store.client
    found = [key async for key in client.scan_iter(keys.prefix("stub", 0) + "*") if b"seq" in key or b"steps" in key]
    empty = [key for key in found if await client.type(key) == b"stream" and not await client.xlen(key)]
    return [key for key in found if key not in empty and not 0 < await client.pttl(key) <= 300_000]


async def test_a_start_that_waits_for_a_worker_is_executed_when_it_comes() -> None:
    async with sequences_served() as sums:
        await sums.gateway.catalog.refresh()
        first = asyncio.create_task(sums.post(1, start=True))
        await sums.submitted(1)
        await sums.start()

        assert sum_of(await first) == 1


async def test_a_model_calls_a_stateful_one(sums: SequencesServed) -> None:
    """Its own request names no sequence, and a call of the stub backend passes none on: it is told so."""
    await sums.scene.model("front", mode="call:stub")
    await sums.scene.ready()
    await sums.gateway.catalog.refresh()

    status, text = refused(await sums.post(1, model="front"))

    assert status == 500
    assert "must specify a non-zero or non-empty correlation ID" in text


async def test_steps_are_counted(sums: SequencesServed) -> None:
    """Each is an inference and a success; those that were refused are none."""
    await sums.sum(1, 2, 3)
    await sums.post(1, 8)

    async def are_counted() -> bool:
        (of,) = (await sums.client.get("/v2/models/stub/stats")).json()["model_stats"]
        return (of["inference_count"], of["inference_stats"]["success"]["count"]) == (3, 3)

    await eventually(are_counted, description="three steps in the statistics")


@pytest.mark.parametrize("of", [1, 0])
async def test_stored_requests_are_refused(sums: SequencesServed, of: int) -> None:
    """Whether they name a sequence or not."""
    reply = await sums.client.post("/v1/models/stub/requests", json=body_of(1, of, start=True))

    assert reply.status_code == 400
    assert "keeps state from request to request" in reply.text
