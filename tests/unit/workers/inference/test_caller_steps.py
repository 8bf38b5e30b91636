"""Steps of ensembles as a worker's caller submits them: those that a batcher gave back, and those of jobs."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.models.catalog import ServedVersion
from qinfer.models.ensemble_graph import PlanStep
from qinfer.queue.entries import Lane
from qinfer.submission.pending import PendingCall
from qinfer.testing import eventually
from qinfer.wire.frame import encode_responses
from qinfer_workers.inference.ensembles.local import LocalSteps
from tests.unit.workers.inference.test_caller import CONFIG, LANE, Scene, asked, echo, scene


async def test_large_outputs_of_what_a_batcher_gave_back_are_read_from_its_lane() -> None:
    """It was to join a batch of this process; from then on it counts as any request in the lane."""
    async with scene() as one:
        answers: asyncio.Queue[Response] = asyncio.Queue()
        taken: list[tuple[OutgoingRequest, Any]] = []

        def try_admit(_: ServedVersion, request: OutgoingRequest, __: int, waiting: PendingCall, **___: object) -> bool:
            taken.append((request, waiting))
            return True

        local = SimpleNamespace(try_admit=try_admit)
        sink: Any = SimpleNamespace(no_stream="", deliver=answers.put_nowait)
        await one.call()

        async def take_result(lane: Lane, request_id: str, tenant: str = "", room: object = None) -> bytes | None:
            return encode_responses(echo(one.requests[-1])) if lane == LANE else None

        one.delivery.take_result = take_result  # type: ignore[method-assign]
        one.publish_responses = lambda request: [Response(request_id=request.id, stored=True)]
        submission = one.caller._submission
        served = one.caller._catalog.resolve("back", 1)
        submission.of(served).submit_near(asked(), sink, 30.0, cast(Any, local))
        ((request, pending),) = taken
        submission.enqueue(pending, request, LANE)
        own = pending.load.own
        answer = await answers.get()

        assert [tensor.name for tensor in answer.outputs] == ["y"]
        assert (own, pending.load.own) == (1, 0)


async def test_steps_of_jobs_pass_the_response_cache_by() -> None:
    """A job asks each row once, and would leave no room for what is asked often."""
    async with scene() as one:
        await one.model("kept", config=f"{CONFIG} response_cache {{ enable: true }}")
        asked_of_cache: list[str] = []

        def cached(_: ServedVersion, request: OutgoingRequest, *__: object) -> PendingCall:
            asked_of_cache.append(request.model)
            return PendingCall(request.id, "", request.model, 1, cast(Any, None), 0.0)

        async def idle() -> None:
            """Has nothing to do."""

        one.caller._submission._cache = cast(Any, SimpleNamespace(submit=cached, run=idle, looks_up=False))
        one.caller.use_local_steps(
            cast(LocalSteps, SimpleNamespace(try_admit=lambda *_, **__: False, called=lambda _: None))
        )
        await one.caller.follow()
        sink: Any = SimpleNamespace(no_stream="", deliver=lambda _: None)
        step = PlanStep(model=one.caller._catalog.asked("kept", 1).spec, version=1, inputs=(), outputs={"y": "y"})

        one.caller.submit_step(step, asked(model="kept"), sink, 30.0)
        before = list(asked_of_cache)
        one.caller.submit_step(step, asked(model="kept"), sink, 30.0, cached=False)

        assert (before, asked_of_cache) == (["kept"], ["kept"])
        await eventually(lambda: waits(one))


async def waits(one: Scene) -> bool:
    return await one.delivery.depth([Lane("kept", 1)]) == [1]


async def test_what_is_given_back_after_its_deadline_goes_nowhere() -> None:
    async with scene(works=False) as one:
        await one.caller.listen()
        pending = PendingCall("late", "", "back", 1, cast(Any, None), 0.0)

        one.caller._submission.enqueue(pending, asked(id="late"), LANE)

        assert await one.is_empty()
