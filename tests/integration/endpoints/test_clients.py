"""Clients that know models only: they ask an endpoint by its name."""

import asyncio

import numpy as np
import tritonclient.http as triton

from qinfer.client import Client
from tests.support.endpoints import canary, declare, split
from tests.support.gateway import running_gateway

ROW = np.array([[1, 2, 3, 4]], np.float32)


async def test_the_client_of_qinfer() -> None:
    """At once, stored and found again by an id of one's own, generated, and described."""
    async with running_gateway() as running:
        await declare([running], "reader", split(canary(1)))

        def ask() -> tuple[list[str], list[int], str]:
            with Client(running.url) as client:
                results = [client.infer("reader", {"x": ROW})]
                results.append(client.result(client.submit("reader", {"x": ROW}, request_id="mine"), wait_s=20))
                names = [result.model for result in results]
                return names, [result.version for result in results], client.config("reader")["name"]

        assert await asyncio.to_thread(ask) == (["reader"] * 2, [2, 2], "reader")


async def test_tritons_client() -> None:
    """It reads the metadata first, and asks by name or by version."""
    async with running_gateway() as running:
        await declare([running], "reader", split(canary(0)))

        def ask() -> list[str]:
            client = triton.InferenceServerClient(running.url.removeprefix("http://"))
            (about,) = client.get_model_metadata("reader")["inputs"]
            given = triton.InferInput(about["name"], ROW.shape, about["datatype"])
            given.set_data_from_numpy(ROW)
            replies = [client.infer("reader", [given]), client.infer("reader", [given], model_version="2")]
            client.close()
            return [
                f"{reply.get_response()['model_name']}:{reply.get_response()['model_version']}" for reply in replies
            ]

        assert await asyncio.to_thread(ask) == ["reader:1", "reader:2"]
