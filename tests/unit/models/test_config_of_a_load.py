"""A configuration that comes with a load."""

import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelLoadFailed
from qinfer.models import control
from qinfer.models.control import ModelControl
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue


async def test_a_configuration_that_is_too_long_is_refused_by_its_length(
    store: ControlStore, delivery: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is neither parsed nor stored."""
    monkeypatch.setattr(control, "MAX_CONFIG_CHARACTERS", 20)

    async def refresh() -> None: ...

    asked = ModelControl(None, store, delivery, RepositorySettings(control_mode="explicit"), refresh)
    with pytest.raises(ModelLoadFailed, match=r"'config' has 21 characters, and at most 20 are read; .* into files"):
        await asked.load("quiet", '{"max_batch_size": 4}')

    assert await store.desired() == {}
