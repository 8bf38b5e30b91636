"""The gateway that the rooms of routes, calls and ports share."""

from collections.abc import Iterator

import pytest

from tests.fuzz.gateway import FuzzedGateway, fuzzed_gateway


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedGateway]:
    """A gateway of two tenants and an administrator, in a process of its own; looked at before it ends, too."""
    with fuzzed_gateway(tmp_path_factory.mktemp("fuzzed")) as gateway:
        yield gateway
