"""The rate limiter of a worker (Triton's `--rate-limit`): instance threads that execute only with their resources.

A batcher wants instances; a plain model's forms a batch when it is the turn of an instance. Batches of sequence steps,
bound to instances, are formed first. A lent instance holds its resources.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from qinfer.backends.base import Backend
from qinfer.batching.execution import Execution, new_batch_id
from qinfer.batching.rate_limiter import Ledger, LimitedInstance, needs_of
from qinfer.core.messages import ResourceHolder
from qinfer.core.settings_sections import Maximum
from qinfer.errors import InferenceFailed, ModelLoadFailed
from qinfer.models.spec import ModelSpec
from qinfer_workers.inference.devices import groups_of
from qinfer_workers.inference.executor import InstanceBorrower, ThreadExecutor
from qinfer_workers.inference.loader import LoadedVersion

_Done = Callable[..., None]
_Work = tuple[Execution | InstanceBorrower, _Done]


class RateLimiter:
    """Gives instances their turns, once an event-loop tick."""

    def __init__(self, maxima: Sequence[Maximum], gpus: Collection[int] = ()) -> None:
        self.ledger = Ledger(maxima, self._changed)
        self._gpus = gpus
        self._is_due = False

    def check(self, spec: ModelSpec) -> None:
        """Refuses a model that never gets its resources, with Triton's text; for any thread."""
        try:
            self.ledger.check(groups_of(spec, self._gpus))
        except ValueError as error:
            raise ModelLoadFailed(str(error)) from None

    def executor(self, loaded: LoadedVersion, loop: asyncio.AbstractEventLoop, name: str) -> "LimitedExecutor":
        """Returns the executor of a limited model."""
        groups = [group for group in groups_of(loaded.spec, self._gpus) for _ in range(group.count)]
        instances = [LimitedInstance(loaded.spec.name, needs_of(group), group.priority) for group in groups]
        kind = StepExecutor if loaded.spec.sequences else LimitedExecutor
        executor = kind(loaded.instances, instances, self.ledger, loop, name)
        self.ledger.add(instances)
        return executor

    def _changed(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._is_due = False
        for instance in list(self.ledger.ready()):
            instance.turn(instance)


class LimitedExecutor(ThreadExecutor):
    """The executor of plain models; `turn` is called if the batcher may begin an execution."""

    def __init__(
        self,
        backends: Sequence[Backend],
        instances: Sequence[LimitedInstance],
        ledger: Ledger,
        loop: asyncio.AbstractEventLoop,
        name: str,
    ) -> None:
        self.ledger = ledger
        self.turn: Callable[[], None] = lambda: None
        self._limited = list(instances)
        self._wanted = 0
        self._callers: Sequence[ResourceHolder] = ()
        self._borrowers: deque[_Work] = deque()
        self._staged: dict[LimitedInstance, _Work] = {}
        self._executing: dict[Execution | InstanceBorrower, LimitedInstance] = {}
        self._is_retired = False
        super().__init__(backends, loop, name, pinned=True)
        for instance in instances:
            instance.turn = self._on_turn

    @property
    def ready(self) -> int:
        """How many executions may begin now, beside those of waiting borrowers."""
        return max(len(self._ready_instances()) - len(self._borrowers), 0)

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Lets `count` idle instances wait for resources, and no more."""
        self._wanted, self._callers = count, callers
        self._line_up()

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Returns false."""
        del execution, expected_s, instance
        return False

    def start(self, execution: Execution | InstanceBorrower, done: _Done, instance: int = 0) -> None:
        """Executes on a ready instance."""
        del instance
        self._begin((execution, done), self._ready_instances()[0])

    def lend(self, borrower: InstanceBorrower, done: _Done) -> None:
        """Lends an instance once it has its resources."""
        self._borrowers.append((borrower, done))
        self._line_up()

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why callers would wait for themselves, or ""."""
        return self.ledger.refusal(self._limited, callers)

    def recall(self) -> list[Execution]:
        """Takes back executions that have not begun, and their resources."""
        recalled = super().recall()
        for execution in recalled:
            self._end(execution, has_executed=False)
        return recalled

    def retire(self) -> None:
        """Unloads the instances after executions and waiting borrowers."""
        self._is_retired = True
        self.want(0, ())
        self._leave()

    def _ready_instances(self) -> list[LimitedInstance]:
        return [instance for instance in self.ledger.ready() if instance in self._limited]

    def _line_up(self) -> None:
        others = [one for one in self._limited if one not in self._staged]
        waiting = sorted((one for one in others if one.order), key=lambda one: one.order)
        idle = sorted((one for one in others if not (one.order or one.token)), key=lambda one: one.score)
        count = self._wanted + len(self._borrowers)
        for position, instance in enumerate([*waiting, *idle]):
            if position < count:
                self.ledger.wait(instance, self._callers)
            else:
                self.ledger.leave(instance)

    def _on_turn(self, instance: LimitedInstance) -> None:
        if instance not in self.ledger.ready():
            return  # a turn before it changed that
        if instance in self._staged:
            self._begin(self._staged.pop(instance), instance)
        elif self._borrowers:
            self._begin(self._borrowers.popleft(), instance)
        else:
            self.turn()

    def _begin(self, work: _Work, instance: LimitedInstance) -> None:
        job, done = work
        self.ledger.begin(instance, job.batch_id if isinstance(job, Execution) else new_batch_id())
        self._executing[job] = instance
        super().start(job, partial(self._on_end, done), self._limited.index(instance))

    def _on_end(self, done: _Done, ended: Execution | InstanceBorrower) -> None:
        self._end(ended, has_executed=True)
        done(ended)

    def _end(self, ended: Execution | InstanceBorrower, *, has_executed: bool) -> None:
        self.ledger.end(self._executing.pop(ended), has_executed=has_executed)
        self._leave()

    def _leave(self) -> None:
        if self._is_retired and self._limited and not (self._executing or self._borrowers or self._staged):
            super().retire()
            self.ledger.remove(self._limited)
            self._limited = []


class StepExecutor(LimitedExecutor):
    """The executor of a model with sequences."""

    def start(self, execution: Execution | InstanceBorrower, done: _Done, instance: int = 0) -> None:
        """Executes steps once the instance has its resources; fails if their callers hold them."""
        assert isinstance(execution, Execution), "no instance of sequences is lent"
        callers = list({holder.token: holder for item in execution.items for holder in item.request.holders}.values())
        if reason := self.refusal(callers):
            execution.error = error = InferenceFailed(reason)
            execution.answers = [error for _ in execution.items]
            self._loop.call_soon(done, execution)
            return
        self._staged[self._limited[instance]] = execution, done
        self.ledger.wait(self._limited[instance], callers)
