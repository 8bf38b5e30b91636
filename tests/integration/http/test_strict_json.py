"""Replies without NaN and Infinity, which JavaScript's parser refuses, to callers that ask for strict JSON."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import Running, running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for each way

SPECIAL = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,1]}]%b}'
GENERATED = b'{"x":[NaN,Infinity,-Infinity,1]%b}'
PARAMETER = b',"parameters":{"qinfer_strict_json":true}'
STRICT = {"accept": "application/json;strict=true"}
VALUES = [None, None, None, 1.0]
GATEWAY = Path(__file__).parents[3] / "examples" / "clients" / "javascript" / "gateway.mjs"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with running_gateway(settings_of({"fast_path": request.param})) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


def read(text: str) -> Any:
    """Parses JSON as JavaScript does."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


async def test_plain_replies_have_the_words_of_triton(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v2/models/echo/infer", content=SPECIAL % b"")

    assert '"data":[NaN,Infinity,-Infinity,1.0]' in reply.text


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        (PARAMETER, {}),
        (b"", STRICT),
        (b"", {"accept": 'text/html, Application/JSON ; Strict = "TRUE";q=0.9, */*'}),
        (b',"parameters":{"qinfer_strict_json":false}', STRICT),
    ],
)
async def test_infer_is_strict_when_asked(client: httpx.AsyncClient, more: bytes, headers: dict[str, str]) -> None:
    reply = await client.post("/v2/models/echo/infer", content=SPECIAL % more, headers=headers)

    assert (reply.status_code, read(reply.text)["outputs"][0]["data"]) == (200, VALUES)


@pytest.mark.parametrize("accept", ["application/json;strict=false", "application/json", "*/*", "text/x-strict"])
async def test_other_headers_change_nothing(client: httpx.AsyncClient, accept: str) -> None:
    reply = await client.post("/v2/models/echo/infer", content=SPECIAL % b"", headers={"accept": accept})

    assert "NaN" in reply.text


async def test_the_model_does_not_see_the_parameter(client: httpx.AsyncClient, running: Running) -> None:
    await client.post("/v2/models/echo/infer", content=SPECIAL % PARAMETER)

    assert not running.requests[-1].parameters


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("more", "headers"),
    [(b',"qinfer_strict_json":true', {}), (PARAMETER, {}), (b"", {"accept": "text/event-stream;strict=true"})],
)
async def test_generate_is_strict_when_asked(
    client: httpx.AsyncClient, path: str, more: bytes, headers: dict[str, str]
) -> None:
    reply = await client.post(f"/v2/models/echo/{path}", content=GENERATED % more, headers=headers)

    assert read(reply.text.removeprefix("data: "))["y"] == VALUES


async def test_generate_has_the_words_of_triton(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v2/models/echo/generate", content=GENERATED % b"")

    assert '"y":[NaN,Infinity,-Infinity,1.0]' in reply.text


async def test_streamed_inference_is_strict_when_asked(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/models/echo/infer_stream", content=SPECIAL % PARAMETER)

    assert read(reply.text.partition("data: ")[2])["outputs"][0]["data"] == VALUES


async def test_a_stored_request_keeps_the_wish(client: httpx.AsyncClient) -> None:
    accepted = await client.post("/v1/models/echo/requests", content=SPECIAL % PARAMETER)

    reply = await client.get(accepted.headers["location"] + "/result?wait=10")

    assert read(reply.text)["outputs"][0]["data"] == VALUES


async def test_who_reads_a_result_may_ask_for_strict_json(client: httpx.AsyncClient) -> None:
    accepted = await client.post("/v1/models/echo/requests", content=SPECIAL % b"")

    replies = [await client.get(accepted.headers["location"] + "/result?wait=10", headers=h) for h in ({}, STRICT)]

    assert "NaN" in replies[0].text
    assert read(replies[1].text)["outputs"][0]["data"] == VALUES


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/v2/models/echo/generate", "/v1/models/echo/requests"])
async def test_other_values_of_the_parameter_are_refused(client: httpx.AsyncClient, path: str) -> None:
    body = GENERATED if path.endswith("generate") else SPECIAL
    wrong = b',"parameters":{"qinfer_strict_json":"yes"}'

    reply = await client.post(path, content=body % wrong)

    assert reply.status_code in (400, 500)  # as for other parameters of a wrong type
    assert "qinfer_strict_json" in reply.json()["error"]


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/v2/models/echo/generate", "/v1/models/echo/requests"])
async def test_other_values_of_the_header_are_refused(client: httpx.AsyncClient, path: str) -> None:
    body = GENERATED if path.endswith("generate") else SPECIAL

    reply = await client.post(path, content=body % b"", headers={"accept": "application/json;strict=maybe"})

    assert reply.status_code == 400
    assert reply.json()["error"].endswith("'maybe' is not a value of strict in Accept: use true or false")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_the_example_in_javascript_reads_all_replies(running: Running) -> None:
    script = f"""
        import {{ Gateway }} from {json.dumps(GATEWAY.as_uri())};
        const options = {{ method: "POST", body: {json.dumps((SPECIAL % b"").decode())} }};
        const reply = await new Gateway({json.dumps(running.url)}).call("/v2/models/echo/infer", options);
        console.log(JSON.stringify((await reply.json()).outputs[0].data));
    """
    node = await asyncio.create_subprocess_exec(
        "node", "--input-type=module", "-e", script, stdout=asyncio.subprocess.PIPE
    )

    printed, _ = await node.communicate()

    assert json.loads(printed) == VALUES
