"""The rules of the rate limiter, one by one; the properties of all of them are in `tests/property`."""

import pytest

from qinfer.batching.rate_limiter import (
    GLOBAL,
    Ledger,
    LimitedInstance,
    Needs,
    Resource,
    check_maxima,
    maxima_of,
    needs_of,
)
from qinfer.core.messages import ResourceHolder
from qinfer.core.settings_sections import Maximum, maximum_of
from qinfer.models.spec import Device, InstanceSpec, ResourceSpec

R, S = Resource("r", 0), Resource("s", 0)
G = Resource("g", GLOBAL)


def instance(name: str, needs: Needs, priority: int = 1) -> LimitedInstance:
    return LimitedInstance(name, needs, priority, lambda _: None)


def ledger(*instances: LimitedInstance, pool: dict[str, int] | None = None, given: tuple[Maximum, ...] = ()) -> Ledger:
    one = Ledger(given, "w1")
    one.add(instances)
    one.pool = pool or {}
    return one


def holder(one: LimitedInstance) -> ResourceHolder:
    assert one.grant is not None
    return one.grant.holder


# --- how much there is ---


def test_the_needs_of_an_instance_are_of_its_device() -> None:
    """As in Triton, the CPU is device 0; what needs no unit of a resource does not need it."""
    named = (ResourceSpec("r", 2), ResourceSpec("g", 1, True), ResourceSpec("none", 0))

    assert needs_of(InstanceSpec(resources=named)) == {R: 2, G: 1}
    assert needs_of(InstanceSpec(device=Device("gpu", 3), resources=named)) == {Resource("r", 3): 2, G: 1}


def test_there_is_as_much_as_the_largest_need() -> None:
    """The example of Triton's documentation."""
    a = {Resource("R1", 0): 4, Resource("R2", 0): 4}
    b = {Resource("R2", 0): 5, Resource("R3", 0): 10, Resource("R4", 0): 5}
    c = {Resource("R1", 0): 1, Resource("R3", 0): 7, Resource("R4", 0): 2}

    assert {r.name: count for r, count in maxima_of([a, b, c], ()).items()} == {"R1": 4, "R2": 5, "R3": 10, "R4": 5}


def test_there_is_as_much_as_was_given() -> None:
    """The other example: for each device, for one, and for a global resource whatever device is named."""
    given = tuple(map(maximum_of, ("R1:10", "R2:5:0", "R2:8:1", "R3:2:7")))
    needs = [{Resource(name, device): 1 for name in ("R1", "R2")} for device in (0, 1)]

    assert maxima_of([*needs, {Resource("R3", GLOBAL): 1}], given) == {
        Resource("R1", 0): 10,
        Resource("R2", 0): 5,
        Resource("R1", 1): 10,
        Resource("R2", 1): 8,
        Resource("R3", GLOBAL): 2,
    }


@pytest.mark.parametrize(
    ("needs", "given", "text"),
    [
        (
            [{R: 3}],
            (Maximum("r", 2),),
            'Resource count for "r" is limited to 2 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 3",
        ),
        (
            [{R: 1}],
            (Maximum("other", 2),),
            'Resource count for "r" is limited to 0 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 1",
        ),
        (
            [{R: 1}, {Resource("r", GLOBAL): 1}],
            (),
            'Resource "r" is present as both global and device-specific resource in the model configuration.',
        ),
    ],
)
def test_what_can_never_execute_is_refused(needs: list[Needs], given: tuple[Maximum, ...], text: str) -> None:
    """With Triton's words."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  its whole text is compared
        check_maxima(needs, given)

    assert str(caught.value) == text


@pytest.mark.parametrize("text", ["r", "r:", ":1", "r:1:2:3", "r:-1", "r:x", "r:1:", "r:1.5", "r:99999999999"])
def test_other_texts_are_no_resource(text: str) -> None:
    with pytest.raises(ValueError, match="--rate-limit-resource option format is '<resource_name>:<count>:<device>'"):
        maximum_of(text)


# --- who goes first ---


def test_an_execution_needs_all_its_resources_at_once() -> None:
    one, other, both = instance("one", {R: 1}), instance("other", {S: 1}), instance("both", {R: 1, S: 1})
    mine = ledger(one, other, both)
    for waiting in (one, both, other):
        mine.wait(waiting)

    assert mine.decide() == [one]
    mine.release_grant(one)
    assert mine.decide() == [both]
    mine.release_grant(both)
    assert mine.decide() == [other]


@pytest.mark.parametrize(("priority", "expected"), [(0, 15), (1, 15), (2, 10), (3, 8)])
def test_executions_follow_the_priorities(priority: int, expected: int) -> None:
    """Of 30 executions; a priority of 0 counts as 1, and a larger one executes more rarely."""
    usual, rare = instance("usual", {R: 1}), instance("rare", {R: 1}, priority)
    mine = ledger(usual, rare)
    for _ in range(30):
        mine.wait(usual)
        mine.wait(rare)
        (granted,) = mine.decide()
        mine.release_grant(granted)

    assert rare.executions == expected


def test_a_grant_that_was_not_used_does_not_count() -> None:
    one = instance("one", {R: 1})
    mine = ledger(one)
    mine.wait(one)
    mine.decide()

    mine.release_grant(one, has_executed=False)

    assert one.executions == 0


def test_a_model_that_is_loaded_late_has_its_turns_and_no_more() -> None:
    old, new = instance("old", {R: 1}), instance("new", {R: 1}, 2)
    mine = ledger(old)
    old.executions = 1000
    mine.add([new])

    assert (new.executions, new.score) == (500, 1000)


# --- callers and callees ---


def test_a_callee_uses_its_callers_units_one_after_the_other() -> None:
    """And they stay the caller's: nobody else gets them before it ends."""
    caller, first, second, other = (instance(name, {R: 1}) for name in ("caller", "first", "second", "other"))
    mine = ledger(caller, first, second, other)
    for one in (caller, other):
        mine.wait(one)
    assert mine.decide() == [caller]

    mine.wait(first, (holder(caller),))
    mine.wait(second, (holder(caller),))

    assert mine.decide() == [first]
    mine.release_grant(first)
    assert mine.decide() == [second]
    mine.release_grant(second)
    assert mine.decide() == []
    mine.release_grant(caller)
    assert mine.decide() == [other]


def test_units_come_back_when_the_last_user_of_a_callers_units_ends() -> None:
    """A caller may end before its callee, at its deadline."""
    caller, between, callee, other = (instance(name, {R: 1}) for name in ("caller", "between", "callee", "other"))
    mine = ledger(caller, between, callee, other)
    mine.wait(caller)
    mine.decide()
    mine.wait(between, (holder(caller),))
    mine.decide()
    mine.wait(callee, (holder(caller), holder(between)))
    assert mine.decide() == [callee]
    mine.wait(other)

    mine.release_grant(between)
    assert mine.decide() == []
    mine.release_grant(caller)
    assert mine.decide() == []
    mine.release_grant(callee)
    assert mine.decide() == [other]


def test_a_callee_goes_before_those_that_wait_longer() -> None:
    """Else it would wait for one that waits for its caller: `big` needs what both need."""
    caller, callee, big = instance("caller", {R: 1}), instance("callee", {S: 1}), instance("big", {R: 1, S: 1})
    mine = ledger(caller, callee, big)
    mine.wait(caller)
    mine.decide()
    mine.wait(big)

    mine.wait(callee, (holder(caller),))

    assert mine.decide() == [callee]


def test_a_callee_that_needs_more_than_its_caller_holds_is_refused() -> None:
    caller, callee = instance("caller", {R: 1}), instance("callee", {R: 2})
    mine = ledger(caller, callee)
    mine.wait(caller)
    mine.decide()
    held = holder(caller)

    assert mine.refusal("callee", [callee.needs], [held]) == (
        "model 'callee' needs 2 of resource 'r', of which its caller, model 'caller', holds 1: it would wait for its "
        "caller; let the caller hold as many, or none"
    )
    assert mine.refusal("callee", [{R: 1}, {S: 9}], [held]) == ""
    mine.release_grant(caller)
    assert mine.refusal("callee", [callee.needs], [held]) == ""


def test_a_call_that_can_not_use_what_its_caller_holds_is_in_conflict() -> None:
    """Elsewhere units of devices are others, and global ones are the same."""
    caller = instance("caller", {R: 1, G: 1})
    mine = ledger(caller, pool={"g": 1})
    mine.wait(caller)
    mine.decide()
    held = holder(caller)

    assert mine.holds([held])
    assert mine.conflict("callee", [{R: 1}], [held]) == ""
    assert mine.conflict("callee", [{G: 1}], [held]).startswith(
        "model 'callee' needs resource 'g', which its caller, model 'caller', holds: "
    )
    mine.add([instance("callee", {R: 1})])
    assert mine.conflict("callee", [{R: 1}], [held])
    mine.release_grant(caller)
    assert not mine.holds([held])
    assert mine.conflict("callee", [{R: 1}], [held]) == ""


def test_a_caller_of_another_worker_lends_its_global_units() -> None:
    """Those of its devices are others than this worker's."""
    callee, second = instance("callee", {G: 2, R: 1}), instance("second", {G: 2})
    mine = ledger(callee, second, pool={})
    held = ResourceHolder("w2/7", "caller", {"g": 2})

    mine.wait(callee, (held,))
    mine.wait(second, (held,))

    assert mine.missing() == []
    assert mine.decide() == [callee]
    assert holder(callee).units == {"g": 2}
    mine.release_grant(callee)
    assert mine.decide() == [second]
    mine.release_grant(second)
    assert mine.refusal("callee", [{G: 3}], [held])


# --- global units ---


def test_what_is_missing_is_told_in_order() -> None:
    one, other, busy = instance("one", {G: 1}), instance("other", {G: 2, R: 1}), instance("busy", {G: 1, S: 1})
    holding = instance("holding", {S: 1})
    mine = ledger(one, other, busy, holding)
    for waiting in (holding, other, one, busy):
        mine.wait(waiting)

    assert mine.decide() == [holding]

    # `busy` could not execute with them.
    assert mine.missing() == [({"g": 2}, False), ({"g": 1}, False)]
    mine.pool = {"g": 2}
    assert mine.decide() == [other]
    assert mine.missing() == []
    assert mine.idle("g") == 0


def test_units_that_were_lost_are_granted_to_nobody() -> None:
    one, other = instance("one", {G: 1}), instance("other", {G: 1})
    mine = ledger(one, other, pool={"g": 1})
    mine.wait(one)
    mine.decide()

    mine.pool = {}

    mine.wait(other)
    assert mine.decide() == []
    mine.release_grant(one)
    assert mine.decide() == []
    assert mine.missing() == [({"g": 1}, False)]
