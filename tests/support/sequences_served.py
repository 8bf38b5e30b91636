"""Sequences as callers have them: a gateway that serves both protocols, and workers with a stub that sums.

The stub is `x` → `y`, FP32[2], `y` = the sum of all `x` of the sequence so far.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.rpc import stub_of, value_of
from tests.support.sequence_scene import Sequencing
from tests.support.servers.servers import Database

URL = "/v2/models/stub/infer"
SMALL_BYTES = 1000
"""Larger tensors of a request travel beside it."""

Id = int | str


class SequencesServed:
    """See the module docstring.

    Attributes:
        scene: The workers.
        sums: The stub, as its workers know it.
        gateway: The gateway.
        client: Calls its HTTP.
        stub: Calls its gRPC.
    """

    def __init__(self, sums: Sequencing, gateway: Gateway, client: httpx.AsyncClient, stub: Any) -> None:
        self.scene: InlineWorkers = sums.scene
        self.sums, self.gateway, self.client, self.stub = sums, gateway, client, stub

    async def start(self, **options: Any) -> None:
        """Starts the first worker."""
        await self.scene.worker(**options)
        await self.gateway.catalog.refresh()

    async def post(self, number: float, correlation_id: Id = 1, **options: Any) -> httpx.Response:
        """Sends a step over HTTP as JSON, as `body_of` makes it; `model` and `headers` may be among the options."""
        model, headers = options.pop("model", "stub"), options.pop("headers", {})
        body = body_of(number, correlation_id, **options)
        return await self.client.post(f"/v2/models/{model}/infer", json=body, headers=headers)

    async def post_binary(self, number: float, correlation_id: Id = 1, **flags: Any) -> httpx.Response:
        """Sends a step over HTTP with its tensor behind the JSON, and gets it so."""
        row = np.full((1, 2), number, "<f4").tobytes()
        about = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": len(row)}}
        parameters = {**parameters_of(correlation_id, flags), "binary_data_output": True}
        head = json.dumps({"parameters": parameters, "inputs": [about]}).encode()
        headers = {"inference-header-content-length": str(len(head))}
        return await self.client.post(URL, content=head + row, headers=headers)

    async def call(self, number: float, correlation_id: Id = 1, **flags: Any) -> Any:
        """Sends a step over gRPC, as `message_of` makes it; returns the response."""
        return await self.stub.ModelInfer(message_of(number, correlation_id, **flags))

    async def sum(self, *numbers: float, correlation_id: Id = 1) -> list[float]:
        """Sends a whole sequence over HTTP, one step after the answer to the other; returns the answers."""
        answers = []
        for position, number in enumerate(numbers):
            flags = {"start": position == 0, "end": position == len(numbers) - 1}
            answers.append(sum_of(await self.post(number, correlation_id, **flags)))
        return answers

    async def metric(self, name: str, label: str = "") -> int:
        """Returns the value of a metric of the stub, as the first read shows it."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith(name) and label in line and 'model="stub"' in line]
        return int(line.rpartition(" ")[2])

    async def submitted(self, count: int) -> None:
        """Waits until so many requests wait for their answers, all of them in the queue."""

        def are_there() -> bool:
            waiting = list(self.gateway.dispatcher.submission.pending.by_id.values())
            return len(waiting) == count and all(pending.entry is not None for pending in waiting)

        await eventually(are_there, description=f"{count} steps in the queue")

    async def open(self) -> int:
        """Returns how many sequences are open."""
        return (await self.sums.sequences.sizes([1])).open

    async def ended(self) -> None:
        """Waits until no sequence is open, and no request waits."""

        async def is_so() -> bool:
            return self.gateway.dispatcher.in_flight == 0 and await self.open() == 0

        await eventually(is_so, description="the end of all sequences")


def parameters_of(correlation_id: Id, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a step; `start`, `end` and `step` among the flags have longer names there."""
    names = {"start": "sequence_start", "end": "sequence_end", "step": "qinfer_step"}
    more = {names.get(name, name): value for name, value in flags.items()}
    return {"sequence_id": correlation_id, **more}


def body_of(number: float, correlation_id: Id = 1, **options: Any) -> dict[str, Any]:
    """Returns the JSON of a step; its `id`, `rows` and `width` may be among the options, the others are parameters."""
    rows, width = options.pop("rows", 1), options.pop("width", 2)
    named = {"id": options.pop("id")} if "id" in options else {}
    tensor = {"name": "x", "shape": [rows, width], "datatype": "FP32", "data": [number] * rows * width}
    return {**named, "inputs": [tensor], "parameters": parameters_of(correlation_id, options)}


def message_of(number: float, correlation_id: Id = 1, **flags: Any) -> Any:
    """Returns the message of a step; its `id` and `width` may be among the flags."""
    message, width = pb.ModelInferRequest(model_name="stub", id=flags.pop("id", "")), flags.pop("width", 2)
    message.inputs.add(name="x", datatype="FP32", shape=[1, width])
    message.raw_input_contents.append(np.full((1, width), number, "<f4").tobytes())
    for name, value in parameters_of(correlation_id, flags).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def sum_of(reply: Any) -> float:
    """Returns the first element of an answer, over whichever protocol it came."""
    if not isinstance(reply, httpx.Response):
        return value_of(reply)
    assert reply.status_code == 200, reply.text
    if length := reply.headers.get("inference-header-content-length"):
        return float(np.frombuffer(reply.content[int(length) :], "<f4")[0])
    return float(reply.json()["outputs"][0]["data"][0])


def refused(reply: httpx.Response) -> tuple[int, str]:
    """Returns the status and the text of an error, without what names the request."""
    return reply.status_code, reply.json()["error"]


@asynccontextmanager
async def sequences_served(
    *,
    dims: int = 2,
    strategy: str = "direct { }",
    versions: tuple[int, ...] = (1,),
    explicit: bool = False,
    **sections: Any,
) -> AsyncIterator[SequencesServed]:
    """Runs the gateway, its model stored and no worker started, until the block ends.

    Args:
        dims: Elements of a row of the model.
        strategy: How its sequences are batched.
        versions: Its versions.
        explicit: Whether it would have its state in memory; it answers with `x` then.
        sections: Sections of the gateway's settings, as `settings_of` takes them.
    """
    limits = {"wait_for_workers_s": 10, "inline_max_bytes": SMALL_BYTES, **sections.pop("limits", {})}
    settings = settings_of(limits=limits, grpc={}, **sections)
    async with Database() as database, inline_workers(await database.delivery(), database.store()) as scene:
        sums = Sequencing(scene, explicit=explicit)
        await sums.model(dims=dims, strategy=strategy, versions=versions)
        rpc = open_port(settings)
        assert rpc is not None
        gateway = lean_gateway(settings, await database.delivery(), database.store(), bind(settings.http), rpc=rpc)
        serving = asyncio.create_task(gateway.serve())
        await gateway.started.wait()
        async with (
            httpx.AsyncClient(base_url=gateway.url, timeout=30) as client,
            grpc.aio.insecure_channel(rpc.url.partition("://")[2]) as channel,
        ):
            yield SequencesServed(sums, gateway, client, stub_of(channel))
        gateway.stop()
        await asyncio.wait([serving])
        serving.result()
