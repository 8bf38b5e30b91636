"""Type hints as ports: the inputs and outputs of a function that is a model.

`list[…]` is the batch and a bare type is one item; an array follows the other inputs, and is a batch if there are no
others. Hints that leave something open are a `HintError`, which shows the line and the remedy.
"""

import ast
import collections.abc
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec

from qinfer.errors import ModelLoadFailed
from qinfer.functions.declare import ModelOptions, State, model_name, options_of
from qinfer.tensors import DATATYPES

Kind = Literal["str", "bytes", "int", "float", "bool", "image", "array"]

_DATATYPES: Mapping[Any, tuple[Kind, str]] = {
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
    if not inspect.isfunction(call):
        raise _no_function(target)
    return _Reader(target, options, call).read()


class _Reader:
    def __init__(self, target: Any, options: ModelOptions, call: Callable[..., Any]) -> None:
        self._target, self._options, self._call = target, options, call
        self._where = _lines_of(call)

    def read(self) -> Function:
        hints = self._hints()
        result = _plain(hints.pop("return", None))
        if result in (None, types.NoneType):
            raise self._error(
                "return", "its result has no type; write '-> list[str]', or another type after the arguments"
            )
        parameters = list(inspect.signature(self._call).parameters.values())[inspect.isclass(self._target) :]
        states = [p.name for p in parameters if _is_state(hints.get(p.name))]
        if len(states) > 1:
            raise self._error(states[1], "a model has one State; keep both values in one")
        given = [p for p in parameters if p.name not in states]
        is_decoupled = typing.get_origin(result) in _STREAMS
        if result in _STREAMS or (is_decoupled and not typing.get_args(result)):
            raise self._error(
                "return", f"the stream has no type of values; write {_shown(result)}[str], or another type"
            )
        if is_decoupled and states:
            raise self._error("return", f"a model with a State has one response; return a value, not {_shown(result)}")
        is_batched = self._is_batched(given, hints)
        if is_batched and (is_decoupled or states):
            what = "streams its result" if is_decoupled else "has a State"
            raise self._error(
                given[0].name, f"a model that {what} takes one item; write {given[0].name}: str, without list[…]"
            )
        arguments = tuple(self._argument(p, hints[p.name], is_batched=is_batched) for p in given)
        inner = typing.get_args(result)[0] if is_decoupled else result
        found = Function(
            self._target,
            self._options,
            arguments,
            self._result(inner, is_batched=is_batched),
            is_batched,
            inspect.iscoroutinefunction(self._call) or inspect.isasyncgenfunction(self._call),
            is_decoupled,
            states[0] if states else "",
        )
        self._check_names(found)
        return found

    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._call, include_extras=True)
        except NameError as error:
            raise self._unknown("", error) from None
        except SyntaxError as error:
            raise self._error("", f"a type in quotes is no Python: {error.msg}") from None

    def _is_batched(self, given: list[inspect.Parameter], hints: Mapping[str, Any]) -> bool:
        if not given:
            raise self._error("", "it takes no input; add an argument such as text: list[str]")
        batches: list[str] = []
        items: list[str] = []
        for parameter in given:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._error(parameter.name, f"*{parameter.name} names no inputs; write one argument for each")
            if parameter.name not in hints:
                raise self._error(
                    parameter.name,
                    f"'{parameter.name}' has no type; write {parameter.name}: list[str], or another type",
                )
            hint = _required(hints[parameter.name])
            (batches if _item_of(hint) is not None else items if not _is_array(hint) else []).append(parameter.name)
        if batches and items:
            raise self._error(
                items[0],
                f"'{items[0]}' is one item and '{batches[0]}' is a batch; write {items[0]}: list[…], "
                f"or {batches[0]} without list[…]",
            )
        return not items

    def _argument(self, parameter: inspect.Parameter, hint: Any, *, is_batched: bool) -> ValueSpec:
        name, has_default = parameter.name, parameter.default is not parameter.empty
        if _required(hint) is not _plain(hint) and parameter.default is not None:
            raise self._error(name, f"'{name}' may be None; give it the default None, or remove None from its type")
        item = _item_of(_required(hint)) if is_batched and not _is_array(_required(hint)) else _required(hint)
        if (fields := self._fields(name, item)) is None:
            return ValueSpec(name, (self._port(name, name, item, optional=has_default),))
        if has_default:
            raise self._error(name, f"'{name}' is a class of fields; give the fields defaults in place of '{name}'")
        ports = tuple(self._port(name, field, inner, optional=may_miss) for field, inner, may_miss in fields)
        return ValueSpec(name, ports, item)

    def _result(self, hint: Any, *, is_batched: bool) -> ValueSpec:
        output, item = self._options.output, _item_of(hint)
        if is_batched and item is None and not _is_array(hint) and not _is_bare_list(hint):
            fields = self._fields("return", hint)
            if fields is None:
                raise self._error(
                    "return", f"the result of a batch is a batch, not {_shown(hint)}; write list[{_shown(hint)}]"
                )
            columns = [(name, of if _is_array(of) else _item_of(of)) for name, of, _ in fields]
            for name, of in columns:
                if of is None:
                    raise self._error(
                        "return", f"field '{name}' of the result of a batch is one item; write {name}: list[…]"
                    )
            return ValueSpec(
                output, tuple(self._port("return", name, of) for name, of in columns), hint, is_columns=True
            )
        item = item if is_batched and item is not None else hint
        if (fields := self._fields("return", item)) is None:
            return ValueSpec(output, (self._port("return", output, item),))
        return ValueSpec(output, tuple(self._port("return", name, of) for name, of, _ in fields), item)

    def _port(self, where: str, name: str, hint: Any, *, optional: bool = False) -> TensorPort:
        of = _required(hint) if optional else _plain(hint)
        if of in _DATATYPES:
            kind, datatype = _DATATYPES[of]
            return TensorPort(name=name, datatype=datatype, kind=kind, optional=optional)
        if _is_image(of):
            return TensorPort(name=name, datatype="BYTES", kind="image", optional=optional)
        if _is_array(of):
            return self._array(where, name, of, optional=optional)
        if _item_of(of) is not None:
            raise self._error(where, f"'{name}' is a list within an item; write {name}: {_ARRAY}")
        if _is_bare_list(of):
            raise self._error(where, f"'{name}' is a list of no type; write {_LIST}")
        if isinstance(of, types.ModuleType):
            raise self._error(where, f"'{name}' has a module as its type; write {_shown(of).rpartition('.')[2]}.Image")
        raise self._error(where, f"'{name}' has the type {_shown(of)}; a model takes and gives {_KNOWN}")

    def _array(self, where: str, name: str, hint: Any, *, optional: bool) -> TensorPort:
        datatype, *shape = getattr(hint, "__metadata__", ()) or ("",)
        if datatype not in DATATYPES:
            raise self._error(where, f"the array '{name}' needs a datatype; write {_ARRAY}")
        if any(not isinstance(size, int) or (size < 1 and size != -1) for size in shape):
            raise self._error(
                where, f"the array '{name}' has dimensions {shape}; each is 1 or more, or -1 where it varies"
            )
        return TensorPort(name=name, datatype=datatype, kind="array", shape=tuple(shape), optional=optional)

    def _fields(self, where: str, hint: Any) -> list[tuple[str, Any, bool]] | None:
        try:
            fields = _fields_of(hint)
        except NameError as error:
            raise self._unknown(where, error) from None
        if fields == []:
            raise self._error(where, f"class {_shown(hint)} has no fields; write one, such as label: str")
        return fields

    def _unknown(self, where: str, error: NameError) -> HintError:
        return self._error(where, f"the type '{error.name}' is not known here; import it at the top of the file")

    def _check_names(self, found: Function) -> None:
        for ports in (found.signature.inputs, found.signature.outputs):
            names = [port.name for port in ports]
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise self._error("", f"two inputs or two outputs are named '{twice[0]}'; rename one")

    def _error(self, name: str, text: str) -> HintError:
        file, lines = self._where
        return HintError(f"{file}:{lines.get(name, lines[''])}: {self._options.name}: {text}")


def _no_function(target: Any) -> HintError:
    if not inspect.isclass(target):
        inner = inspect.unwrap(getattr(target, "__func__", target))
        text = f"it is a {type(target).__name__}; write @qinfer.model above a plain function"
    else:
        inner, text = (
            target,
            f"class {target.__name__} has no method predict; write: def predict(self, text: list[str]) -> …",
        )
    where = ""
    with suppress(OSError, TypeError):
        lines, first = inspect.getsourcelines(inner)
        line = next(
            at for at, each in enumerate(lines, first) if each.lstrip().startswith(("class ", "def ", "async "))
        )
        where = f"{inspect.getsourcefile(inner)}:{line}: "
    return HintError(f"{where}{model_name(target)}: {text}")


def _lines_of(call: Callable[..., Any]) -> tuple[str, dict[str, int]]:
    """Returns the file of a function, and the lines of its arguments, of "return", and of itself as ""."""
    lines = {"": call.__code__.co_firstlineno}
    with suppress(OSError, SyntaxError, IndexError):
        source, first = inspect.getsourcelines(call)
        (node,) = ast.parse(textwrap.dedent("".join(source))).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = node.args
        optional = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *optional):
            lines[argument.arg] = first + argument.lineno - 1
        lines[""] = first + node.lineno - 1
        lines["return"] = first + (node.returns.lineno if node.returns else node.lineno) - 1
    return call.__code__.co_filename, lines


def _required(hint: Any) -> Any:
    """Returns `X` of `X | None`; any other hint as it is, without annotations that are not of an array."""
    hint = _plain(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [each for each in typing.get_args(hint) if each is not types.NoneType]
        if len(others) == 1 and len(others) < len(typing.get_args(hint)):
            return others[0]
    return hint


def _plain(hint: Any) -> Any:
    is_annotated = typing.get_origin(hint) is typing.Annotated and not _is_array(hint)
    return typing.get_args(hint)[0] if is_annotated else hint


def _item_of(hint: Any) -> Any:
    """Returns the type of the items of a list, or `None`."""
    if typing.get_origin(hint) in (list, collections.abc.Sequence) and (of := typing.get_args(hint)):
        return of[0]
    return None


def _is_bare_list(hint: Any) -> bool:
    return (hint is list or typing.get_origin(hint) is list) and _item_of(hint) is None


def _is_array(hint: Any) -> bool:
    numpy = sys.modules.get("numpy")
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _is_array(typing.get_args(hint)[0])
    return numpy is not None and (hint is numpy.ndarray or origin is numpy.ndarray)


def _is_image(hint: Any) -> bool:
    return inspect.isclass(hint) and (hint.__module__, hint.__name__) == ("PIL.Image", "Image")


def _is_state(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, State)


def _fields_of(hint: Any) -> list[tuple[str, Any, bool]] | None:
    """Returns name, type and whether a value may miss, for each field of a class of fields."""
    if not inspect.isclass(hint):
        return None
    if typing.is_typeddict(hint):
        needed: frozenset[str] = getattr(hint, "__required_keys__", frozenset())
        return [(name, of, name not in needed) for name, of in _hinted(hint)]
    if issubclass(hint, msgspec.Struct):
        optional = {field.name for field in msgspec.structs.fields(hint) if not field.required}
    elif dataclasses.is_dataclass(hint):
        optional = {field.name for field in dataclasses.fields(hint) if not _is_needed(field)}
    elif hasattr(hint, "model_fields"):  # pydantic.BaseModel
        optional = {name for name, field in hint.model_fields.items() if not field.is_required()}
        return [(name, of, name in optional) for name, of in _hinted(hint) if name in hint.model_fields]
    else:
        return None
    return [(name, of, name in optional) for name, of in _hinted(hint)]


def _is_needed(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _hinted(of: Any) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(of, include_extras=True).items():
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            yield name, typing.get_args(hint)[0]
        elif typing.get_origin(hint) is not typing.ClassVar:
            yield name, hint


def _shown(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))
