"""The table of hints: each with valid, empty, wrong, huge and foreign values, as plain JSON through the server."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from qinfer.testing import Served, serve
from tests.support import typed_app

HUGE = "日本 🙂" * 100_000


def png(width: int, height: int) -> str:
    written = io.BytesIO()
    Image.new("1", (width, height)).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


VALID = [
    ("text", ["hi", "", "日本 🙂\0\n\u202e", HUGE]),
    ("texts", ["hi", "", "é\0", HUGE]),
    ("raw", ["YQ==", "", base64.b64encode(b"\xff\0" * 100_000).decode()]),
    ("whole", [0, -1, 2**63 - 1, -(2**63)]),
    ("real", [0.5, 0, -1e308, 5e-324, 2**53]),
    ("truth", [True, False]),
    ("vector", [[0.5, -1.0], [0, 2.0**127]]),
    ("small", [[1], [-128, 127], [0] * 10_000]),
    ("half", [0.5, -2, 0, 65504, 2**-24]),
    ("brain", [[0.5, -2.0], [0, 2.0**127]]),
    ("record", ["hi", "", "日本"]),
]
"""Model → values that come back."""
WRONG = [
    ("text", 1, "field 'x' must be a string"),
    ("text", None, "field 'x' is missing"),
    ("text", [], "field 'x' is empty"),
    ("text", [["a"]], "got lists nested 2 deep"),
    ("texts", ["a", 1], "field 'x' must be a string"),
    ("texts", {"a": 1}, "field 'x' must be a string"),
    ("raw", "é", "field 'x' must be"),
    ("raw", "YQ", "field 'x' must be base64"),
    ("raw", 1, "field 'x' must be a base64 string"),
    ("whole", 2**63, "field 'x' must be an integer"),
    ("whole", 1.5, "field 'x' must be an integer"),
    ("whole", "1", "field 'x' must be an integer"),
    ("whole", True, "field 'x' must be an integer"),
    ("real", "1", "field 'x' must be a number"),
    ("real", True, "field 'x' must be a number"),
    ("truth", 1, "field 'x' must be a boolean"),
    ("truth", "true", "field 'x' must be a boolean"),
    ("vector", [1.0], "field 'x' must be a list of numbers of shape [2]"),
    ("vector", ["a", "b"], "field 'x' must be a list of numbers of shape [2]"),
    ("vector", [1e39, 0], "outside the range of FP32"),
    ("vector", [], "field 'x' is empty"),
    ("small", [128], "outside the range of INT8"),
    ("small", [1.5], "field 'x' must be a list of integers of shape [-1]"),
    ("small", [[1], [1, 2]], "lists of different lengths"),
    ("half", 65520, "outside the range of FP16"),
    ("half", "0.5", "field 'x' must be a number"),
    ("half", True, "field 'x' must be a number"),
    ("brain", [1e39, 0], "outside the range of BF16"),
    ("picture", "YWJj", "no readable JPEG or PNG"),
    ("picture", "", "no readable JPEG or PNG"),
    ("picture", png(8001, 8001), "the most is 64000000"),
    ("picture", "é", "field 'x' must be"),
    ("record", 1, "field 'x' must be a string"),
    ("perhaps", 1, "field 'x' must be a string"),
]
"""Model, value, and the beginning of the refusal."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(typed_app.__file__) as server:
        yield server


def post(served: Served, model: str, **body: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{served.url}/models/{model}", json=body, timeout=60)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("model", "values"), VALID, ids=[model for model, _ in VALID])
def test_valid_values_come_back_alone_and_in_a_batch(served: Served, model: str, values: list[Any]) -> None:
    for value in values:
        status, answer = post(served, model, x=value)
        assert (status, answer.get("output")) == (200, value)
    if model != "small":  # of different lengths
        status, answer = post(served, model, x=values)
        assert (status, answer.get("output")) == (200, values)


@pytest.mark.parametrize(("model", "value", "text"), WRONG)
def test_a_wrong_value_is_refused_by_name(served: Served, model: str, value: Any, text: str) -> None:
    status, answer = post(served, model, x=value)

    assert status == 400, answer
    assert text in answer["error"]


def test_sixteen_bit_floats_are_the_nearest(served: Served) -> None:
    assert post(served, "half", x=[0.1, 65519]) == (200, {"output": [0.0999755859375, 65504]})
    assert post(served, "brain", x=[0.1, 1]) == (200, {"output": [0.099609375, 1]})


def test_optional_inputs_and_fields_have_defaults(served: Served) -> None:
    assert post(served, "perhaps", x="a") == (200, {"output": "a again"})
    assert post(served, "perhaps", x=["a"], twice=[False]) == (200, {"output": ["a"]})
    assert post(served, "perhaps", x=None) == (400, {"error": "no field is given; send one of x, twice"})
    assert post(served, "perhaps", twice=False) == (200, {"output": "nothing"})
    assert post(served, "record", x="a") == (200, {"output": "a", "stars": 3})
    assert post(served, "record", x="a", stars=0)[0] == 400


def test_an_image_is_decoded(served: Served) -> None:
    assert post(served, "picture", x=png(5, 4)) == (200, {"output": "5x4"})
