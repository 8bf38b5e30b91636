"""Calls a function, or the `predict` of a class, with the values of requests; and `local`, which needs no server."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from qinfer.errors import InferenceFailed, InvalidRequest
from qinfer.functions.declare import State
from qinfer.functions.hints import Function, ValueSpec, read_function
from qinfer.functions.values import Array, decode, make, parts, to_array
from qinfer.models.spec import Device

Arguments = dict[str, Any]
"""Argument of the function → its value."""

Items = Mapping[str, Sequence[Any] | Array]
"""Name of an input → its items; an input that was left out is not there."""


class Runner:
    """A function, or an instance of a class that is set up."""

    def __init__(self, function: Function, device: Device) -> None:
        self.function = function
        self._ports = {port.name: port for value in function.arguments for port in value.ports}
        self.call: Any = function.target
        if inspect.isclass(function.target):
            instance: Any = function.target()
            if (setup := getattr(instance, "setup", None)) is not None:
                setup(*([device] if inspect.signature(setup).parameters else []))
            self.call = instance.predict

    def read(self, inputs: Mapping[str, Array]) -> Items:
        """Returns the items of a request, or raises `InvalidRequest`; each array is `[items, …]`."""
        ports = self._ports
        return {name: decode(ports[name], array) for name, array in inputs.items() if name in ports}

    def batch_arguments(self, items: Items, count: int) -> Arguments:
        """Returns the arguments for `count` items."""
        found: Arguments = {}
        for value in self.function.arguments:
            if value.record is None:
                if value.name in items:
                    found[value.name] = items[value.name]
                continue
            there = [port.name for port in value.ports if port.name in items]
            rows = zip(*(items[name] for name in there), strict=True) if there else [()] * count
            found[value.name] = [make(value, dict(zip(there, row, strict=True))) for row in rows]
        return found

    def item_arguments(self, items: Items, count: int) -> list[Arguments]:
        """Returns the arguments for each of `count` items."""
        columns = self.batch_arguments(items, count)
        rows = zip(*columns.values(), strict=True) if columns else [()] * count
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def outputs(self, result: Any, count: int) -> list[Array]:
        """Returns the outputs of a batch's result, or raises `InferenceFailed`."""
        value = self.function.result
        if value.record is not None and not value.is_columns:
            return self.item_outputs(_sized(value.name, result, count))
        return [
            to_array(port, _sized(port.name, items, count))
            for port, items in zip(value.ports, parts(value, result), strict=True)
        ]

    def item_outputs(self, results: Sequence[Any]) -> list[Array]:
        """Returns the outputs of the results of single items, or raises `InferenceFailed`."""
        value = self.function.result
        if value.record is None:
            return [to_array(value.ports[0], results)]
        rows = [parts(value, result) for result in results]
        return [to_array(port, [row[at] for row in rows]) for at, port in enumerate(value.ports)]


def joined(arguments: Sequence[Arguments]) -> Arguments:
    """Returns the arguments of several requests as those of one batch."""
    if len(arguments) == 1:
        return arguments[0]
    return {
        name: np.concatenate([one[name] for one in arguments])
        if isinstance(arguments[0][name], np.ndarray)
        else list(chain.from_iterable(one[name] for one in arguments))
        for name in arguments[0]
    }


def _sized(name: str, items: Any, count: int) -> Any:
    if not hasattr(items, "__len__") or isinstance(items, str | bytes) or not hasattr(items, "__getitem__"):
        raise InferenceFailed(f"output '{name}' of a batch is a list or an array, got {type(items).__name__}")
    if len(items) != count:
        raise InferenceFailed(f"output '{name}' has {len(items)} items for a batch of {count}")
    return items


class Local:
    """A model in this process, for a unit test; called as the function is, it checks inputs and outputs as a server."""

    def __init__(self, target: Any) -> None:
        self._function = read_function(target)
        self._runner = Runner(self._function, Device())
        self._signature = inspect.signature(self._runner.call)
        self.state = State()
        """The state of the sequence that all calls of this object are."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Returns what the function returns, of an `async` function its result, and of a stream an iterator.

        Args:
            *args: The arguments of the function, without its state.
            **named: The same, by name.

        Raises:
            InvalidRequest: An input is not as the hints say.
            InferenceFailed: An output, or the type of an input, is not as the hints say.
            TypeError: An argument misses, or is one too many.
        """
        function, runner = self._function, self._runner
        more = {function.state: self.state} if function.state else {}
        given = self._signature.bind(*args, **named, **more).arguments
        tensors = dict(chain.from_iterable(self._tensors(value, given) for value in function.arguments))
        items = runner.read(tensors)
        if function.is_batched:
            count = len(next(iter(items.values())))
            result = self._called(runner.batch_arguments(items, count))
            runner.outputs(result, count)
            return result
        result = self._called(runner.item_arguments(items, 1)[0] | more)
        if function.is_decoupled:
            return self._validated(_drained(result) if hasattr(result, "__aiter__") else iter(result))
        runner.item_outputs([result])
        return result

    def _tensors(self, value: ValueSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
        if value.name not in given:
            return
        items: Any = given[value.name] if self._function.is_batched else [given[value.name]]
        if isinstance(items, str | bytes) or not (items is None or hasattr(items, "__len__")):
            raise InvalidRequest(f"input '{value.name}' is a batch; write [{items!r:.100}]")
        rows = [parts(value, item) for item in items] if value.record is not None else None
        for at, port in enumerate(value.ports):
            column = items if rows is None else [row[at] for row in rows]
            if not port.optional or not (column is None or all(item is None for item in column)):
                yield port.name, to_array(port, column, "input")

    def _called(self, arguments: Arguments) -> Any:
        result = self._runner.call(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def _validated(self, results: Iterator[Any]) -> Iterator[Any]:
        for result in results:
            self._runner.item_outputs([result])
            yield result


def local(target: Any) -> Local:
    """Returns a model of this process: `local(Embed)(["hi"])`, for a unit test without a server.

    Args:
        target: A function or class, decorated with `@qinfer.model` or not; a class is set up here, on the CPU.

    Raises:
        HintError: The hints do not say what a model needs.
    """
    return Local(target)


def _drained(stream: AsyncIterator[Any]) -> Iterator[Any]:
    async def read() -> list[Any]:
        return [item async for item in stream]

    return iter(asyncio.run(read()))
