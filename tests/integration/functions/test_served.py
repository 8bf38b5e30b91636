"""Functions of an app, served by the real gateway and worker: HTTP v2, gRPC, plain JSON, streams and sequences."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from PIL import Image

import qinfer
from qinfer.errors import InvalidRequest
from qinfer.testing import Served, serve
from tests.support import functions_app

APP = functions_app.__file__


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(APP) as server:
        yield server


@pytest.fixture
def post(served: Served) -> Any:
    def send(model: str, **body: Any) -> Any:
        answer = httpx.post(f"{served.url}/models/{model}", json=body)
        return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])

    return send


def png(width: int, height: int) -> bytes:
    written = io.BytesIO()
    Image.new("L", (width, height)).save(written, "PNG")
    return written.getvalue()


def test_a_batch_of_texts_by_plain_json_v2_and_grpc(served: Served, post: Any) -> None:
    expected = [[2.0, 0.0], [1.0, 1.0]]
    text = tritonclient.grpc.InferInput("text", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([["hé"], ["a"]], object))

    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        by_grpc = client.infer("embed", [text]).as_numpy("embedding").tolist()
    by_http = served.client.infer("embed", {"text": np.array([["hé"], ["a"]], object)})["embedding"].tolist()

    assert by_grpc == by_http == expected
    assert post("embed", text=["hé", "a"]) == {"embedding": expected}
    assert post("embed", text="a") == {"embedding": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("model", "body", "headers"),
    [
        ("embed", b'{"text": ["h\xc3\xa9", "a"]}', {}),
        ("embed", b'{"text": "a"}', {"accept-encoding": "gzip"}),
        ("embed", b'{"text": ["%b"]}' % (b"a" * 60_000), {}),
        ("embed", b'{"text": 1}', {}),
        ("embed", b'{"text": ["a"]', {}),
        ("embed", b"[]", {"inference-header-content-length": "1"}),
        ("embed", b'{"text": ["a"]}', {"request-timeout": "x"}),
        ("embed", b'{"text": ["a"]}', {"accept": "application/json; strict=true"}),
        ("rate", b'{"title": "bad"}', {}),
        ("rate", b'{"title": "a\\n", "stars": 4}', {}),
        ("rate", b'{"title": ["a", "\\u0062"], "stars": [4, 1e0]}', {}),
        ("rate", b'{"title": "a", "t\\u0069tle": "b"}', {}),
        ("size", b'{"image": "YWJj"}', {}),
        ("none", b'{"text": "a"}', {}),
        ("write", b'{"prompt": "a"}', {}),
        ("total", b'{"number": 1, "sequence_id": 9, "sequence_start": true, "sequence_end": true}', {}),
    ],
)
def test_the_fast_path_answers_as_the_route(served: Served, model: str, body: bytes, headers: dict[str, str]) -> None:
    """Bodies in chunks are the route's."""
    answers = [
        httpx.post(f"{served.url}/models/{model}", content=content, headers=headers) for content in (body, iter([body]))
    ]

    fast, route = ((one.status_code, one.content, one.headers.get("content-type")) for one in answers)
    assert fast == route
    assert all("qinfer-request-id" in one.headers for one in answers)


def test_a_request_of_more_items_than_a_batch_is_answered(post: Any) -> None:
    assert len(post("embed", text=["a"] * 100)["embedding"]) == 100


def test_the_configuration_says_all_that_hints_say(served: Served) -> None:
    config, write = served.client.config("embed"), served.client.config("write")

    assert config["max_batch_size"] == 32
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["input"]] == [("text", "TYPE_STRING", [1])]
    assert [(o["name"], o["data_type"], o["dims"]) for o in config["output"]] == [("embedding", "TYPE_FP32", [2])]
    assert (write["model_transaction_policy"]["decoupled"], write["max_batch_size"]) == (True, 0)
    assert [i["optional"] for i in write["input"]] == [False, True]


def test_fields_have_defaults_and_errors_name_them(post: Any) -> None:
    assert post("rate", title="é") == {"label": "É", "score": 1.5}
    assert post("rate", title=["a", "b"], stars=[4, 5]) == {"label": ["A", "B"], "score": [2.0, 2.5]}
    assert post("rate", title="a", stars="b")[0] == 400
    assert "field 'stars' must be an integer" in post("rate", title="a", stars="b")[1]
    assert "field 'title' is missing" in post("rate")[1]


def test_the_error_of_one_request_is_its_own(served: Served, post: Any) -> None:
    assert post("rate", title="bad") == (500, "ValueError: no bad titles")
    assert post("rate", title="good") == {"label": "GOOD", "score": 1.5}


def test_functions_and_generators_may_be_async(served: Served, post: Any) -> None:
    assert post("upper", text=["a", "é"]) == {"output": ["A", "É"]}
    with httpx.stream("POST", f"{served.url}/models/write_later", json={"prompt": "a"}) as answer:
        events = [line for line in answer.iter_lines() if line]

    assert events == ['data: {"output":"a"}', 'data: {"error":"RuntimeError: the pen broke"}']


def test_a_generator_is_a_stream(served: Served) -> None:
    with httpx.stream("POST", f"{served.url}/models/write", json={"prompt": "a"}) as answer:
        events = [line for line in answer.iter_lines() if line]
    by_v2 = [
        each["output"].tolist() for each in served.client.infer_stream("write", {"prompt": np.array(["b"], object)})
    ]

    assert events == ['data: {"output":"a 0"}', 'data: {"output":"a 1"}']
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert by_v2 == [[b"b 0"], [b"b 1"]]


def test_a_state_makes_sequences(post: Any) -> None:
    assert post("total", number=3, sequence_id=1, sequence_start=True) == {"output": 3}
    assert post("total", number=5, sequence_id=2, sequence_start=True) == {"output": 5}
    assert post("total", number=4, sequence_id=1, sequence_end=True) == {"output": 7}
    assert post("total", number=4)[0] == 400


def test_steps_of_a_sequence_are_the_only_calls(post: Any) -> None:
    starts = [post("calls", number=number, sequence_id=number, sequence_start=True) for number in (1, 2)]

    assert [*starts, post("calls", number=2, sequence_id=2)] == [{"output": 1}, {"output": 2}, {"output": 3}]


def test_images_are_decoded_and_bytes_are_base64(post: Any) -> None:
    image = base64.b64encode(png(5, 4)).decode()

    assert base64.b64decode(post("size", image=image)["output"]) == b"5x4 False"
    assert [base64.b64decode(each) for each in post("size", image=[image], thumbnail=[True])["output"]] == [b"5x4 True"]
    assert post("size", image="YWJj") == (400, "input 'image' has an image that is no readable JPEG or PNG")


def test_the_document_has_the_types_of_each_model(served: Served) -> None:
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]

    schema = paths["/models/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["example"] == {"text": ["a"]}
    assert httpx.post(f"{served.url}/models/embed", json=schema["example"]).status_code == 200


def test_a_stored_request_runs_a_function(served: Served) -> None:
    handle = served.client.submit("embed", {"text": np.array([["a"]], object)})

    assert served.client.result(handle)["embedding"].tolist() == [[1.0, 1.0]]


def test_input_that_is_not_text_is_refused(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="input 'text' has text that is not UTF-8"):
        served.client.infer("embed", {"text": np.array([[b"\xff"]], object)})


def test_a_function_calls_another_model(served: Served, post: Any) -> None:
    assert post("longest", texts="a longer word") == {"output": "longer"}
    assert post("longest", texts="")[0] == 500


def test_the_client_calls_a_model_as_a_function(served: Served) -> None:
    embed, rate, size = (served.client.model(name) for name in ("embed", "rate", "size"))

    assert embed(text=["h\u00e9", "a"])["embedding"].tolist() == [[2, 0], [1, 1]]
    assert embed(text="a")["embedding"].tolist() == [1, 1]
    assert rate(title="\u00e9", stars=None) == {"label": "\u00c9", "score": 1.5}
    assert rate(title=["a", "b"], stars=[2, 4])["score"].tolist() == [1, 2]
    assert size(image=png(3, 2)) == {"output": b"3x2 False"}


async def test_the_client_of_an_event_loop_does_so_too(served: Served) -> None:
    async with qinfer.AsyncClient(served.url) as client:
        assert await client.model("upper")(text="\u00e9") == {"output": "\u00c9"}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"nothing": 1}, "has no input 'nothing'; it has title, stars"),
        ({"title": "a", "stars": "b"}, "input 'stars' can't be read as INT64"),
        ({"title": "a", "stars": 1.5}, "input 'stars' can't be read as INT64: 1.5 instead of an integer"),
        ({"title": ["a"], "stars": 1}, "some inputs of model 'rate' are one item"),
        ({"title": [["a"]]}, "input 'title' has 2 dimensions; it has 0 for one item, or 1 for a batch"),
    ],
)
def test_the_client_names_an_input_that_does_not_fit(served: Served, inputs: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        served.client.model("rate")(**inputs)

    assert text in caught.value.message
