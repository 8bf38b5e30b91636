"""Type hints as ports: the inputs and outputs of a function that is a model.

`list[…]` is the batch and a bare type is one item; an array follows the other inputs, and is a batch if there are no
others. Hints that leave something open are a `HintError`, which shows the line and the remedy.
"""

import ast
import collections.abc
import dataclasses
import inspect
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from qinfer.errors import ModelLoadFailed
from qinfer.functions.declare import ModelOptions, State, model_name, options_of
from qinfer.tensors import DATATYPES

Kind = Literal["str", "bytes", "int", "float", "bool", "image", "array"]

_DATATYPES: Mapping[Any, tuple[Kind | None, str]] = {
    str: ("str", "BYTES"),
    bytes: ("bytes", "BYTES"),
    int: ("int", "INT64"),
    float: ("float", "FP64"),
    bool: ("bool", "BOOL"),
}
_STREAMS = (
    collections.abc.Iterator, collections.abc.Iterable, collections.abc.Generator,
    collections.abc.AsyncIterator, collections.abc.AsyncIterable, collections.abc.AsyncGenerator,
)  # fmt: skip
_KNOWN = "str, bytes, int, float, bool, an Image, an Annotated[np.ndarray, …], or a class of such fields"
_ARRAY = 'Annotated[np.ndarray, "FP32", 384]: datatype, and dimensions of one item, -1 where they vary'

_LIST = "list[str], or list[…] of another type"


class HintError(ModelLoadFailed):
    """Hints do not say what a model needs; the message begins with file and line."""


class TensorPort(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output: a tensor of items of `shape`, () for scalars, which are [1] on the wire."""

    name: str
    datatype: str
    kind: Kind
    shape: tuple[int, ...] = ()
    optional: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the configuration."""
        return self.shape or (1,)


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """All that a configuration says of a function."""

    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    is_decoupled: bool = False
    has_state: bool = False


class ValueSpec(NamedTuple):
    """An argument or result: one port, or the ports of a `record`'s fields."""

    name: str
    ports: tuple[TensorPort, ...]
    record: type | None = None
    is_columns: bool = False
    """Whether the fields of the record hold a whole batch each."""


class Function(NamedTuple):
    """A function or class with the meaning of its hints."""

    target: Any
    options: ModelOptions
    arguments: tuple[ValueSpec, ...]
    result: ValueSpec
    is_batched: bool
    is_async: bool
    is_decoupled: bool
    state: str = ""

    @property
    def signature(self) -> Signature:
        """The inputs and outputs."""
        return Signature(
            inputs=tuple(port for value in self.arguments for port in value.ports),
            outputs=self.result.ports,
            is_decoupled=self.is_decoupled,
            has_state=bool(self.state),
        )


def read_function(target: Any) -> Function:
    """Returns the meaning of a function's or class's hints, or raises `HintError`."""
    options = options_of(target) or ModelOptions(name=model_name(target))
    call = getattr(target, "predict", None) if inspect.isclass(target) else target
    if inspect.isfunction(call):
        return _Reader(target, options, call).read()
    if inspect.isclass(target):
        where = _place_of(target)
        text = f"class {target.__name__} has no method predict; write: def predict(self, text: list[str]) -> …"
    else:
        where = _place_of(inspect.unwrap(getattr(target, "__func__", target)))
        text = f"it is a {type(target).__name__}; write @qinfer.model above a plain function"
    raise HintError(f"{where}{model_name(target)}: {text}")


class _Reader:
    def __init__(self, target: Any, options: ModelOptions, call: Callable[..., Any]) -> None:
        self._target, self._options, self._call = target, options, call

    def read(self) -> Function:
        with self._known_types(""):
            hints = typing.get_type_hints(self._call, include_extras=True)
        result = _plain(hints.pop("return", None))
        if result in (None, types.NoneType):
            raise self._error("return", "its result has no type; write '-> list[str]', or another, after the arguments")
        parameters = list(inspect.signature(self._call).parameters.values())[inspect.isclass(self._target) :]
        states = [p.name for p in parameters if inspect.isclass(of := hints.get(p.name)) and issubclass(of, State)]
        if len(states) > 1:
            raise self._error(states[1], "a model has one State; keep both values in one")
        given = [p for p in parameters if p.name not in states]
        is_decoupled = (typing.get_origin(result) or result) in _STREAMS
        inner = next(iter(typing.get_args(result)), None) if is_decoupled else result
        if inner is None:
            stream = _shown(result)
            raise self._error("return", f"the stream has no type of values; write {stream}[str], or another type")
        if is_decoupled and states:
            raise self._error("return", f"a model with a State has one response; return a value, not {_shown(result)}")
        is_batched = self._is_batched(given, hints)
        if is_batched and (is_decoupled or states):
            what, name = "streams its result" if is_decoupled else "has a State", given[0].name
            raise self._error(name, f"a model that {what} takes one item; write {name}: str, without list[…]")
        arguments = tuple(self._argument(p, hints[p.name], is_batched=is_batched) for p in given)
        value = self._result(inner, is_batched=is_batched)
        is_async = inspect.iscoroutinefunction(self._call) or inspect.isasyncgenfunction(self._call)
        more = (is_batched, is_async, is_decoupled, "".join(states))
        found = Function(self._target, self._options, arguments, value, *more)
        for ports in (found.signature.inputs, found.signature.outputs):
            ((name, count),) = Counter(port.name for port in ports).most_common(1)
            if count > 1:
                raise self._error("", f"two inputs or two outputs are named '{name}'; rename one")
        return found

    @contextmanager
    def _known_types(self, where: str) -> Iterator[None]:
        try:
            yield
        except NameError as error:
            text = f"the type '{error.name}' is not known here; import it at the top of the file"
            raise self._error(where, text) from None
        except SyntaxError as error:
            raise self._error(where, f"a type in quotes is no Python: {error.msg}") from None

    def _is_batched(self, given: list[inspect.Parameter], hints: Mapping[str, Any]) -> bool:
        if not given:
            raise self._error("", "it takes no input; add an argument such as text: list[str]")
        batches: list[str] = []
        items: list[str] = []
        for parameter in given:
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._error(name, f"*{name} names no inputs; write one argument for each")
            if name not in hints:
                raise self._error(name, f"'{name}' has no type; write {name}: list[str], or another type")
            if not _is_array(hint := _required(hints[name])):
                (items if _item_of(hint) is None else batches).append(name)
        if batches and items:
            one, many = items[0], batches[0]
            write = f"write {one}: list[…], or {many} without list[…]"
            raise self._error(one, f"'{one}' is one item and '{many}' is a batch; {write}")
        return not items

    def _argument(self, parameter: inspect.Parameter, hint: Any, *, is_batched: bool) -> ValueSpec:
        name, has_default = parameter.name, parameter.default is not parameter.empty
        of = _required(hint)
        if of is not _plain(hint) and parameter.default is not None:
            raise self._error(name, f"'{name}' may be None; give it the default None, or remove None from its type")
        item = _item_of(of) if is_batched and not _is_array(of) else of
        if (fields := self._fields(name, item)) is None:
            return ValueSpec(name, (self._port(name, name, item, optional=has_default),))
        if has_default:
            raise self._error(name, f"'{name}' is a class of fields; give the fields defaults in place of '{name}'")
        ports = tuple(self._port(name, field, inner, optional=may_miss) for field, inner, may_miss in fields)
        return ValueSpec(name, ports, item)

    def _result(self, hint: Any, *, is_batched: bool) -> ValueSpec:
        output, item = self._options.output, _item_of(hint) if is_batched else None
        is_columns = is_batched and item is None and not _is_array(hint) and not _is_bare_list(hint)
        item = hint if item is None else item
        fields = self._fields("return", item)
        if fields is None and is_columns:
            shown = _shown(hint)
            raise self._error("return", f"the result of a batch is a batch, not {shown}; write list[{shown}]")
        if fields is None:
            return ValueSpec(output, (self._port("return", output, item),))
        ports: list[TensorPort] = []
        for name, of, _ in fields:
            each = _item_of(of) if is_columns and not _is_array(of) else of
            if each is None:
                text = f"field '{name}' of the result of a batch is one item; write {name}: list[…]"
                raise self._error("return", text)
            ports.append(self._port("return", name, each))
        return ValueSpec(output, tuple(ports), item, is_columns)

    def _port(self, where: str, name: str, hint: Any, *, optional: bool = False) -> TensorPort:
        of = _required(hint) if optional else _plain(hint)
        kind, datatype = ("image", "BYTES") if _is_image(of) else _DATATYPES.get(of, (None, ""))
        if kind is not None:
            return TensorPort(name=name, datatype=datatype, kind=kind, optional=optional)
        if _is_array(of):
            return self._array(where, name, of, optional=optional)
        if _item_of(of) is not None:
            text = f"is a list within an item; write {name}: {_ARRAY}"
        elif _is_bare_list(of):
            text = f"is a list of no type; write {_LIST}"
        elif isinstance(of, types.ModuleType):
            text = f"has a module as its type; write {_shown(of).rpartition('.')[2]}.Image"
        else:
            text = f"has the type {_shown(of)}; a model takes and gives {_KNOWN}"
        raise self._error(where, f"'{name}' {text}")

    def _array(self, where: str, name: str, hint: Any, *, optional: bool) -> TensorPort:
        datatype, *shape = getattr(hint, "__metadata__", ()) or ("",)
        if datatype not in DATATYPES:
            raise self._error(where, f"the array '{name}' needs a datatype; write {_ARRAY}")
        if any(not isinstance(size, int) or (size < 1 and size != -1) for size in shape):
            text = f"the array '{name}' has dimensions {shape}; each is 1 or more, or -1 where it varies"
            raise self._error(where, text)
        return TensorPort(name=name, datatype=datatype, kind="array", shape=tuple(shape), optional=optional)

    def _fields(self, where: str, hint: Any) -> list[tuple[str, Any, bool]] | None:
        """Returns name, type and whether a value may miss, for each field of a class of fields; `None` of others."""
        with self._known_types(where):
            if (fields := _fields_of(hint)) is None:
                return None
            hints = typing.get_type_hints(hint, include_extras=True)
        if not fields:
            raise self._error(where, f"class {_shown(hint)} has no fields; write one, such as label: str")
        return [(name, _plain(hints[name]), may_miss) for name, may_miss in fields.items()]

    def _error(self, name: str, text: str) -> HintError:
        return HintError(f"{_place_of(self._call, name)}{self._options.name}: {text}")


def _place_of(of: Any, name: str = "") -> str:
    """Returns the file and line of a function or class, or of the function's argument or "return"; "" without any."""
    file, line = "", 0
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        file, line = inspect.getfile(of), getattr(getattr(of, "__code__", None), "co_firstlineno", 1)
        source, first = inspect.getsourcelines(of)
        (node,) = ast.parse(textwrap.dedent("".join(source))).body
        arguments = {each.arg: each for each in ast.walk(getattr(node, "args", node)) if isinstance(each, ast.arg)}
        found = getattr(node, "returns", None) if name == "return" else arguments.get(name)
        line = first + (found or node).lineno - 1
    return f"{file}:{line}: " if file else ""


def _required(hint: Any) -> Any:
    """Returns `X` of `X | None`; any other hint as it is, without annotations that are not of an array."""
    hint = _plain(hint)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    others = [each for each in typing.get_args(hint) if each is not types.NoneType]
    return others[0] if is_union and len(others) == 1 else hint


def _plain(hint: Any) -> Any:
    is_annotated = typing.get_origin(hint) in (typing.Annotated, typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if is_annotated and not _is_array(hint) else hint


def _item_of(hint: Any) -> Any:
    """Returns the type of the items of a list, or `None`."""
    if typing.get_origin(hint) in (list, collections.abc.Sequence) and (of := typing.get_args(hint)):
        return of[0]
    return None


def _is_bare_list(hint: Any) -> bool:
    return (hint is list or typing.get_origin(hint) is list) and _item_of(hint) is None


def _is_array(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Annotated:
        return _is_array(typing.get_args(hint)[0])
    return hint is np.ndarray or typing.get_origin(hint) is np.ndarray


def _is_image(hint: Any) -> bool:
    return inspect.isclass(hint) and (hint.__module__, hint.__name__) == ("PIL.Image", "Image")


def _fields_of(hint: Any) -> dict[str, bool] | None:
    """Returns the names of the fields of a class of fields, and whether a value of each may miss."""
    if not inspect.isclass(hint):
        return None
    if (optional := getattr(hint, "__optional_keys__", None)) is not None:  # TypedDict
        return {name: name in optional for name in hint.__annotations__}
    if issubclass(hint, msgspec.Struct):
        return {field.name: not field.required for field in msgspec.structs.fields(hint)}
    if dataclasses.is_dataclass(hint):
        needed = dataclasses.MISSING
        return {f.name: not (f.default is f.default_factory is needed) for f in dataclasses.fields(hint)}
    fields: Any = getattr(hint, "model_fields", None)  # pydantic.BaseModel
    return None if fields is None else {name: not field.is_required() for name, field in fields.items()}


def _shown(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))
