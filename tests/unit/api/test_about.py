"""What the server says about itself and its models."""

import pytest

from qinfer.core.settings import RepositorySettings, Settings
from qinfer.errors import ModelNotFound, ModelNotReady, QinferError
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.traffic.routing import Endpoints
from qinfer_api.about import is_model_ready, is_server_ready, model_metadata, server_metadata
from tests.support.stub_catalog import stub_catalog

TRITONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
]


@pytest.fixture
async def catalog(store: ControlStore) -> Catalog:
    models = {"up": {1: True, 3: True, 2: False}, "loading": {1: False}}
    return await stub_catalog(store, models)


def test_extensions_are_tritons_in_tritons_order() -> None:
    assert server_metadata(Settings()).extensions == TRITONS


def test_the_name_can_be_set() -> None:
    """Triton's --id."""
    assert server_metadata(Settings()).name == "triton"
    assert server_metadata(Settings(server_id="mine")).name == "mine"


@pytest.mark.parametrize(("version", "shown"), [(0, ("1", "3")), (1, ("1",)), (3, ("3",))])
def test_metadata_lists_ready_versions(catalog: Catalog, version: int, shown: tuple[str, ...]) -> None:
    """All of them, or the one that was named."""
    assert model_metadata(Endpoints(catalog), "up", version).versions == shown


@pytest.mark.parametrize(
    ("strict", "draining", "ready"), [(True, False, False), (False, False, True), (False, True, False)]
)
def test_the_server_is_ready(catalog: Catalog, *, strict: bool, draining: bool, ready: bool) -> None:
    """Strictly when every model is, which here is not so; never while it shuts down."""
    settings = Settings(repository=RepositorySettings(strict_readiness=strict))

    assert is_server_ready(settings, catalog, draining=draining) == ready


def test_a_model_is_ready(catalog: Catalog) -> None:
    """One version, or any; not while its first one loads."""
    assert is_model_ready(Endpoints(catalog), "up", 0)
    assert is_model_ready(Endpoints(catalog), "up", 3)
    assert not is_model_ready(Endpoints(catalog), "loading", 0)


@pytest.mark.parametrize(
    ("model", "version", "error", "text"),
    [
        ("nothing", 0, ModelNotFound, "'nothing' is not found"),
        ("up", 4, ModelNotFound, "'up' version 4 is not found"),
        ("up", 2, ModelNotReady, "'up' version 2 is not at ready state"),
        ("loading", 1, ModelNotReady, "'loading' version 1 is not at ready state"),
    ],
)
def test_why_a_model_is_not_ready(
    catalog: Catalog, model: str, version: int, error: type[QinferError], text: str
) -> None:
    """The cases of reference §1.3."""
    with pytest.raises(error, match=text):
        is_model_ready(Endpoints(catalog), model, version)
