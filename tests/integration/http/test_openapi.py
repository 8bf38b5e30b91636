"""The OpenAPI document is true, and no input that it tempts one to send makes the gateway crash.

schemathesis makes the requests, right ones and wrong ones, from the document. Seeds change with each run and are
printed; `QINFER_TEST_EXAMPLES` says how many random requests of each route there are besides the systematic ones.

A test makes its requests when it runs, as subtests: as items of their own, all routes had the id of their test, and
pytest-xdist ran one of them.
"""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import schemathesis
from pydantic import SecretStr
from schemathesis import Case
from schemathesis import checks as check
from schemathesis.config import (
    CoveragePhaseConfig,
    GenerationConfig,
    PhasesConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)

from qinfer.core.settings import BulkSettings, RepositorySettings, StoreSettings
from qinfer_api.app import Features, build_app
from qinfer_api.auth import Restrictions
from qinfer_api.rest.services import Services
from tests.support.gateway import ANSWERING
from tests.support.threaded_gateway import Server, is_prescribed, settings

EXAMPLES = int(os.environ.get("QINFER_TEST_EXAMPLES", "6"))
FOLDER = Path(tempfile.gettempdir()) / f"qinfer-openapi-{os.getpid()}"
SEED = int(os.environ.get("QINFER_TEST_SEED", random.getrandbits(32)))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("old_node_id"),
    # Of Hypothesis: the gateway's thread draws random numbers too, and these strategies are long to print.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


def document() -> dict[str, Any]:
    """Returns the document as it is sent; the routes need no services to describe themselves."""
    services = Mock(spec=Services, restrictions=Restrictions.for_http(()))
    found: dict[str, Any] = json.loads(
        json.dumps(build_app(cast(Services, services), Features(Mock(), Mock(), Mock(), Mock(), Mock())).openapi())
    )
    return found


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
def with_files() -> Iterator[str]:
    """With a file that jobs may score, and no Celery: what fits the model gets no further than its queue."""
    FOLDER.mkdir(exist_ok=True)
    rows = {"x": pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32())), "0": [7], "name": ["a"]}
    pq.write_table(pa.table(rows), FOLDER / "rows.parquet")
    stores = StoreSettings(allow=(f"file://{FOLDER}",))
    with Server(settings(stores=stores, bulk=BulkSettings(broker_url=SecretStr("redis://127.0.0.1:1/0")))) as url:
        yield url
    shutil.rmtree(FOLDER)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def schema_of(*hooks: Callable[..., Any], systematic: bool) -> schemathesis.BaseSchema:
    """Returns the source of tests; `systematic` requests are one by one all that the document tells apart."""
    generation = GenerationConfig(max_examples=EXAMPLES, database="none", no_shrink=True)
    coverage = CoveragePhaseConfig(enabled=systematic, unexpected_methods={"put", "trace"})
    project = ProjectConfig(generation=generation, phases=PhasesConfig(coverage=coverage))
    config = SchemathesisConfig(seed=SEED, projects=ProjectsConfig(default=project))
    schema = schemathesis.openapi.from_dict(document(), config=config)
    for hook in hooks:
        schema.hook(hook)
    return schema


def map_body(context: Any, body: Any) -> Any:
    """Names the model and the file that there are, mostly, in what has the form of a job."""
    if isinstance(body, dict) and isinstance(body.get("output"), dict) and len(str(body)) % 5:
        body["model"], body["inputs"] = "echo", [f"file://{FOLDER}/rows.parquet"]
        body["output"]["url"] = f"file://{FOLDER}/out"
        body.pop("version", None)
    return body


def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Names a model that there is, two times of three: what the text says decides which."""
    if path_parameters and "model" in path_parameters:
        number = sum(str(path_parameters["model"]).encode())
        if number % 3:
            path_parameters["model"] = ANSWERING[number % len(ANSWERING)]
    return path_parameters


@pytest.fixture(scope="module")
def schema() -> schemathesis.BaseSchema:
    return schema_of(map_path_parameters, systematic=True)


@pytest.fixture(scope="module")
def schema_of_versions() -> schemathesis.BaseSchema:
    return schema_of(map_path_parameters, systematic=False)


@pytest.fixture(scope="module")
def schema_of_jobs() -> schemathesis.BaseSchema:
    return schema_of(map_body, systematic=False)


calls, calls_of_versions, calls_of_jobs = map(
    schemathesis.pytest.from_fixture, ("schema", "schema_of_versions", "schema_of_jobs")
)


CHECKS = [
    check.status_code_conformance,
    check.content_type_conformance,
    check.response_schema_conformance,
    check.response_headers_conformance,
    check.unsupported_method,
]


def check_reply(case: "Case[Any]", url: str, session: requests.Session) -> None:
    """Calls, and looks at the reply: it is as documented, and no failure but those that are prescribed."""
    response = case.call(base_url=url, session=session, timeout=10)
    status, text = response.status_code, response.text
    assert status < 500 or is_prescribed(status, text), f"seed {SEED}: {status} {text}\n{case.as_curl_command()}"
    case.validate_response(response, checks=CHECKS)


@calls.exclude(path_regex="/versions/").exclude(path="/v1/jobs", method="POST").parametrize()
def test_as_it_is_by_default(case: "Case[Any]", closed: str, session: requests.Session) -> None:
    """Every route, with what a gateway answers that only has its defaults."""
    check_reply(case, closed, session)


@calls_of_versions.include(path_regex="/versions/").parametrize()
def test_versions(case: "Case[Any]", closed: str, session: requests.Session) -> None:
    """The same with a version, which is all that the document tells apart."""
    check_reply(case, closed, session)


@calls_of_jobs.include(path="/v1/jobs", method="POST").parametrize()
def test_jobs(case: "Case[Any]", with_files: str, session: requests.Session) -> None:
    """Whatever is asked of a file that there is."""
    check_reply(case, with_files, session)


@calls.include(path_regex="^/v2/(repository|systemsharedmemory|cudasharedmemory)").parametrize()
def test_with_everything_on(case: "Case[Any]", opened: str, session: requests.Session) -> None:
    """What is refused by default is still no failure where it is allowed."""
    check_reply(case, opened, session)


def test_the_document_has_no_status_of_frameworks() -> None:
    """FastAPI's 422 is never answered; versions are numbers."""
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    versions = [p["schema"] for o in operations for p in o.get("parameters", ()) if p["name"] == "version"]

    assert not [operation["summary"] for operation in operations if "422" in operation["responses"]]
    assert versions
    assert {schema["minimum"] for schema in versions} == {1}
