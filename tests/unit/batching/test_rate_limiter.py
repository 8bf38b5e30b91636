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
    return LimitedInstance(name, needs, priority)


def ledger(*instances: LimitedInstance, given: tuple[Maximum, ...] = ()) -> Ledger:
    one = Ledger(given)
    one.add(instances)
    return one


def begun(mine: Ledger) -> list[LimitedInstance]:
    """Begins all that may begin."""
    ready = list(mine.ready())
    for one in ready:
        mine.begin(one, f"{one.model}-{one.executions}")
    assert not mine.ready()
    return ready


def holder(one: LimitedInstance) -> ResourceHolder:
    assert one.token
    return ResourceHolder(one.token, one.model)


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

    assert begun(mine) == [one]
    mine.end(one)
    assert begun(mine) == [both]
    mine.end(both)
    assert begun(mine) == [other]


@pytest.mark.parametrize(("priority", "expected"), [(0, 15), (1, 15), (2, 10), (3, 8)])
def test_executions_follow_the_priorities(priority: int, expected: int) -> None:
    """Of 30 executions; a priority of 0 counts as 1, and a larger one executes more rarely."""
    usual, rare = instance("usual", {R: 1}), instance("rare", {R: 1}, priority)
    mine = ledger(usual, rare)
    for _ in range(30):
        mine.wait(usual)
        mine.wait(rare)
        (granted,) = begun(mine)
        mine.end(granted)

    assert rare.executions == expected


def test_a_grant_that_was_not_used_does_not_count() -> None:
    one = instance("one", {R: 1})
    mine = ledger(one)
    mine.wait(one)
    begun(mine)

    mine.end(one, has_executed=False)

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
    assert begun(mine) == [caller]

    mine.wait(first, (holder(caller),))
    mine.wait(second, (holder(caller),))

    assert begun(mine) == [first]
    mine.end(first)
    assert begun(mine) == [second]
    mine.end(second)
    assert begun(mine) == []
    mine.end(caller)
    assert begun(mine) == [other]


def test_units_come_back_when_the_last_user_of_a_callers_units_ends() -> None:
    """A caller may end before its callee, at its deadline."""
    caller, between, callee, other = (instance(name, {R: 1}) for name in ("caller", "between", "callee", "other"))
    mine = ledger(caller, between, callee, other)
    mine.wait(caller)
    begun(mine)
    mine.wait(between, (holder(caller),))
    begun(mine)
    mine.wait(callee, (holder(caller), holder(between)))
    assert begun(mine) == [callee]
    mine.wait(other)

    mine.end(between)
    assert begun(mine) == []
    mine.end(caller)
    assert begun(mine) == []
    mine.end(callee)
    assert begun(mine) == [other]


def test_a_callee_goes_before_those_that_wait_longer() -> None:
    """Else it would wait for one that waits for its caller: `big` needs what both need."""
    caller, callee, big = instance("caller", {R: 1}), instance("callee", {S: 1}), instance("big", {R: 1, S: 1})
    mine = ledger(caller, callee, big)
    mine.wait(caller)
    begun(mine)
    mine.wait(big)

    mine.wait(callee, (holder(caller),))

    assert begun(mine) == [callee]


def test_a_callee_that_needs_more_than_its_caller_holds_is_refused() -> None:
    caller, callee = instance("caller", {R: 1}), instance("callee", {R: 2})
    mine = ledger(caller, callee)
    mine.wait(caller)
    begun(mine)
    held = holder(caller)

    assert mine.refusal([callee], [held]) == (
        "model 'callee' needs 2 of resource 'r', of which its caller, model 'caller', holds 1: it would wait for its "
        "caller; let the caller hold as many, or none"
    )
    assert mine.refusal([instance("callee", {R: 1}), instance("callee", {S: 9})], [held]) == ""
    mine.end(caller)
    assert mine.refusal([callee], [held]) == ""


def test_a_call_that_can_not_use_its_callers_units_is_in_conflict() -> None:
    caller, callee, other = instance("caller", {R: 1, G: 1}), instance("callee", {G: 1}), instance("other", {S: 1})
    mine = ledger(caller, callee, other)
    mine.wait(caller)
    begun(mine)
    held = holder(caller)

    assert mine.holds([held])
    assert mine.conflict("callee", [held]).startswith(
        "model 'callee' needs resource 'g', which its caller, model 'caller', holds: "
    )
    assert mine.conflict("other", [held]) == ""
    assert mine.conflict("elsewhere", [held]) == ""
    mine.end(caller)
    assert not mine.holds([held])
    assert mine.conflict("callee", [held]) == ""


def test_callers_of_other_workers_hold_other_units() -> None:
    callee = instance("callee", {G: 1})
    mine = ledger(callee)
    far = ResourceHolder("elsewhere-7", "caller")

    mine.wait(callee, [far])

    assert not mine.holds([far])
    assert callee.callers == ()
    assert begun(mine) == [callee]
    assert mine.refusal([instance("callee", {G: 3})], [far]) == ""


# --- what others are told ---


def test_only_changes_are_told() -> None:
    """Or a turn that changes nothing would be followed by another one."""
    told: list[None] = []
    one, other = instance("one", {R: 1}), instance("other", {R: 1})
    mine = Ledger((), lambda: told.append(None))
    mine.add([one, other])
    mine.wait(one)
    mine.wait(other)
    begun(mine)
    before = len(told)

    mine.wait(other)
    mine.leave(one)
    mine.ready()
    assert len(told) == before
    mine.end(one)
    assert len(told) == before + 1
