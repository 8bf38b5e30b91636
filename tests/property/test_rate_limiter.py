"""The rate limiter's promises, over random instances, traffic, calls and units that come and go."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qinfer.batching.rate_limiter import GLOBAL, Ledger, LimitedInstance, Needs, Resource
from qinfer.core.messages import ResourceHolder

RESOURCES = (Resource("a", 0), Resource("b", 0), Resource("b", 1), Resource("g", GLOBAL), Resource("h", GLOBAL))
NEEDS = st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 3), max_size=3)


class Traffic(RuleBasedStateMachine):
    """Instances that get work, execute, call one another, and end; the pool of global units changes meanwhile."""

    @initialize(needs=st.lists(NEEDS, min_size=1, max_size=6), weights=st.lists(st.integers(0, 3), min_size=6))
    def load(self, needs: list[Needs], weights: list[int]) -> None:
        self.ledger = Ledger(name="w")
        self.instances = [LimitedInstance(f"m{i}", one, weights[i], lambda _: None) for i, one in enumerate(needs)]
        self.ledger.add(self.instances)
        self.ledger.pool = {"g": 3, "h": 3}
        self.waited: Counter[LimitedInstance] = Counter()
        self.calls: dict[LimitedInstance, LimitedInstance] = {}
        """Callee → caller, from the call to the callee's end."""

    @property
    def idle(self) -> list[LimitedInstance]:
        return [one for one in self.instances if not one.order and one.grant is None]

    @property
    def executing(self) -> list[LimitedInstance]:
        return [one for one in self.instances if one.grant is not None]

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.ledger.wait(data.draw(st.sampled_from(self.idle)))
        self.decide()

    @precondition(lambda self: self.idle and self.executing)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        caller, callee = data.draw(st.sampled_from(self.executing)), data.draw(st.sampled_from(self.idle))
        assert caller.grant is not None
        holders = (caller.grant.holder,)
        if not self.ledger.refusal(callee.model, [callee.needs], holders):
            self.ledger.wait(callee, holders)
            self.calls[callee] = caller
            self.decide()

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), number=st.integers(1, 2), name=st.sampled_from(["g", "h"]))
    def call_from_elsewhere(self, data: st.DataObject, number: int, name: str) -> None:
        """Another worker counts what that caller holds; it is lent once at a time here."""
        callee = data.draw(st.sampled_from(self.idle))
        holders = (ResourceHolder(f"other/{number}", "remote", {name: number}),)
        if not self.ledger.refusal(callee.model, [callee.needs], holders):
            self.ledger.wait(callee, holders)
            self.decide()

    @precondition(lambda self: self.executing)
    @rule(data=st.data(), has_executed=st.booleans())
    def end(self, data: st.DataObject, *, has_executed: bool) -> None:
        ended = data.draw(st.sampled_from(self.executing))
        self.calls.pop(ended, None)
        self.ledger.release_grant(ended, has_executed=has_executed)
        self.decide()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        left = data.draw(st.sampled_from(self.instances))
        if left.order:
            self.ledger.leave_queue(left)
            self.calls.pop(left, None)
            self.decide()

    @rule(name=st.sampled_from(["g", "h"]), units=st.integers(0, 3))
    def move(self, name: str, units: int) -> None:
        """Units go to other workers, but those in use; or come."""
        self.ledger.pool[name] = max(units, self.ledger.pool[name] - self.ledger.idle(name))
        self.decide()

    def decide(self) -> None:
        waiting = sorted((i for i in self.instances if i.order and not i.callers), key=lambda i: (i.score, i.order))
        granted = self.ledger.decide()
        assert all(one.grant is not None and not one.order for one in granted)
        assert not self.ledger.decide()
        # Nobody is overtaken in what it needs: whoever went first has left it enough of that.
        free = self.ledger._free()
        for position, first in enumerate(waiting):
            taken = {resource for other in waiting[position + 1 :] if other in granted for resource in other.needs}
            if first.order:
                assert all(free[resource] >= count for resource, count in first.needs.items() if resource in taken)

    @invariant()
    def no_resource_is_exceeded(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for resource in self.ledger.maxima:
            own = sum(
                one.needs.get(resource, 0)
                for one in self.executing
                if one.grant is not None and resource not in one.grant.borrowed
            )
            most = self.ledger.pool[resource.name] if resource.device == GLOBAL else self.ledger.maxima[resource]
            assert own <= most
            assert self.ledger._used.get(resource, 0) <= most

    @invariant()
    def no_caller_lends_more_than_it_holds(self) -> None:
        for grant in self.ledger._grants.values() if hasattr(self, "ledger") else ():
            assert all(count <= grant.held[resource] for resource, count in grant.lent.items())

    def teardown(self) -> None:
        """All units come back, whoever ended first."""
        if not hasattr(self, "ledger"):
            return
        for one in self.instances:
            self.ledger.leave_queue(one)
        while self.executing:
            self.ledger.release_grant(self.executing[0])
        assert not any(self.ledger._used.values())
        assert not self.ledger._grants


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(needs=st.lists(NEEDS, min_size=1, max_size=5), weights=st.lists(st.integers(0, 4), min_size=5))
@settings(max_examples=40, deadline=None)
def test_whoever_always_has_work_executes(needs: list[Needs], weights: list[int]) -> None:
    """No instance starves, however much another needs, and nothing stands still while something could execute."""
    ledger = Ledger()
    instances = [LimitedInstance(f"m{i}", one, weights[i], lambda _: None) for i, one in enumerate(needs)]
    ledger.add(instances)
    ledger.pool = {resource.name: most for resource, most in ledger.maxima.items() if resource.device == GLOBAL}
    for one in instances:
        ledger.wait(one)

    running: list[LimitedInstance] = []
    for _ in range(40 * len(instances)):
        running += ledger.decide()
        assert running
        ended = running.pop(0)
        ledger.release_grant(ended)
        ledger.wait(ended)

    assert all(one.executions for one in instances)
