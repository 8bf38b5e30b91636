"""What a batcher works with: a loaded model, instances that execute, and an outlet for what is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qinfer.batching.execution import Caller, Execution, Pending
from qinfer.errors import QinferError
from qinfer.messages import Response
from qinfer.repository.spec import ModelSpec


class Executor(Protocol):
    """The instances of a model version, which share one queue of executions."""

    count: int
    """How many instances there are."""

    def run_now(self, execution: Execution, expected_s: float) -> bool:
        """Executes at once if that should take no time worth a change of threads; tells whether it did.

        Args:
            execution: What to run.
            expected_s: How long it should take; 0 = unknown.
        """
        ...

    def start(self, execution: Execution, done: Callable[[Execution], None]) -> None:
        """Queues an execution; `done` is called on the event loop when it ended."""
        ...

    def recall(self) -> list[Execution]:
        """Takes back the executions that did not begin."""
        ...

    def retire(self) -> None:
        """Unloads every instance once it has executed what is queued."""
        ...


class Observer(Protocol):
    """What is told of executions, for traces; called on the event loop, before the answers leave."""

    def executed(self, execution: Execution, begin_s: float) -> None:
        """Takes note of an execution that has ended, well or not.

        Args:
            execution: The same.
            begin_s: When it began, on the clock of the items' instants; its inputs were made just before.
        """
        ...

    def refused(self, items: Sequence[Pending], error: QinferError, now_s: float) -> None:
        """Takes note of items that are answered with an error, at `now_s`, without having been executed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model version at one generation, loaded into instances; its calls to other models go through `caller`."""

    spec: ModelSpec
    version: int
    generation: int
    executor: Executor
    caller: Caller | None = None
    observer: Observer | None = None


class Outlet(Protocol):
    """Where items go when the batcher is done with them; none of its calls blocks."""

    def answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        """Publishes responses, then finishes the items' entries."""
        ...

    def give_back(self, items: Sequence[Pending]) -> None:
        """Releases items that are not to be executed here."""
        ...

    def delay(self, items: Sequence[Pending]) -> None:
        """Moves items behind the others of their level: each to the `.delayed` lane of the lane that it is in."""
        ...
