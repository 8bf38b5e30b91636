"""The rate limiter's promises, over random instances, traffic and calls."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qinfer.batching.rate_limiter import GLOBAL, Ledger, LimitedInstance, Needs, Resource
from qinfer.core.messages import ResourceHolder
from qinfer.core.settings_sections import Maximum

RESOURCES = (Resource("a", 0), Resource("b", 0), Resource("b", 1), Resource("g", GLOBAL), Resource("h", GLOBAL))
NEEDS = st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 3), max_size=3)


class Traffic(RuleBasedStateMachine):
    """Instances that get work, execute, call one another, and end."""

    @initialize(needs=st.lists(NEEDS, min_size=1, max_size=6), weights=st.lists(st.integers(0, 3), min_size=6))
    def load(self, needs: list[Needs], weights: list[int]) -> None:
        self.ledger = Ledger([Maximum(name, 4) for name in "abgh"])
        self.instances = [LimitedInstance(f"m{i}", one, weights[i]) for i, one in enumerate(needs)]
        self.ledger.add(self.instances)
        self.numbers = itertools.count()

    @property
    def idle(self) -> list[LimitedInstance]:
        return [one for one in self.instances if not (one.order or one.token)]

    @property
    def executing(self) -> list[LimitedInstance]:
        return [one for one in self.instances if one.token]

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.ledger.wait(data.draw(st.sampled_from(self.idle)))
        self.decide()

    @precondition(lambda self: self.idle and self.executing)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        caller, callee = data.draw(st.sampled_from(self.executing)), data.draw(st.sampled_from(self.idle))
        holders = (ResourceHolder(caller.token, caller.model),)
        if not self.ledger.refusal([callee], holders):
            self.ledger.wait(callee, holders)
            self.decide()

    @precondition(lambda self: self.executing)
    @rule(data=st.data(), has_executed=st.booleans())
    def end(self, data: st.DataObject, *, has_executed: bool) -> None:
        ended = data.draw(st.sampled_from(self.executing))
        self.ledger.end(ended, has_executed=has_executed)
        self.decide()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        left = data.draw(st.sampled_from(self.instances))
        if left.order:
            self.ledger.leave(left)
            self.decide()

    def decide(self) -> None:
        waiting = sorted((i for i in self.instances if i.order and not i.callers), key=lambda i: (i.score, i.order))
        ready = list(self.ledger.ready())
        for one in ready:
            self.ledger.begin(one, f"e{next(self.numbers)}")
        assert all(one.token and not one.order for one in ready)
        assert not self.ledger.ready()
        # An instance that is overtaken has enough left of each resource that others took.
        for position, first in enumerate(waiting):
            taken = {resource for other in waiting[position + 1 :] if other in ready for resource in other.needs}
            if first.order:
                assert all(self.free(resource) >= n for resource, n in first.needs.items() if resource in taken)

    def free(self, resource: Resource) -> int:
        return self.ledger.maxima[resource] - self.ledger._used["", resource]

    @invariant()
    def no_resource_is_exceeded(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for resource in self.ledger.maxima:
            own = sum(one.needs[resource] for one in self.executing if one.sources.get(resource) == "")
            assert own == self.ledger._used["", resource] <= self.ledger.maxima[resource]

    @invariant()
    def no_caller_lends_more_than_it_holds(self) -> None:
        for lender in self.executing if hasattr(self, "ledger") else ():
            for resource, count in lender.needs.items():
                lent = sum(one.needs[resource] for one in self.executing if one.sources.get(resource) == lender.token)
                assert lent == self.ledger._used[lender.token, resource] <= count

    def teardown(self) -> None:
        """All units come back, whoever ended first."""
        if not hasattr(self, "ledger"):
            return
        for one in self.instances:
            self.ledger.leave(one)
        while self.executing:
            self.ledger.end(self.executing[0])
        assert not any(self.ledger._used.values())
        assert not self.ledger._executing


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(needs=st.lists(NEEDS, min_size=1, max_size=5), weights=st.lists(st.integers(0, 4), min_size=5))
@settings(max_examples=40, deadline=None)
def test_an_instance_that_always_has_work_executes(needs: list[Needs], weights: list[int]) -> None:
    """No instance starves, however much another needs, and nothing stands still while something could execute."""
    ledger = Ledger()
    instances = [LimitedInstance(f"m{i}", one, weights[i]) for i, one in enumerate(needs)]
    ledger.add(instances)
    for one in instances:
        ledger.wait(one)

    running: list[LimitedInstance] = []
    for number in range(40 * len(instances)):
        for one in list(ledger.ready()):
            ledger.begin(one, f"e{number}-{one.model}")
            running.append(one)
        assert running
        ended = running.pop(0)
        ledger.end(ended)
        ledger.wait(ended)

    assert all(one.executions for one in instances)
