"""Large JSON is decoded as small JSON is, in pieces; and no text makes much more memory than it has bytes."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from qinfer.errors import InvalidRequest, MalformedJson, PayloadTooLarge, QinferError
from qinfer.tensors import to_numpy
from qinfer.wire.json_pieces import GIANT_BYTES, LONG_BYTES, Document, JsonBounds, LongArray
from qinfer.wire.json_scan import LARGE_BYTES, VALUE_BYTES, WINDOW_BYTES, Scan, check_depth, check_size, long_arrays
from qinfer.wire.kserve_json import decode_infer

PADDING = " " * LARGE_BYTES
"""Makes any text a large one."""


def body(data: str, datatype: str = "FP32", shape: str = "[1]", name: str = "x") -> bytes:
    return f'{{"inputs":[{{"name":"{name}","shape":{shape},"datatype":"{datatype}","data":{data}}}]{PADDING}}}'.encode()


def decoded(text: bytes, bounds: JsonBounds = JsonBounds()) -> Any:  # noqa: B008 - a tuple
    request, _ = decode_infer(text, None, "m", 0, bounds)
    return to_numpy(request.inputs[0]).tolist()


def flat(count: int, chance: random.Random, datatype: str) -> list[Any]:
    make: Mapping[str, Callable[[], Any]] = {
        "FP64": lambda: chance.choice((0.0, 1.5, -2.25e-300, 1e300, chance.random())),
        "INT64": lambda: chance.choice((0, -1, 2**62, chance.randint(-9, 9))),
        "UINT8": lambda: chance.randint(0, 255),
        "BOOL": lambda: chance.random() < 0.5,
        "BYTES": lambda: chance.choice(("", "a", '"', "\\", '\\"', "[1,2", "}", "é", "😀", "\n", "x" * 100)),
    }
    return [make[datatype]() for _ in range(count)]


@pytest.mark.parametrize("datatype", ["FP64", "INT64", "UINT8", "BOOL", "BYTES"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_array_is_what_it_says(datatype: str, *, ascii_only: bool) -> None:
    data = flat(300_000, random.Random(datatype), datatype)

    text = body(json.dumps(data, ensure_ascii=ascii_only), datatype, f"[{len(data)}]")

    expected = [one.encode() for one in data] if datatype == "BYTES" else data
    assert decoded(text) == expected


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", ":")])
def test_nested_data_is_flattened_in_order(separators: tuple[str, str]) -> None:
    data = [[[row, column, 0.5] for column in range(300)] for row in range(300)]

    text = body(json.dumps(data, separators=separators), "FP64", "[300,300,3]")

    assert decoded(text) == data


def test_nested_data_may_have_empty_arrays() -> None:
    data = "[" + ",".join(["[],[1,[2]]"] * 100_000) + "]"

    assert decoded(body(data, "INT32", "[200000]")) == [1, 2] * 100_000


@pytest.mark.parametrize("size", [3 * WINDOW_BYTES, 9 * WINDOW_BYTES])
@pytest.mark.parametrize("unit", ["a", "é", "😀", '\\"', "\\\\", "\\u00e9", "\\ud83d\\ude00", "a😀\\ud83d\\ude00\\n"])
def test_a_giant_string_is_what_it_says(unit: str, size: int) -> None:
    text = '"' + unit * (size // len(unit.encode())) + '"'

    data = decoded(body(f'["first",{text},"", {text}]', "BYTES", "[4]"))

    assert data == [b"first", json.loads(text).encode(), b"", json.loads(text).encode()]


@pytest.mark.parametrize(
    "text", ['"\\ud83d"', '"\\ud83d\\u0041"', '"\\udc00"', '"\\x"', '"\\u12g"', '"\n"', '"\udcff"']
)
def test_a_giant_string_that_is_broken_is_refused(text: str) -> None:
    giant = ('"' + "a" * (GIANT_BYTES + 1) + text[1:-1] + "a" * (2 * WINDOW_BYTES) + '"').encode(
        "utf-8", "surrogateescape"
    )
    small = text.encode("utf-8", "surrogateescape")

    for one in (giant, small):
        with pytest.raises(QinferError):
            decoded(body("[@]", "BYTES", "[1]").replace(b"@", one))


LONG = ",".join(["1"] * WINDOW_BYTES)
BROKEN = {
    "no value before a comma": f"[,{LONG}]",
    "no value after a comma": f"[{LONG},]",
    "two commas": f"[{LONG},,{LONG}]",
    "no comma": f"[{LONG} {LONG}]",
    "a trailing comma in an array": f"[[1,],{LONG}]",
    "an array that is not closed": f"[[{LONG}]",
    "a word": f"[{LONG},nil,{LONG}]",
    "a backslash": f"[{LONG},\\,{LONG}]",
    "a string that is not closed": f'[{LONG},"1,{LONG}]',
    "a brace": f"[{LONG},{{,{LONG}]",
    "a value before an array": f"[2[{LONG}],{LONG}]",
    "a value behind an array": f"[[{LONG}]2,{LONG}]",
    "a comma behind a bracket": f"[2[,{LONG}],[{LONG}]]",
    "a comma before a bracket": f"[[{LONG},]2,[{LONG}]]",
    "a value and spaces before an array": f"[2 [{LONG}],{LONG}]",
    "spaces and a comma": f"[{' ' * WINDOW_BYTES},{LONG}]",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_long_array_that_is_broken_is_refused(data: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(data)

    for count in (data.count(",") - 1, data.count(","), data.count(",") + 1):
        with pytest.raises((InvalidRequest, MalformedJson, PayloadTooLarge)):
            decoded(body(data, "INT32", f"[{count}]"))


@pytest.mark.parametrize("place", ['"junk":@,', '"outputs":@,', '"parameters":{"a":@},', '"id":@,'])
def test_an_array_in_another_place_is_checked_too(place: str) -> None:
    good = body("[1]", "INT32").decode()

    for data in (f"[{LONG},,1]", f'["a",{LONG[:-1]}]'):
        with pytest.raises((InvalidRequest, MalformedJson)):
            decoded(good.replace('{"inputs"', "{" + place.replace("@", data) + '"inputs"', 1).encode())
    assert decoded(good.replace('{"inputs"', f'{{"junk":[{LONG}],"inputs"', 1).encode()) == [1]


def named_by_the_parser(text: bytes) -> str:
    """Returns what the parser says of a text at once."""
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text)
    return re.escape(str(caught.value))


def test_the_error_names_the_place_in_the_whole_text() -> None:
    text = body(f"[{LONG},nil,{LONG}]", "INT32", f"[{2 * WINDOW_BYTES + 1}]")

    with pytest.raises(InvalidRequest, match=named_by_the_parser(text)):
        decoded(text)


def test_the_error_behind_an_array_names_its_place_too() -> None:
    text = body(f"[{LONG}]", "INT32", f"[{WINDOW_BYTES}]").replace(b"]}]", b"]}; ]")

    with pytest.raises(InvalidRequest, match=named_by_the_parser(text)):
        decoded(text)


@pytest.mark.parametrize("datatype", ["INT32", "BYTES"])
def test_more_elements_than_the_shape_takes_are_not_decoded(datatype: str) -> None:
    data = "[" + ",".join(['"a"' if datatype == "BYTES" else "1"] * 500_000) + "]"

    with pytest.raises(InvalidRequest, match="input 'x' has 500000 elements in its data, and its shape takes 1"):
        decoded(body(data, datatype))


def test_tensors_may_take_no_more_than_a_request() -> None:
    data = "[" + ",".join(["1"] * 500_000) + "]"

    with pytest.raises(PayloadTooLarge, match="takes 4000000 bytes as a tensor, and 3999999 are left"):
        decoded(body(data, "INT64", "[500000]"), JsonBounds(nbytes=3_999_999))


def test_strings_may_take_no_more_than_a_request() -> None:
    data = "[" + ",".join(['"aaaa"'] * 100_000) + "]"

    with pytest.raises(PayloadTooLarge, match="are left of the limit for a request's inputs"):
        decoded(body(data, "BYTES", "[100000]"), JsonBounds(nbytes=500_000))


def test_many_objects_are_refused_before_they_are_parsed() -> None:
    text = b'{"inputs":[' + b"{}," * 500_000 + b"{}]}"

    with pytest.raises(PayloadTooLarge, match=r"has at least .* values, more than the 131072 that it may have"):
        decoded(text)


def test_depth_is_that_of_the_whole_text() -> None:
    deep = "[" * 98 + f"[{LONG}]" + "]" * 98

    with pytest.raises(InvalidRequest, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        decoded(body(deep, "INT32", f"[{WINDOW_BYTES}]"))


def test_a_document_says_what_it_held() -> None:
    value = {
        "a": [1] * LONG_BYTES,
        "b": ["x", [2] * 3],
        "c": "d" * (GIANT_BYTES + 1),
        "e": {"f": [[], "g" * LONG_BYTES]},
    }

    document = Document(json.dumps(value).encode(), JsonBounds())

    read = document.value
    assert isinstance(read["a"], LongArray)
    assert read["a"].top == LONG_BYTES
    assert read["b"] == value["b"]
    assert isinstance(read["c"], LongArray)
    assert read["c"].is_text
    assert read["e"]["f"].top == 2
    document.check()


def structure(text: bytes) -> bytes:
    """Returns the structure of a text, by the slow way."""
    found, inside, escaped = bytearray(), False, False
    for byte in text:
        was_escaped, escaped = escaped, byte == 0x5C and not escaped
        if byte == 0x22 and not was_escaped:
            inside = not inside
        elif not inside and byte in b",[]{}":
            found.append(byte)
    return bytes(found)


@pytest.mark.parametrize("seed", range(30))
def test_structure_is_found_wherever_windows_end(seed: int) -> None:
    chance = random.Random(seed)
    text = bytes(chance.choices(b'\\\\\\""",[]{}a ', k=chance.randint(0, 400)))
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(0, 40)))

    scan = Scan()
    marks = [scan.marks(text[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert b"".join(one.kinds.tobytes() for one in marks) == structure(text)


def arrays(text: bytes) -> list[tuple[int, int]]:
    """Returns where the outermost arrays are between two braces, by the slow way."""
    found, opened, inside, escaped = list[tuple[int, int]](), list[int](), False, False
    for at, byte in enumerate(text.decode()):
        if escaped or byte == "\\":
            escaped = not escaped
        elif byte == '"':
            inside = not inside
        elif inside:
            continue
        elif byte in "{}":
            opened.clear()
        elif byte == "[":
            opened.append(at)
        elif byte == "]" and opened:
            begin = opened.pop()
            if not opened:
                found.append((begin, at + 1))
    return found


def any_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.4:
        return chance.choice((1, "a,b", '"]', None, "\\"))
    if kind < 0.8:
        return [any_value(chance, depth + 1) for _ in range(chance.randint(0, 5))]
    return {str(number): any_value(chance, depth + 1) for number in range(chance.randint(0, 4))}


@pytest.mark.parametrize("seed", range(60))
def test_arrays_are_found_wherever_windows_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr("qinfer.wire.json_scan.WINDOW_BYTES", chance.choice((1, 3, 7, 50, 1000)))
    value = [any_value(chance) for _ in range(chance.randint(0, 9))] + [{}]
    text = json.dumps(value, separators=chance.choice(((",", ":"), (", ", ": ")))).encode()
    least = chance.choice((1, 2, 10, 40))

    spans = long_arrays(text, least, 100)

    expected = [pair for pair in arrays(text) if pair[1] - pair[0] >= least]
    assert [(span.begin, span.end) for span in spans] == expected
    values = [json.loads(text[begin:end]) for begin, end in expected]
    assert [span.top + 1 for span, value in zip(spans, values, strict=True) if value] == [len(v) for v in values if v]


def test_the_size_of_a_document_counts_its_values() -> None:
    text = b"[" + b"{}," * 200_000 + b"{}]"

    assert check_size(text, 100, 2**30) == len(text) + VALUE_BYTES * (1 + 200_000 + 200_002)


@pytest.mark.parametrize(("depth", "is_refused"), [(100, False), (101, True)])
def test_the_depth_of_a_large_text(depth: int, *, is_refused: bool) -> None:
    text = b'{"a":"' + b"[" * LARGE_BYTES + b'\\"[","b":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    if is_refused:
        with pytest.raises(InvalidRequest, match="nesting depth"):
            check_depth(text, 100)
    else:
        check_depth(text, 100)


def test_an_input_is_checked_before_its_data_is_decoded() -> None:
    said = []

    def check(name: str, datatype: str, shape: Sequence[int]) -> None:
        said.append((name, datatype, tuple(shape)))
        raise InvalidRequest("refused by its shape")

    with pytest.raises(InvalidRequest, match="refused by its shape"):
        decoded(body(f"[{LONG},,]", "INT32", "[7,3]"), JsonBounds(check=check))
    assert said == [("x", "INT32", (7, 3))]
