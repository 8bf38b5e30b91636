"""Requests whose callers hold instances of their model: how many may begin, and which execution gives way."""

from qinfer.backends.base import Batch
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.nested import NestedRequests
from qinfer.core.messages import InferRequest, ResourceHolder
from qinfer.queue.entries import Entry, Lane, Lease


def request(*callers: Execution, model: str = "stub") -> WorkItem:
    """Returns a request that executions wait for."""
    holders = tuple(
        ResourceHolder(caller.batch_id, model, {}, 1, depth) for depth, caller in enumerate(callers, start=1)
    )
    made = InferRequest(model="stub", version=1, inputs=(), id="r", holders=holders)
    lease = Lease(Entry(Lane("stub", 1), "1-0"), "w", b"")
    return WorkItem(rows=1, key=None, enqueued_s=0.0, deadline_s=100.0, lease=lease, request=made)


def execution(item: WorkItem, begin_ns: int = 1) -> Execution:
    return Execution([item], Batch(requests=[item.request], rows=[1], inputs={}), 0, begin_ns=begin_ns)


def test_calls_of_other_models_are_not_nested() -> None:
    nested, caller = NestedRequests(), execution(request())

    items = [request(), request(caller, model="other")]

    assert nested.split_off(items) == items
    assert nested.depth == 1


def test_instances_are_kept_for_calls_as_deep_as_any_that_came() -> None:
    nested, first = NestedRequests(), execution(request())
    second = execution(request(first))
    assert nested.count_free(0, [], 4) == 4

    nested.split_off([request(first, second)])

    assert nested.depth == 3
    assert [nested.count_free(level, [], 4) for level in (0, 1, 2)] == [2, 3, 4]
    assert [nested.count_free(level, [first], 4) for level in (0, 1, 2)] == [1, 2, 3]
    assert [nested.count_free(level, [second], 4) for level in (0, 1, 2)] == [2, 2, 3]


def test_a_worker_with_too_few_instances_still_executes() -> None:
    nested, first = NestedRequests(), execution(request())
    nested.split_off([request(first, execution(request(first)))])

    assert nested.count_free(0, [], 1) == 1
    assert nested.count_free(0, [], 2) == 1


def test_the_deepest_goes_first() -> None:
    nested, first = NestedRequests(), execution(request())
    shallow, deep = request(first), request(first, execution(request(first)))
    nested.split_off([shallow])
    nested.split_off([deep])

    assert nested.next([], 3) is deep
    assert nested.next([], 3) is shallow
    assert nested.next([], 3) is None


def test_one_gives_way_where_all_wait() -> None:
    """The one that is the least deep and began last."""
    nested = NestedRequests()
    first, last = execution(request(), 1), execution(request(), 2)
    inner = execution(request(first), 3)
    waits = request(last)
    nested.split_off([request(first, inner), waits])

    assert nested.victim([first, inner, last]) is last
    assert nested.waiting_for(last) == [waits]
    assert nested.victim([first, inner, last]) is None  # it has no calls any more, and ends


def test_none_gives_way_while_one_may_end_by_itself() -> None:
    nested, first, other = NestedRequests(), execution(request()), execution(request())
    nested.split_off([request(first)])

    assert nested.victim([first, other]) is None


def test_an_execution_that_has_made_no_call_does_not_wait() -> None:
    """An ensemble that a model calls holds no instance, and its token is empty, as that of such an execution."""
    nested, caller, plain = NestedRequests(), execution(request()), execution(request())
    waits = request(caller)
    waits.request.holders += (ResourceHolder("", "ensemble", {}, 1, 2),)
    nested.split_off([waits])

    assert nested.victim([caller, plain]) is None
    assert nested.waiting_for(plain) == []


def test_an_execution_that_has_ended_does_not_give_way() -> None:
    """Its instance is free once the loop hears of it."""
    nested, caller = NestedRequests(), execution(request())
    nested.split_off([request(caller)])
    caller.end_ns = 2

    assert nested.victim([caller]) is None


def test_late_requests_are_removed() -> None:
    nested, first = NestedRequests(), execution(request())
    item = request(first)
    nested.split_off([item])

    assert nested.late(99.0) == []
    assert nested.late(100.0) == [item]
    assert nested.waiting == []
