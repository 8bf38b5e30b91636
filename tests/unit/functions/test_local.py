"""Functions in this process, by `qinfer.local`: each type with valid, empty, wrong, huge and foreign values."""

import dataclasses
import io
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
from PIL import Image

import qinfer
from qinfer.errors import InferenceFailed, InvalidRequest
from qinfer.functions.hints import TensorPort
from qinfer.functions.values import MAX_PIXELS, decode, to_array


def echo_of(hint: Any) -> Any:
    def echo(x: hint) -> hint:
        return x

    return qinfer.local(echo)


@pytest.mark.parametrize(
    ("hint", "values", "wrong"),
    [
        (str, ["hi", "", "a" * 10**6, "日本 🙂\0"], [b"a", 1, None]),
        (bytes, [b"hi", b"", b"a" * 10**6, b"\xff\0"], ["a", 1, None]),
        (int, [1, 0, 2**63 - 1, -(2**63), np.int32(5)], [2**63, 1.5, "1", True, None]),
        (float, [1.5, 0.0, 1e308, 3, np.float32(0.5)], ["1", True, None, b""]),
        (bool, [True, False, np.bool_(True)], [1, "true", None]),
        (Annotated[np.ndarray, "FP32", 2], [[1.5, 2], np.zeros(2, np.float64)], [[1], [[1, 2]], ["a", "b"], None]),
        (Annotated[np.ndarray, "INT8", -1], [[1, 2, 3], np.zeros(0, np.int8)], [[1.5], 3, [[1]]]),
    ],
)
def test_values_of_a_type_pass_unchanged_and_others_are_refused(hint: Any, values: list[Any], wrong: list[Any]) -> None:
    echo = echo_of(hint) if not hasattr(hint, "__metadata__") else None

    for value in values:
        if echo is not None:
            assert echo(value) == value
        else:
            assert _array_echo(hint)("a", value).tolist() == np.asarray(value).tolist()
    for value in wrong:
        with pytest.raises(InferenceFailed, match="input 'x' has items of"):
            _ = echo(value) if echo is not None else _array_echo(hint)("a", value)


def _array_echo(hint: Any) -> Any:
    def echo(name: str, x: hint) -> hint:
        return x

    return qinfer.local(echo)


def test_a_batch_of_texts_gives_an_array_for_each() -> None:
    class Embed:
        def setup(self, device: qinfer.Device) -> None:
            self.device = device

        def predict(self, text: list[str]) -> Annotated[np.ndarray, "FP32", 2]:
            return np.array([[len(each), self.device.number] for each in text], np.float32)

    assert qinfer.local(Embed)(["hi", ""]).tolist() == [[2, 0], [0, 0]]
    assert qinfer.local(Embed)([]).shape == (0,)


@pytest.mark.parametrize("given", ["abc", b"abc", 5])
def test_one_item_is_no_batch(given: Any) -> None:
    def upper(text: list[str]) -> list[str]:
        return [each.upper() for each in text]

    with pytest.raises(InvalidRequest, match=r"input 'text' is a batch; write \["):
        qinfer.local(upper)(given)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1 << 20000], ids=["above", "below", "huge"])
def test_a_number_outside_int64_is_named(value: int) -> None:
    def large(text: str) -> int:
        return value

    with pytest.raises(InferenceFailed, match=r"items of int, got the number -?0x[18]00.*outside INT64"):
        qinfer.local(large)("a")


def test_a_result_that_does_not_fit_is_refused() -> None:
    def few(text: list[str]) -> list[int]:
        return [1]

    def wrong(text: list[str]) -> Annotated[np.ndarray, "FP32", 2]:
        return np.zeros((len(text), 3), np.float32)

    def doubles(text: list[str]) -> Annotated[np.ndarray, "INT32"]:
        return np.full(len(text), 0.5)

    with pytest.raises(InferenceFailed, match="output 'output' has 1 items for a batch of 2"):
        qinfer.local(few)(["a", "b"])
    with pytest.raises(InferenceFailed, match=r"items of FP32\[2\], got float32 of shape \[3\]"):
        qinfer.local(wrong)(["a"])
    with pytest.raises(InferenceFailed, match=r"items of INT32\[\], got float64"):
        qinfer.local(doubles)(["a"])


class Review(msgspec.Struct):
    title: str
    stars: Annotated[int, msgspec.Meta(ge=1)] = 3


class Checked(pydantic.BaseModel):
    title: str
    stars: Annotated[int, pydantic.Field(ge=1)] = 3


@dataclasses.dataclass
class Score:
    label: str
    value: float


def test_classes_of_fields_check_their_values_and_take_defaults() -> None:
    def rate(review: Review) -> Score:
        return Score(review.title, review.stars / 2)

    assert qinfer.local(rate)(Review("é", 5)) == Score("é", 2.5)
    with pytest.raises(InvalidRequest, match="'review' is not valid: Expected `int` >= 1"):
        qinfer.local(rate)(Review("a", 0))


def test_models_of_pydantic_are_checked() -> None:
    def rate(review: list[Checked]) -> list[Score]:
        return [Score(each.title, each.stars) for each in review]

    assert qinfer.local(rate)([Checked(title="a")]) == [Score("a", 3)]
    with pytest.raises(InvalidRequest, match="'review' is not valid"):
        qinfer.local(rate)([Checked.model_construct(title="a", stars=0)])


class Counted(TypedDict):
    length: list[int]
    upper: list[str]


def test_a_typed_dict_of_columns_is_several_outputs() -> None:
    def count(text: list[str]) -> Counted:
        return {"length": [len(each) for each in text], "upper": [each.upper() for each in text]}

    def forgets(text: list[str]) -> Counted:
        return {"length": [1]}  # type: ignore[typeddict-item]

    assert qinfer.local(count)(["é"]) == {"length": [1], "upper": ["É"]}
    with pytest.raises(InferenceFailed, match="the result has no 'upper', which its type Counted has"):
        qinfer.local(forgets)(["a"])


def test_streams_coroutines_and_states() -> None:
    def words(prompt: str, most: int = 2) -> Iterator[str]:
        for number in range(most):
            yield f"{prompt}{number}"

    async def later(prompt: str) -> AsyncIterator[str]:
        yield prompt

    async def upper(text: list[str]) -> list[str]:
        return [each.upper() for each in text]

    def add(number: int, state: qinfer.State) -> int:
        state["sum"] = state.get("sum", 0) + number
        total: int = state["sum"]
        return total

    total = qinfer.local(add)

    assert list(qinfer.local(words)("a")) == ["a0", "a1"]
    assert list(qinfer.local(words)("a", most=1)) == ["a0"]
    assert list(qinfer.local(later)("a")) == ["a"]
    assert qinfer.local(upper)(["a"]) == ["A"]
    assert [total(2), total(3)] == [2, 5]


IMAGE = TensorPort(name="x", datatype="BYTES", kind="image")


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    row = b"\0" + bytes((width + 7) // 8)
    body = zlib.compress(row * min(height, 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def images(content: bytes) -> Any:
    array = np.empty((1, 1), object)
    array[0, 0] = content
    return decode(IMAGE, array)


def test_images_are_decoded_from_jpeg_and_png() -> None:
    jpeg = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(jpeg, "JPEG")

    assert [images(jpeg.getvalue())[0].size, images(png(5, 4))[0].size] == [(3, 2), (5, 4)]
    assert images(to_array(IMAGE, images(png(5, 4)))[0, 0])[0].size == (5, 4)


def test_images_that_are_huge_broken_or_of_another_kind_are_refused() -> None:
    gif = io.BytesIO()
    Image.new("P", (3, 2)).save(gif, "GIF")
    side = int(MAX_PIXELS**0.5) + 1

    for content in (b"", b"no image", gif.getvalue(), png(500, 90)[:50]):
        with pytest.raises(InvalidRequest, match="no readable JPEG or PNG"):
            images(content)
    with pytest.raises(InvalidRequest, match=f"an image of {side}x{side} pixels; the most is {MAX_PIXELS}"):
        images(png(side, side))


def test_text_that_is_not_utf_8_is_refused() -> None:
    array = np.array([[b"ok"], [b"a\xff"]], object)

    with pytest.raises(InvalidRequest, match="input 'x' has text that is not UTF-8 at byte 1"):
        decode(TensorPort(name="x", datatype="BYTES", kind="str"), array)
