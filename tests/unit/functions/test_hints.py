"""What type hints say of a model, and the errors for what they do not say."""

# mypy: disable-error-code="empty-body, name-defined, no-untyped-def, valid-type"

import dataclasses
import functools
import re
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
from PIL import Image

import qinfer
from qinfer.functions.hints import HintError, Signature, TensorPort, read_function


class Row(msgspec.Struct):
    title: str
    stars: int = 3


class Parsed(pydantic.BaseModel):
    title: str
    stars: int = 3


@dataclasses.dataclass
class Score:
    label: str
    value: float


class Columns(TypedDict):
    label: list[str]
    value: Annotated[np.ndarray, "FP32"]


class Partial(TypedDict):
    title: str
    stars: NotRequired[int]


@dataclasses.dataclass
class Empty: ...


@dataclasses.dataclass
class Unresolved:
    title: "Nowhere"  # noqa: F821


def ports(call: Any) -> Signature:
    return read_function(call).signature


@pytest.mark.parametrize(
    ("hint", "kind", "datatype", "shape"),
    [
        (str, "str", "BYTES", ()),
        (bytes, "bytes", "BYTES", ()),
        (int, "int", "INT64", ()),
        (float, "float", "FP64", ()),
        (bool, "bool", "BOOL", ()),
        (Image.Image, "image", "BYTES", ()),
        (Annotated[np.ndarray, "FP32", 2, -1], "array", "FP32", (2, -1)),
        (Annotated[np.ndarray, "INT8"], "array", "INT8", ()),
    ],
)
def test_a_hint_is_a_port_of_an_item_and_of_a_batch(
    hint: Any, kind: Any, datatype: str, shape: tuple[int, ...]
) -> None:
    many = hint if kind == "array" else list[hint]

    def one(x: hint, y: str) -> hint: ...
    def batch(x: many, y: list[str]) -> many: ...

    expected = TensorPort(name="x", datatype=datatype, kind=kind, shape=shape)
    assert (ports(one).inputs[0], read_function(one).is_batched) == (expected, False)
    assert (ports(batch).inputs[0], read_function(batch).is_batched) == (expected, True)
    assert ports(one).outputs == ports(batch).outputs == (msgspec.structs.replace(expected, name="output"),)


@pytest.mark.parametrize("record", [Row, Parsed, Partial])
def test_fields_of_a_class_are_inputs_and_those_with_defaults_are_optional(record: Any) -> None:
    def rate(review: record) -> Score: ...

    title, stars = ports(rate).inputs

    assert (title.name, title.optional) == ("title", False)
    assert (stars.name, stars.kind, stars.optional) == ("stars", "int", True)
    assert [(port.name, port.kind) for port in ports(rate).outputs] == [("label", "str"), ("value", "float")]


def test_a_result_of_a_batch_is_columns_or_rows() -> None:
    def columns(text: list[str]) -> Columns: ...
    def rows(text: list[str]) -> list[Score]: ...

    assert [port.name for port in ports(columns).outputs] == ["label", "value"]
    assert [port.name for port in ports(rows).outputs] == ["label", "value"]
    assert (read_function(columns).result.is_columns, read_function(rows).result.is_columns) == (True, False)


def test_string_annotations_defaults_streams_and_states() -> None:
    def words(prompt: "str", most: "int | None" = None) -> "Iterator[str]": ...
    async def later(prompt: str) -> AsyncIterator[str]:
        yield prompt

    def count(number: int, memory: qinfer.State) -> int: ...

    assert [port.optional for port in ports(words).inputs] == [False, True]
    assert ports(words).is_decoupled
    assert read_function(later).is_async
    assert (ports(count).has_state, [port.name for port in ports(count).inputs]) == (True, ["number"])


def test_names_come_from_the_object_or_the_decorator() -> None:
    @qinfer.model
    class TextEmbed:
        def predict(self, text: list[str]) -> list[str]: ...

    @qinfer.model(name="x", output="vector")
    def other(text: str) -> str: ...

    assert read_function(TextEmbed).options.name == "text_embed"
    assert (read_function(other).options.name, ports(other).outputs[0].name) == ("x", "vector")


def bad_calls() -> Iterator[tuple[str, Any, str]]:  # noqa: C901, PLR0915  a table
    def untyped(text) -> str: ...
    def no_result(text: str): ...
    def no_inputs() -> str: ...
    def mixed(text: list[str], k: int = 3) -> list[str]: ...
    def bare(x: np.ndarray) -> list[str]: ...
    def wrong_dims(x: Annotated[np.ndarray, "FP32", 0]) -> list[str]: ...
    def unknown(x: dict[str, str]) -> str: ...
    def nested(x: str) -> list[int]: ...
    def one_result(x: list[str]) -> str: ...
    def unresolved(x: "Nowhere") -> str: ...  # noqa: F821
    def rest(*x: str) -> str: ...
    def may_be_none(x: str | None) -> str: ...
    def streamed(x: list[str]) -> Iterator[str]: ...
    def streamed_state(x: str, state: qinfer.State) -> Iterator[str]: ...
    def module(x: Image) -> str: ...
    def bare_list(x: list) -> str: ...  # type: ignore[type-arg]
    def bare_result(x: list[str]) -> list: ...  # type: ignore[type-arg]
    def bare_stream(x: str) -> Iterator: ...  # type: ignore[type-arg]
    def no_python(x: "str |") -> str: ...  # noqa: F722
    def no_fields(x: str) -> Empty: ...
    def unresolved_field(x: Unresolved) -> str: ...

    yield "untyped", untyped, "'text' has no type; write text: list[str]"
    yield "no_result", no_result, "its result has no type"
    yield "no_inputs", no_inputs, "it takes no input"
    yield "mixed", mixed, "'k' is one item and 'text' is a batch; write k: list[…]"
    yield "bare", bare, "the array 'x' needs a datatype; write Annotated"
    yield "wrong_dims", wrong_dims, "the array 'x' has dimensions [0]"
    yield "unknown", unknown, "a model takes and gives str, bytes"
    yield "nested", nested, "'output' is a list within an item"
    yield "one_result", one_result, "write list[str]"
    yield "unresolved", unresolved, "the type 'Nowhere' is not known here"
    yield "rest", rest, "names no inputs"
    yield "may_be_none", may_be_none, "give it the default None"
    yield "streamed", streamed, "takes one item"
    yield "streamed_state", streamed_state, "a model with a State has one response; return a value, not Iterator"
    yield "module", module, "Image.Image"
    yield "bare_list", bare_list, "'x' is a list of no type; write list[str]"
    yield "bare_result", bare_result, "'output' is a list of no type; write list[str]"
    yield "bare_stream", bare_stream, "write Iterator[str]"
    yield "no_python", no_python, "a type in quotes is no Python: "
    yield "no_fields", no_fields, "class Empty has no fields"
    yield "unresolved_field", unresolved_field, "the type 'Nowhere' is not known here"


@pytest.mark.parametrize(("call", "text"), [case[1:] for case in bad_calls()], ids=[case[0] for case in bad_calls()])
def test_what_hints_do_not_say_is_an_error_with_its_line_and_the_remedy(call: Any, text: str) -> None:
    with pytest.raises(HintError) as caught:
        read_function(call)

    assert text in caught.value.message
    assert caught.value.message.startswith(f"{__file__}:{call.__code__.co_firstlineno}: {call.__name__}: ")


def test_an_error_names_the_line_of_the_argument() -> None:
    def predict(
        text: str,
        more: object,
    ) -> str: ...

    with pytest.raises(HintError) as caught:
        read_function(predict)

    assert f":{predict.__code__.co_firstlineno + 2}: " in caught.value.message


def test_an_object_that_is_no_plain_function_and_no_class_with_predict_is_refused_with_its_line() -> None:
    class Nothing: ...

    static = staticmethod(_named("f"))
    cached = functools.lru_cache(_named("f"))

    for target, text in (
        (Nothing, "class Nothing has no method predict"),
        (static, "it is a staticmethod; write @qinfer.model above a plain function"),
        (cached, "it is a _lru_cache_wrapper"),
    ):
        with pytest.raises(HintError, match=rf"{re.escape(__file__)}:\d+: \w+: {text}"):
            read_function(target)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size of model 'f' must be an integer of 1 or more, got 0"):
        qinfer.model(max_batch_size=0)(_named("f"))
    with pytest.raises(ValueError, match=r"instances of model 'f' must be an integer of 1 or more, got 1\.5"):
        qinfer.model(instances=1.5)(_named("f"))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="timeout_s of model 'f' must be 0 or more, got '3'"):
        qinfer.model(timeout_s="3")(_named("f"))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="has no option 'batch'; it has name, output, max_batch_size"):
        qinfer.model(batch=3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="a name has letters"):
        qinfer.model(name="a/b")(_named("f"))
    with pytest.raises(TypeError, match="stands above a function or a class, got int"):
        qinfer.model(3)  # type: ignore[call-overload]


def _named(name: str) -> Any:
    def call(text: str) -> str:
        return text

    call.__name__ = name
    return call
