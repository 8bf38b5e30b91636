"""Messages that become requests: what a route's model decides."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import Routes
from qinfer.queue.entries import Lane
from qinfer.testing import stub_spec
from qinfer.traffic.routing import Endpoints
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.messages import Receipt, SourceMessage
from qinfer_workers.bridge.reading import Reader, RouteVersions

KSERVE = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'


def reader(*, decoupled: bool = True, **options: Any) -> Reader:
    source = {"url": "amqp://broker//", "queue": "tasks"}
    route = {"name": "r", "model": "stub", "source": source, "sink": {"routing_key": "done"}, **options}
    spec = replace(stub_spec(), decoupled=decoupled)
    parsed = RouteOptions.model_validate(route)
    versions = RouteVersions(parsed, Endpoints(None))  # type: ignore[arg-type]  # without endpoints nobody looks at models
    one = Reader(parsed, 60.0, "reply:bridge", 1000, versions)
    one.set_model(ServedVersion(spec=spec, version=1, generation=1, lane=Lane("stub", 1), routes=Routes(spec, 1)))
    return one


def arrow() -> SourceMessage:
    rows = pa.table({"x": [[1.0, 2.0]]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    content_type = "application/vnd.apache.arrow.stream"
    return SourceMessage(receipt=Receipt(1, 1), body=sink.getvalue().to_pybytes(), content_type=content_type)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_request_tells_whether_it_has_many_responses(*, decoupled: bool) -> None:
    """So its responses are stored, and its end tells that there are some."""
    message = SourceMessage(receipt=Receipt(1, 1), body=KSERVE)

    assert reader(decoupled=decoupled).read(message).acceptance.decoupled is decoupled


def test_a_list_of_responses_has_no_arrow() -> None:
    """Of a route that says so it is the route's mistake; of a message, the message's."""
    with pytest.raises(InvalidRequest, match="set the route's 'responses' to each"):
        reader(body={"reply": "arrow"})
    with pytest.raises(InvalidRequest, match="set the route's 'responses' to each"):
        reader().read(arrow())

    assert reader(responses="each", body={"reply": "arrow"}).read(arrow()).acceptance.decoupled
    assert reader(decoupled=False, body={"reply": "arrow"}).read(arrow()).acceptance.frame
