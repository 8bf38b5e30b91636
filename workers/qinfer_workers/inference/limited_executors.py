"""Instance threads that execute only with resources granted by the rate limiter.

A plain model's batcher waits for a *permit* before it forms a batch (`PermitExecutor`); batches of sequence steps,
bound to instances, are formed first (`StagedExecutor`). A lent instance holds its resources.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qinfer.backends.base import Backend
from qinfer.batching.execution import Execution
from qinfer.batching.rate_limiter import LimitedInstance
from qinfer.core.messages import ResourceHolder
from qinfer.errors import InferenceFailed
from qinfer_workers.inference.executor import InstanceBorrower, ThreadExecutor

_Done = Callable[..., None]
_Work = tuple[Execution | InstanceBorrower, _Done]


class Limiter(Protocol):
    """The rate limiter, on the event loop; grants by `LimitedInstance.granted`."""

    def wait(self, instance: LimitedInstance, callers: tuple[ResourceHolder, ...]) -> None:
        """Notes that an instance has work."""
        ...

    def leave_queue(self, instance: LimitedInstance) -> None:
        """Notes that an instance has no work."""
        ...

    def release_grant(self, instance: LimitedInstance, *, has_executed: bool) -> None:
        """Takes back the grant of an instance."""
        ...

    def remove(self, instances: Sequence[LimitedInstance]) -> None:
        """Removes idle instances."""
        ...

    def holds(self, callers: Sequence[ResourceHolder]) -> bool:
        """Returns whether callers hold resources."""
        ...

    def refusal(self, instances: Sequence[LimitedInstance], callers: Sequence[ResourceHolder]) -> str:
        """Returns why callers would wait for themselves, or ""."""
        ...


class LimitedExecutor(ThreadExecutor):
    """The common part of both executors."""

    def __init__(
        self,
        backends: Sequence[Backend],
        instances: Sequence[LimitedInstance],
        limiter: Limiter,
        loop: asyncio.AbstractEventLoop,
        name: str,
    ) -> None:
        self._limited = list(instances)
        self._limiter = limiter
        self._holding: dict[Execution | InstanceBorrower, LimitedInstance] = {}
        self._is_leaving = self._is_retired = False
        super().__init__(backends, loop, name, pinned=True)
        for instance in instances:
            instance.granted = self._granted

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Returns false."""
        del execution, expected_s, instance
        return False

    def is_held(self, callers: Sequence[ResourceHolder]) -> bool:
        """Returns whether callers hold resources."""
        return bool(callers) and self._limiter.holds(callers)

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why callers would wait for themselves, or ""."""
        return self._limiter.refusal(self._limited, callers)

    def recall(self) -> list[Execution]:
        """Takes back executions that have not begun, and their resources."""
        recalled = super().recall()
        for execution in recalled:
            self._free(execution, has_executed=False)
        return recalled

    def retire(self) -> None:
        """Unloads the instances after their queued executions."""
        self._is_retired = True
        super().retire()
        self._leave_limiter()

    def _granted(self, instance: LimitedInstance) -> None:
        raise NotImplementedError

    def _start_work(self, work: _Work, instance: LimitedInstance) -> None:
        execution, done = work
        self._holding[execution] = instance
        if isinstance(execution, Execution):
            assert instance.grant is not None, "it was granted"
            execution.holder = instance.grant.holder
        self._running += 1
        self._queues[self._limited.index(instance)].put((execution, done))

    def _on_job_end(self, ended: Execution | InstanceBorrower, done: _Done) -> None:
        self._free(ended, has_executed=True)
        super()._on_job_end(ended, done)

    def _free(self, ended: Execution | InstanceBorrower, *, has_executed: bool) -> None:
        if isinstance(ended, Execution):
            ended.holder = None
        self._limiter.release_grant(self._holding.pop(ended), has_executed=has_executed)
        self._leave_limiter()

    def _leave_limiter(self) -> None:
        if self._is_retired and not self._holding and self._limited:
            self._limiter.remove(self._limited)
            self._limited = []


class PermitExecutor(LimitedExecutor):
    """The executor of plain models."""

    def __init__(self, *args: Any) -> None:
        self.permitted: Callable[[], None] = lambda: None
        self._unused: list[LimitedInstance] = []
        self._wanted = 0
        self._callers: tuple[ResourceHolder, ...] = ()
        self._borrowers: deque[_Work] = deque()
        super().__init__(*args)

    @property
    def permits(self) -> int:
        """How many executions may begin now."""
        return len(self._unused)

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Asks for `count` permits; returns surplus permits."""
        self._wanted, self._callers = count, tuple(callers)
        while len(self._unused) > count:
            self._limiter.release_grant(self._unused.pop(), has_executed=False)
        self._stage()

    def start(self, execution: Execution, done: _Done, instance: int = 0) -> None:
        """Executes on the instance of a permit."""
        del instance
        self._wanted = max(self._wanted - 1, 0)
        self._start_work((execution, done), self._unused.pop(0))

    def lend(self, borrower: InstanceBorrower, done: _Done) -> None:
        """Lends an instance once it has its resources."""
        self._borrowers.append((borrower, done))
        self._stage()

    def retire(self) -> None:
        """Unloads the instances, after waiting borrowers."""
        self._is_leaving = True
        self.want(0, ())
        if not self._borrowers:
            super().retire()

    def _stage(self) -> None:
        count = self._wanted - len(self._unused) + len(self._borrowers)
        waiting = [instance for instance in self._limited if instance.order]
        if count == len(waiting) and not (count and (self._callers or any(i.callers for i in waiting))):
            return
        idle = [instance for instance in self._limited if not instance.order and instance.grant is None]
        waiting.sort(key=lambda instance: instance.order)
        waiting += sorted(idle, key=lambda instance: instance.score)
        for instance in waiting[:count]:
            self._limiter.wait(instance, self._callers)
        for instance in waiting[count:]:
            self._limiter.leave_queue(instance)

    def _granted(self, instance: LimitedInstance) -> None:
        if self._borrowers:
            self._start_work(self._borrowers.popleft(), instance)
            if self._is_leaving and not self._borrowers:
                self.retire()
            return
        self._unused.append(instance)
        self.permitted()


class StagedExecutor(LimitedExecutor):
    """The executor of a model with sequences."""

    def __init__(self, *args: Any) -> None:
        self._staged: dict[LimitedInstance, _Work] = {}
        super().__init__(*args)

    def start(self, execution: Execution, done: _Done, instance: int = 0) -> None:
        """Executes once resources are granted; fails if its callers hold them."""
        callers = {holder.token: holder for item in execution.items for holder in item.request.holders}
        reason = self.refusal(tuple(callers.values())) if callers else ""
        if reason:
            execution.error = error = InferenceFailed(reason)
            execution.answers = [error for _ in execution.items]
            self._running += 1
            self._loop.call_soon(ThreadExecutor._on_job_end, self, execution, done)
            return
        self._staged[self._limited[instance]] = execution, done
        self._limiter.wait(self._limited[instance], tuple(callers.values()))

    def recall(self) -> list[Execution]:
        """Takes back executions that have not begun."""
        staged = [execution for execution, _ in self._staged.values() if isinstance(execution, Execution)]
        for instance in self._staged:
            self._limiter.leave_queue(instance)
        self._staged.clear()
        return [*staged, *super().recall()]

    def retire(self) -> None:
        """Unloads the instances, after waiting batches."""
        self._is_leaving = True
        if not self._staged:
            super().retire()

    def _granted(self, instance: LimitedInstance) -> None:
        self._start_work(self._staged.pop(instance), instance)
        if self._is_leaving and not self._staged:
            self.retire()
