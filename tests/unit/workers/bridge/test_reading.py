"""Messages that become requests: which models a route can be for."""

from dataclasses import replace

import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.catalog import Served
from qinfer.models.routes import Routes
from qinfer.queue.entries import Lane
from qinfer.testing import stub_spec
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.reading import Reader


def test_a_decoupled_model_is_refused() -> None:
    """Its messages stay in the source: a bridge would send the last of its responses only."""
    route = RouteOptions.model_validate(
        {"name": "r", "model": "stub", "source": {"url": "amqp://broker//", "queue": "tasks"}}
    )
    spec = replace(stub_spec(), decoupled=True)
    served = Served(spec=spec, version=1, generation=1, lane=Lane("stub", 1), routes=Routes(spec, 1))

    with pytest.raises(InvalidRequest, match="model 'stub' is decoupled"):
        Reader(route, 60.0, "reply:bridge", 1000).use(served)
