"""Headers and bodies of any kind, to a gateway that serves: it answers each, and fails only as is prescribed."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.core.settings import RepositorySettings
from tests.support.threaded_gateway import Server, is_prescribed
from tests.support.threaded_gateway import settings as gateway_settings

pytestmark = [  # of Hypothesis: the gateway's thread draws random numbers too, and these strategies are long to print
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

patient = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))

ANY_TEXT = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["\ud800", "\udfff\ud800", "\x00", "../..", "a/b", "é"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3), max_leaves=6
)


def members(**known: Any) -> st.SearchStrategy[Any]:
    """Objects in which the known members may be missing or wrong, and others may be there."""
    right = st.fixed_dictionaries({}, optional={name: value | JSON for name, value in known.items()})
    return (
        right
        | st.builds(lambda one, other: {**one, **other}, right, st.dictionaries(ANY_TEXT, JSON, max_size=2))
        | JSON
    )


NUMBERS = st.integers(-1, 9) | st.sampled_from([2**31, 2**62, 2**63, 2**64 - 1, 2**64, 1e999, -0.0])
REGION = {
    "shared_memory_region": st.sampled_from(["r", "s"]),
    "shared_memory_offset": NUMBERS,
    "shared_memory_byte_size": NUMBERS,
}
TENSOR = members(
    name=st.sampled_from(["x", "a", "b"]),
    shape=st.lists(st.integers(0, 4) | NUMBERS, max_size=3),
    datatype=st.sampled_from(["FP32", "BYTES", "INT32", "FP16", "BF16"]),
    data=st.lists(SCALARS, max_size=4),
    parameters=members(binary_data_size=NUMBERS, **REGION),
)
OUTPUT = members(
    name=st.sampled_from(["y", "a"]), parameters=members(classification=NUMBERS, binary_data=st.booleans(), **REGION)
)
INFER = members(
    id=ANY_TEXT,
    inputs=st.lists(TENSOR, max_size=2),
    outputs=st.lists(OUTPUT, max_size=2),
    parameters=members(priority=NUMBERS, timeout=NUMBERS, sequence_id=NUMBERS, binary_data_output=st.booleans()),
)
CONFIG = members(
    name=st.just("echo"), max_batch_size=NUMBERS, input=st.lists(JSON), parameters=members(a=JSON), instance_group=JSON
)
LOAD = members(
    parameters=st.dictionaries(
        st.sampled_from(["config", "file:1/model.onnx", "file:../x", "file:", "file:1/\ud800", "unload_dependents"])
        | ANY_TEXT,
        CONFIG.map(json.dumps) | st.sampled_from(["", "AA==", "AA=", "é", "{"]) | JSON,
        max_size=3,
    )
)
BODIES = {
    "/v2/models/{m}/infer": INFER,
    "/v2/models/{m}/versions/1/infer": INFER,
    "/v2/models/{m}/generate": members(x=JSON, y=JSON, id=ANY_TEXT, parameters=members(a=SCALARS)),
    "/v2/models/{m}/generate_stream": members(x=JSON, a=JSON, parameters=JSON),
    "/v1/models/{m}/infer_stream": INFER,
    "/v1/models/{m}/requests": INFER,
    "/v2/repository/index": members(ready=st.booleans()),
    "/v2/repository/models/{m}/load": LOAD,
    "/v2/repository/models/{m}/unload": members(parameters=members(unload_dependents=st.booleans())),
    "/v2/systemsharedmemory/region/r/register": members(
        key=st.just("/r") | ANY_TEXT, offset=NUMBERS, byte_size=NUMBERS
    ),
    "/v2/logging": members(log_info=st.booleans(), log_verbose_level=NUMBERS, log_format=ANY_TEXT, log_file=ANY_TEXT),
    "/v2/trace/setting": members(
        trace_level=JSON, trace_rate=NUMBERS.map(str), trace_count=JSON, log_frequency=ANY_TEXT
    ),
    "/v2/models/{m}/trace/setting": members(trace_level=st.lists(ANY_TEXT), trace_mode=JSON),
}
MODELS = st.sampled_from(["echo", "pair", "one", "vary", "half", "text", "nobody"])

NUMBER_TEXTS = st.integers().map(str) | st.sampled_from(["1e9", "nan", "inf", "-1", "0", "9" * 400, "1_0", " 1", "0x1"])
WORDS = st.sampled_from(
    ["respond-async", "wait", "=", "wait=1", ",", ";", '"', "\\", " ", "q=", "gzip", "*", "identity", "deflate", "q=2"]
)
PIECES = st.lists(
    WORDS | st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=4), max_size=8
).map("".join)
HEADERS: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {},
    optional={
        "Prefer": PIECES,
        "Inference-Header-Content-Length": NUMBER_TEXTS | PIECES,
        "Content-Encoding": st.sampled_from(["gzip", "deflate", "br", "identity", "gzip, gzip"]) | PIECES,
        "Accept-Encoding": PIECES,
        "Request-Timeout": NUMBER_TEXTS | PIECES,
        "Idempotency-Key": PIECES,
        "Request-Id": PIECES,
        "Webhook-Url": PIECES | st.sampled_from(["http://[", "http://a:99999999/", "ftp://x", "//x"]),
        "traceparent": PIECES,
        "Authorization": PIECES,
        "X-Api-Key": PIECES,
        "Expect": st.just("100-continue"),
        "Content-Type": PIECES,
        "Last-Event-ID": PIECES,
    },
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    repository = RepositorySettings(control_mode="explicit", load_timeout_s=0.05)
    with Server(gateway_settings(allow_client_shm=True, repository=repository)) as url:
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def check(response: requests.Response) -> None:
    """An answer has a body of its own; a failure is one that is prescribed."""
    status, text = response.status_code, response.text
    assert status < 500 or is_prescribed(status, text), f"{status} {text}"
    if status >= 400:
        error = response.json()["error"]
        assert isinstance(error, str)
        assert error
        assert "Traceback" not in text


@pytest.mark.parametrize("path", BODIES)
@patient
@given(data=st.data())
def test_bodies(path: str, data: st.DataObject, url: str, session: requests.Session) -> None:
    """JSON that is nearly right, entirely wrong, or none."""
    body = data.draw(BODIES[path].map(lambda made: json.dumps(made).encode()) | st.binary(max_size=20))

    check(session.post(url + path.format(m=data.draw(MODELS)), data=body, timeout=10))


@pytest.mark.parametrize("path", ["/v2/models/{m}/infer", "/v1/models/{m}/requests", "/v2/models/{m}/generate"])
@patient
@given(data=st.data(), headers=HEADERS)
def test_headers(path: str, data: st.DataObject, headers: dict[str, str], url: str, session: requests.Session) -> None:
    """Headers that say anything about a body that may be right."""
    body = json.dumps(
        data.draw(
            st.just({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}) | INFER
        )
    ).encode()
    sent = {name: text.strip().encode("latin-1") for name, text in headers.items()}

    check(session.post(url + path.format(m=data.draw(MODELS)), data=body, headers=sent, timeout=10))


@patient
@given(
    prefix=st.sampled_from(["/v1/requests/", "/v1/models/echo/requests/"]),
    request_id=ANY_TEXT.filter(lambda text: text.strip("./")),
    what=st.sampled_from(["", "/result", "/events"]),
    wait=NUMBER_TEXTS,
)
def test_ids_of_requests(
    prefix: str, request_id: str, what: str, wait: str, url: str, session: requests.Session
) -> None:
    """Requests that there never were."""
    name = quote(request_id.encode(errors="surrogatepass"), safe="")

    response = session.get(f"{url}{prefix}{name}{what}", params={"wait": wait}, timeout=10)

    assert response.status_code in (400, 404)
    check(response)
