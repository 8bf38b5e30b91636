"""A catalog with models that were never loaded anywhere and are as ready as a test says."""

from collections.abc import Mapping

from qinfer.core.settings import LimitSettings
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore

_CONFIG = """
backend: "stub"
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""


async def stub_catalog(store: ControlStore, models: Mapping[str, Mapping[int, bool]]) -> Catalog:
    """Declares models (name → version → whether a worker has it ready), and returns what a gateway sees of them."""
    states: dict[str, dict[int, VersionState]] = {}
    for name, versions in models.items():
        config = to_json(normalise(parse(_CONFIG), name))
        await store.put_model(StoredModel(name, 1, config, tuple(versions)))
        await store.set_desired(DesiredState(name, 1))
        states[name] = {version: VersionState(State.READY, 1) for version, is_ready in versions.items() if is_ready}
    await store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=states), 60)
    catalog = Catalog(store, LimitSettings())
    await catalog.refresh()
    return catalog
