"""What the OpenAPI document says of Label Studio's calls is true of a gateway that has mappings, whatever is sent."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from schemathesis import Case

from qinfer.core.settings import LabelingSettings
from tests.integration.http.test_openapi import check_reply, schema_of
from tests.integration.labeling.test_label_studio import LABELS
from tests.support.threaded_gateway import Server, settings

pytestmark = [
    pytest.mark.usefixtures("old_node_id"),
    # Of Hypothesis: the gateway's thread draws random numbers too, and these strategies are long to print.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


@pytest.fixture(scope="module")
def mapped() -> Iterator[str]:
    """With a mapping for one model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "labels.yaml").write_text(LABELS)
        with Server(settings(labeling=LabelingSettings(mappings=folder))) as url:
            yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Names the model that has a mapping, mostly."""
    if path_parameters and "model" in path_parameters and len(str(path_parameters)) % 4:
        path_parameters["model"] = "text"
    return path_parameters


@pytest.fixture(scope="module")
def schema() -> schemathesis.BaseSchema:
    return schema_of(map_path_parameters, systematic=True)


@schemathesis.pytest.from_fixture("schema").include(path_regex="label-studio").parametrize()
def test_calls_of_label_studio(case: "Case[Any]", mapped: str, session: requests.Session) -> None:
    """No body, path or query is answered otherwise than documented."""
    check_reply(case, mapped, session)
