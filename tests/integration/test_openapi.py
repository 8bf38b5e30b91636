"""The OpenAPI document is true, and no input that it tempts one to send makes the gateway crash.

schemathesis makes the requests, right ones and wrong ones, from the document. Seeds change with each run and are
printed; `QINFER_TEST_EXAMPLES` says how many random requests of each route there are besides the systematic ones.
"""

import asyncio
import os
import random
import re
import threading
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import requests
import schemathesis
from schemathesis import Case
from schemathesis import checks as check
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from qinfer.settings import LimitSettings, RepositorySettings, Settings
from qinfer_api.rest.app import build_app
from qinfer_api.rest.services import Services
from qinfer_api.restrictions import Restrictions
from tests.gateway import ANSWERING, Running, running_gateway, settings_of

EXAMPLES = int(os.environ.get("QINFER_TEST_EXAMPLES", "10"))
SEED = int(os.environ.get("QINFER_TEST_SEED", random.getrandbits(32)))

PRESCRIBED = {
    500: [
        r"attempt to (access|get)",  # a JSON value of the wrong type (§1.2)
        r"Unable to parse",  # the same
        r"failed to (load|unload) '",  # §1.14
        r"the model raised: boom",  # the model `fails`
    ],
    501: [
        r"Unsupported compression type",  # §1.11
        r"'repository_name' specification is not supported",  # §1.1
        r"Client shared memory is disabled",  # §1.15
        r"CUDA shared memory is not supported",
        r"(trace|log) file location can not be updated through network protocol",  # §1.16, §1.17
    ],
    503: [
        r"explicit model load / unload is not allowed",  # §1.14
        r"log_format",  # §1.17
        r"is not at ready state",  # §1.3
    ],
}
"""What the reference answers with 5xx, and where it says so."""


def document() -> dict[str, Any]:
    """Returns the document; the routes need no services to describe themselves."""
    services = Mock(spec=Services, restrictions=Restrictions.for_http(()))
    return build_app(cast(Services, services)).openapi()


def is_prescribed(status: int, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in PRESCRIBED.get(status, []))


class Server:
    """A gateway in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.running: Running | None = None

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with running_gateway(self._settings) as self.running:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        assert self.running is not None
        return self.running.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


def settings(**more: Any) -> Settings:
    base = settings_of(limits={"default_timeout_s": 2.0, "max_timeout_s": 2.0})
    return base.model_copy(update=more)


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """As it is by default."""
    with Server(settings()) as url:
        yield url


@pytest.fixture(scope="module")
def opened() -> Iterator[str]:
    """With everything on."""
    explicit = RepositorySettings(control_mode="explicit", load_timeout_s=0.2)
    with Server(settings(allow_client_shm=True, repository=explicit)) as url:
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


schema = schemathesis.openapi.from_dict(
    document(),
    config=SchemathesisConfig(
        seed=SEED,
        projects=ProjectsConfig(default=ProjectConfig(generation=GenerationConfig(max_examples=EXAMPLES, database="none"))),
    ),
)


@schema.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Names a model that there is, two times of three: what the text says decides which."""
    if path_parameters and "model" in path_parameters:
        number = sum(str(path_parameters["model"]).encode())
        if number % 3:
            path_parameters["model"] = ANSWERING[number % len(ANSWERING)]
    return path_parameters


import collections, json as _json
found = collections.Counter()
samples = {}

def look(case: Case, url: str, session: requests.Session) -> None:
    response = case.call(base_url=url, session=session, timeout=10)
    if response.status_code >= 500 and not is_prescribed(response.status_code, response.text):
        k=("5xx", case.operation.label, response.status_code, response.text[:150]); found[k]+=1; samples.setdefault(k, case.as_curl_command()[:600])
    for c in (check.status_code_conformance, check.content_type_conformance, check.response_schema_conformance, check.response_headers_conformance, check.unsupported_method, check.negative_data_rejection, check.positive_data_acceptance, check.missing_required_header):
        try:
            case.validate_response(response, checks=[c])
        except BaseException as e:
            k=(c.__name__, case.operation.label, response.status_code, response.text[:100]); found[k]+=1; samples.setdefault(k, (case.as_curl_command()[:600], str(e)[:400]))


@schema.parametrize()
def test_closed(case: Case, closed: str, session: requests.Session) -> None:
    look(case, closed, session)


@schema.parametrize()
def test_opened(case: Case, opened: str, session: requests.Session) -> None:
    look(case, opened, session)


@pytest.fixture(scope="module", autouse=True)
def dump():
    yield
    with open("/tmp/e2/found.txt","w") as f:
        for k,v in sorted(found.items(), key=str):
            f.write(f"{v} {k}\n    {samples[k]}\n")
