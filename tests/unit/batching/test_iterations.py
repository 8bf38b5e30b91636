"""The batcher of iterative models: requests that execute again and again, and what becomes of them meanwhile."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from qinfer.backends.base import Batch, Context, MemoryLost
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.sequences.iterations import IterativeBatcher
from qinfer.core import messages
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import SequenceLost
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, OldestSpec, SequenceSpec, StateSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.testing import FakeClock, stub_spec
from tests.support.batching import Done, ends_at_once

STATE = StateSpec(input="s", output="t", datatype="FP32", dims=(-1,), initial_dims=(1,))
START = ControlSpec(name="start", kind=ControlKind.START, datatype="FP32", true=1)
DIRECT = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, controls=(START,), iterative=True)
OLDEST = replace(DIRECT, strategy=OldestSpec(preferred_sizes=(2,)), slots=1000, max_rows=2)
KEPT = replace(DIRECT, states=(STATE,))


class Countdown:
    """Executes each request as often as its `x` says, and answers with how often it was.

    Attributes:
        batches: Of each execution the ids of its requests, and which of them are at their start.
        error: Raised, where it is set.
    """

    short_on_loop = True

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], list[float]]] = []
        self.flags: list[list[messages.SequenceFlags | None]] = []
        self.error: Exception | None = None
        self._done: dict[str, float] = {}

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        self.batches.append(([request.id for request in batch.requests], batch.inputs["start"].ravel().tolist()))
        self.flags.append([request.sequence for request in batch.requests])
        if self.error is not None:
            raise self.error
        for item, request in enumerate(batch.requests):
            if not request.inputs:
                continue
            wanted = float(batch.inputs["x"][item, 0])
            states: tuple[Tensor, ...] = ()
            if batch.states:
                done = float(batch.inputs["s"][item, 0]) + 1
                # The state becomes longer with each iteration.
                states = (from_numpy("t", np.full((1, int(done)), done, "<f4")),)
            else:
                done = (0 if batch.inputs["start"][item] else self._done[request.id]) + 1
                self._done[request.id] = done
            if done < wanted:
                ctx.reschedule(item, states)
            else:
                ctx.respond(item, (from_numpy("y", np.full((1, 1), done, "<f4")), *states))


class Bench:
    """An executor whose executions end when they are told to, and an outlet that remembers."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.model = Countdown()
        self.running: list[tuple[Execution, Done, int]] = []
        self.retired = False

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """See `Executor`."""
        del execution, expected_s, instance
        raise AssertionError("what is iterated leaves the event loop alone")

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        """See `Executor`."""
        assert not self.retired
        self.running.append((execution, done, instance))

    def recall(self) -> list[Execution]:
        """See `Executor`."""
        return []

    def retire(self) -> None:
        """See `Executor`."""
        self.retired = True

    def end(self, times: int = 1) -> None:
        """Ends all executions that run now, so many times."""
        for _ in range(times):
            running, self.running = self.running, []
            for execution, done, _ in running:
                execution.run(self.model)  # type: ignore[arg-type]  # a backend that only executes
                done(execution)


class Scene:
    """A batcher on a bench, and the outlet of its answers."""

    def __init__(self, sequences: SequenceSpec = DIRECT, instances: int = 1) -> None:
        self.sequences = sequences
        self.bench = Bench(instances)
        self.time = FakeClock()
        self.clock = ServerClock(self.time)
        self.answered: list[Response] = []
        self.given_back: list[str] = []
        self.batcher = IterativeBatcher(self.model(self.bench), self.clock, self)

    def model(self, bench: Bench, generation: int = 1) -> LoadedModel:
        """Returns the model on a bench."""
        spec = stub_spec()
        spec = replace(
            spec,
            max_batch_size=4,
            inputs=(replace(spec.inputs[0], dims=(1,)),),
            outputs=(replace(spec.outputs[0], dims=(1,)),),
            batching=None,
            sequences=self.sequences,
        )
        states = tuple(state.initial(None, batched=True) for state in self.sequences.states)
        return LoadedModel(spec=spec, version=1, generation=generation, executor=bench, initial_states=states)

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        """See `Outlet`."""
        del items
        self.answered += responses

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        self.given_back += [item.request.id for item in items]

    def delay(self, items: Sequence[WorkItem]) -> None:
        """See `Outlet`."""
        raise AssertionError("there are no queue policies")

    def item(self, name: str, times: int, *, left_s: float = 60.0, alone: bool = False) -> WorkItem:
        """Makes a request that is to be executed so many times."""
        now_s = self.clock.now_s()
        item = WorkItem(
            rows=1,
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + left_s,
            alone=alone,
            lease=Lease(Entry(Lane("stub", 1), f"{name}-0"), "w", b"", 1),
            request=InferRequest(model="stub", id=name, inputs=(from_numpy("x", np.full((1, 1), times, "<f4")),)),
        )
        self.batcher.classify(item)
        return item

    def send(self, name: str, times: int, *, left_s: float = 60.0, alone: bool = False) -> WorkItem:
        """Admits such a request."""
        item = self.item(name, times, left_s=left_s, alone=alone)
        self.batcher.add_items([item])
        return item

    @property
    def can_fetch(self) -> bool:
        """Whether more are welcome."""
        return ends_at_once(self.batcher.fetchable())

    @property
    def values(self) -> dict[str, object]:
        """Request id → how often it was executed, or the code of its failure, in the order of the answers."""
        return {
            response.request_id: to_numpy(response.outputs[0]).item()
            if response.failure is None
            else response.failure.code
            for response in self.answered
        }


@pytest.mark.parametrize("sequences", [DIRECT, OLDEST, KEPT])
async def test_a_request_that_comes_later_may_leave_before(sequences: SequenceSpec) -> None:
    scene = Scene(sequences)
    scene.send("long", 4)
    scene.bench.end()
    scene.send("short", 1)
    while scene.bench.running:
        scene.bench.end()

    assert list(scene.values.items()) == [("short", 1), ("long", 4)]
    # Where states have different shapes they do not share a batch.
    together = [ids for ids, _ in scene.bench.model.batches if len(ids) == 2 and all(ids)]
    assert bool(together) is not bool(sequences.states)


async def test_start_holds_in_the_first_iteration() -> None:
    scene = Scene()
    scene.send("a", 3)
    scene.bench.end(3)

    assert [starts for _, starts in scene.bench.model.batches] == [[1], [0], [0]]
    flags = [flags[0] for flags in scene.bench.model.flags]
    assert flags[0] is not None
    number = flags[0].id
    assert flags == [
        messages.SequenceFlags(number, start=True),
        messages.SequenceFlags(number),
        messages.SequenceFlags(number),
    ]


async def test_a_correlation_id_of_the_caller_is_kept() -> None:
    scene = Scene()
    item = scene.item("a", 1)
    item.request.sequence = messages.SequenceFlags("mine", end=True)
    scene.batcher.add_items([item])
    scene.bench.end()

    assert scene.bench.model.flags == [[messages.SequenceFlags("mine", start=True)]]


async def test_ids_of_requests_that_iterate_together_are_never_equal() -> None:
    """Whether they name one or get a number: the model may keep their state by it."""
    scene = Scene()
    items = [scene.item(name, 2) for name in "abcd"]
    items[1].request.sequence = messages.SequenceFlags(7)
    items[1].request.tenant = "acme"
    scene.batcher.add_items(items[:2])
    number = items[0].request.sequence
    assert number is not None
    for item, tenant, named in zip(items[2:], ("acme", "evil"), (number.id, 7), strict=True):
        item.request.sequence, item.request.tenant = messages.SequenceFlags(named), tenant

    scene.batcher.add_items(items[2:])

    ids = [item.request.sequence.id for item in items if item.request.sequence is not None]
    assert (len(set(ids)), ids[1]) == (4, 7)
    assert [item.request.sequence.callers_id for item in items[1:] if item.request.sequence] == [7, number.id, 7]


async def test_each_iteration_is_an_execution_and_the_request_counts_once() -> None:
    scene = Scene()
    scene.send("a", 3)
    scene.send("b", 1)
    scene.bench.end(3)

    counts = scene.batcher.tally.drain()
    assert (counts["execution_count"], counts["success_count"]) == (3, 2)
    # `b` came while the first iteration of `a` was under way.
    assert counts["inference_count"] == 4
    assert (scene.batcher.completed, scene.batcher.executing, scene.batcher.has_work) == (2, 0, False)


async def test_no_more_are_fetched_than_execute_at_once() -> None:
    scene = Scene(OLDEST)
    assert scene.batcher.plan_fetch() == (2, float("inf"))
    scene.send("a", 2)
    assert (scene.can_fetch, scene.batcher.plan_fetch()[0]) == (True, 1)
    scene.send("b", 1)
    assert not scene.can_fetch
    scene.bench.end(2)

    assert (scene.can_fetch, scene.batcher.plan_fetch()[0]) == (True, 2)


async def test_a_suspect_runs_alone() -> None:
    scene = Scene()
    scene.send("suspect", 2, alone=True)
    scene.send("a", 1)
    scene.send("b", 1)
    while scene.bench.running:
        scene.bench.end()

    batches = [[name for name in ids if name] for ids, _ in scene.bench.model.batches]
    assert [ids for ids in batches if "suspect" in ids] == [["suspect"], ["suspect"]]
    assert scene.values == {"suspect": 2, "a": 1, "b": 1}


async def test_what_is_lost_ends_between_two_iterations() -> None:
    scene = Scene()
    running, other = scene.item("running", 9), scene.item("other", 2)
    scene.batcher.add_items([running, other])
    scene.bench.end()
    scene.batcher.lost(running)
    assert scene.bench.running[0][0].cancelled(0)
    scene.bench.end()

    assert (running.lost, scene.values) == (True, {"other": 2})
    assert (scene.bench.running, scene.batcher.has_work) == ([], False)


async def test_what_is_lost_before_it_begins_is_not_executed() -> None:
    scene = Scene()
    scene.send("first", 1)
    scene.batcher.lost(scene.send("second", 1))
    scene.bench.end(2)

    assert scene.values == {"first": 1}
    assert len(scene.bench.model.batches) == 1


async def test_a_request_expires_between_two_iterations() -> None:
    scene = Scene()
    scene.send("a", 9, left_s=1.0)
    scene.bench.end(2)
    scene.time.advance(2.0)
    scene.bench.end()

    assert scene.values == {"a": "deadline_exceeded"}
    assert (scene.bench.running, scene.batcher.has_work) == ([], False)


async def test_an_exception_fails_the_requests_of_its_batch_only() -> None:
    scene = Scene(OLDEST)
    scene.batcher.add_items([scene.item(name, 2) for name in ("a", "b", "c")])
    scene.bench.model.error = ValueError("no")
    scene.bench.end()
    scene.bench.model.error = None
    scene.bench.end(2)

    assert scene.values == {"a": "inference_failed", "b": "inference_failed", "c": 2}


async def test_requests_that_did_not_end_the_process_begin_anew() -> None:
    scene = Scene(OLDEST)
    scene.batcher.add_items([scene.item(name, 3) for name in ("a", "b", "c")])
    scene.bench.end(2)  # a and b, then c and a
    scene.bench.model.error = SequenceLost("the process died")
    begun = scene.bench.running[0][0].items
    scene.bench.end()
    scene.bench.model.error = None
    while scene.bench.running:
        scene.bench.end()

    died = {item.request.id for item in begun}
    assert len(died) == 2
    assert scene.values == {name: "inference_failed" if name in died else 3 for name in "abc"}


async def test_a_request_that_begins_outlives_a_process_that_died_before_its_batch() -> None:
    scene = Scene(OLDEST)
    scene.send("begun", 3)
    scene.bench.end()
    scene.send("new", 2)
    scene.bench.model.error = MemoryLost("the process died")
    scene.bench.end(2)  # the second iteration of the one, and the first of the other
    scene.bench.model.error = None
    while scene.bench.running:
        scene.bench.end()

    assert scene.values == {"begun": "inference_failed", "new": 2}
    assert scene.bench.model.batches[-2:] == [(["new"], [1.0]), (["new"], [0.0])]


async def test_a_pause_gives_back_what_has_not_begun_and_ends_the_rest() -> None:
    scene = Scene()
    scene.send("begun", 3)
    scene.send("waits", 1)
    assert not ends_at_once(scene.batcher.pause_batching())
    assert scene.given_back == ["waits"]
    assert (scene.can_fetch, scene.batcher.executing) == (False, 1)
    scene.bench.end(3)

    assert ends_at_once(scene.batcher.idle())
    assert scene.values == {"begun": 3}
    scene.batcher.resume_batching()
    assert scene.can_fetch


async def test_what_is_admitted_in_a_pause_is_executed() -> None:
    """Suspects are."""
    scene = Scene()
    await scene.batcher.pause_batching()
    scene.send("suspect", 2, alone=True)
    assert not ends_at_once(scene.batcher.idle())
    scene.bench.end(2)

    assert ends_at_once(scene.batcher.idle())
    assert (scene.values, scene.can_fetch) == ({"suspect": 2}, False)


async def test_what_has_begun_ends_on_the_old_generation() -> None:
    scene = Scene()
    scene.send("begun", 3)
    scene.send("waits", 1)
    newer = Bench()

    waiting = scene.batcher.replace(scene.model(newer, 2))
    assert [item.request.id for item in waiting] == ["waits"]
    scene.batcher.add_items(waiting)
    assert len(scene.batcher.expected_ends) == 2
    newer.end()
    scene.bench.end(2)
    assert not scene.bench.retired
    scene.bench.end()

    assert scene.values == {"waits": 1, "begun": 3}
    assert (scene.bench.retired, newer.retired) == (True, False)
    assert (scene.batcher.completed, scene.batcher.has_work, scene.batcher.model.generation) == (2, False, 2)


async def test_a_generation_without_requests_is_unloaded_at_once() -> None:
    scene = Scene()

    assert scene.batcher.replace(scene.model(Bench(), 2)) == []

    assert scene.bench.retired


async def test_the_speed_is_that_of_whole_requests() -> None:
    scene = Scene()
    assert scene.batcher.speed_rps() == 0
    for execution in ("a", "b"):
        scene.send(execution, 4)
        scene.bench.end(4)

    generation = scene.batcher._current
    steps_rps = super(type(generation), generation).speed_rps()
    assert scene.batcher.speed_rps() == pytest.approx(steps_rps / 4)
