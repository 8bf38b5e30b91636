"""Tensors between a gateway and workers of other machines, which have directories of their own: over TCP only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from qinfer.core.messages import InferRequest
from qinfer.core.settings_sections import SegmentSettings
from qinfer.observe.stats import StatsTally
from qinfer.queue.entries import Lane, worker_owner
from qinfer.segments.memory import HeldTensors
from qinfer.segments.sharing import SegmentSharing
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_referring_request
from tests.integration.worker.test_shared_tensors import IMAGE, held, largest_entries, ways
from tests.support.certificates import write_certificate
from tests.support.ensembles import scale
from tests.support.served_models import ServedModels, models_served
from tests.support.tensor_proxy import TensorProxy

pytestmark = pytest.mark.timeout(90)


class Machines:
    """A gateway, and workers that reach it through a proxy only.

    Attributes:
        scene: The processes.
        proxy: What lies between the machines.
    """

    def __init__(self, scene: ServedModels, proxy: TensorProxy, directory: Path, options: dict[str, Any]) -> None:
        self.scene = scene
        self.proxy = proxy
        self._directory = directory
        self._options = options

    async def worker(self, name: str, *, is_read: bool = True) -> None:
        """Starts a worker of another machine; returns once it serves, and reads the gateway's tensors."""
        segments = SegmentSettings(directory=str(self._directory / name), least_bytes=16_384, **self._options)
        self.scene._sections = {"segments": segments}
        await self.scene.worker(name)
        await self.scene.http.load_model("double")
        live = self.scene.gateway.catalog.workers
        await eventually(
            lambda: any(one.id == name and one.is_ready("double", 1) for one in live()), description=f"{name} at work"
        )
        if is_read:
            await self.read_by(name)

    async def read_by(self, *names: str) -> None:
        """Waits until just these workers read the gateway's tensors."""
        wanted = {worker_owner(name) for name in names}
        await eventually(lambda: sharing(self.scene).readers == wanted, description=f"{names} as readers")

    async def ask(self, count: int, values: np.ndarray = IMAGE) -> None:
        """Sends some images at once; each has its answer."""
        answers = await asyncio.gather(*[self.scene.infer("double", x=values + n) for n in range(count)])
        for number, answer in enumerate(answers):
            assert np.array_equal(answer.as_numpy("y"), (values + number) * 2)


def sharing(scene: ServedModels) -> SegmentSharing:
    found = scene.gateway._segments
    assert found is not None
    return found


@asynccontextmanager
async def running(tmp_path: Path, gateway: dict[str, Any], worker: dict[str, Any]) -> AsyncIterator[Machines]:
    """Runs a gateway, whose proxy has the same port of another address, and a worker."""
    scale(tmp_path / "repository", "double", 2.0, width=-1)
    proxy = TensorProxy(("127.0.0.2", 0))
    host, _, port = (await proxy.start()).rpartition(":")
    proxy.target = "127.0.0.2", int(port)
    options = {"listen_host": "127.0.0.2", "listen_port": int(port), "advertise_host": host, **gateway}
    segments = SegmentSettings(directory=str(tmp_path / "m"), least_bytes=16_384, **options)
    async with models_served(tmp_path / "repository", {"segments": segments}, first_worker=False) as scene:
        machines = Machines(scene, proxy, tmp_path, worker)
        await machines.worker("far")
        yield machines
    await proxy.close()


@pytest.fixture
async def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machines]:
    for name in ("AGAIN_S", "REGISTRY_EVERY_S", "STALLED_S"):
        monkeypatch.setattr(f"qinfer.segments.connector.{name}", 0.3)
    async with running(tmp_path, {}, {}) as machines:
        await machines.read_by("far")
        yield machines


async def test_images_and_answers_travel_beside_redis(machines: Machines) -> None:
    await machines.ask(8)

    assert await ways(machines.scene) == {"memory": 8}
    assert held(machines.scene) == 0
    assert await largest_entries(machines.scene) == []


@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
@pytest.mark.parametrize("after", [0, 100_000, 1_500_000])
async def test_tensors_that_do_not_come_go_through_redis(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, *, after: int, stalls: bool
) -> None:
    """Pending requests are answered, and no attempt is counted; after a while tensors travel beside Redis again."""
    redelivered = Mock()
    monkeypatch.setattr(StatsTally, "redelivered", redelivered)
    proxy = machines.proxy
    proxy.most_bytes, proxy.stalls = after, stalls
    await machines.ask(8)
    assert proxy.reached.is_set()
    before = await ways(machines.scene)
    assert before["memory"]

    proxy.most_bytes = None
    await machines.ask(2)
    await machines.read_by("far")
    found = await ways(machines.scene)
    assert found["unreachable"] > before.get("unreachable", 0)
    assert found["memory"] == before["memory"]
    memory = machines.scene.gateway.dispatcher.submission.memory
    assert memory is not None
    memory._left["double"].cancel()
    memory._return_to("double")  # as after half a minute
    await eventually(lambda: goes_beside(machines), description="tensors beside Redis")
    assert held(machines.scene) == 0
    redelivered.assert_not_called()


async def goes_beside(machines: Machines) -> bool:
    """Returns whether an image travels beside Redis."""
    before = await ways(machines.scene)
    await machines.ask(1)
    return await ways(machines.scene) == before | {"memory": before["memory"] + 1}


@pytest.mark.parametrize("stalls", [False, True], ids=["cut", "stalled"])
async def test_replies_that_do_not_come_go_through_redis(machines: Machines, *, stalls: bool) -> None:
    proxy = machines.proxy
    proxy.most_up, proxy.stalls = 1_000_000, stalls
    await machines.ask(4)
    assert proxy.reached.is_set()
    proxy.most_up = None
    await machines.read_by("far")
    await machines.ask(4)
    assert held(machines.scene) == 0


async def test_another_worker_takes_over(machines: Machines) -> None:
    """One that dies while it reads; the other one reads the same tensors."""
    await machines.worker("other", is_read=False)
    await machines.read_by("far", "other")
    machines.proxy.most_bytes, machines.proxy.stalls = 100_000, True
    asked = asyncio.create_task(machines.ask(6))
    await asyncio.wait_for(machines.proxy.reached.wait(), 10)
    await machines.scene.kill("far")
    machines.proxy.most_bytes = None

    await asked
    await machines.read_by("other")


async def test_a_worker_without_a_connection_gets_whole_requests(machines: Machines) -> None:
    """Until it has gone."""
    machines._options = {"tls_ca_file": certificate_of(machines)}
    await machines.worker("apart", is_read=False)
    await machines.ask(4)
    assert await ways(machines.scene) == {"old_worker": 4}


def certificate_of(machines: Machines) -> str:
    write_certificate(machines._directory, "ca")
    return str(machines._directory / "ca.pem")


async def test_a_large_request_whose_answer_is_too_large_for_the_connection(machines: Machines) -> None:
    """Request and answer have nearly 8 MiB each."""
    values = np.arange(2**21 - 1000, dtype="f4").reshape(1, -1)
    await machines.ask(2, values)

    assert await ways(machines.scene) == {"memory": 2}


@pytest.mark.parametrize("directory", ["m", "far"], ids=["near", "far"])
async def test_a_dead_letter_has_the_tensors_of_its_caller(tmp_path: Path, directory: str) -> None:
    """Two workers died with the request; the third copies its tensors, which the gateway then forgets."""

    def of(name: str) -> dict[str, SegmentSettings]:
        segments = SegmentSettings(directory=str(tmp_path / name), listen_host="127.0.0.1", listen_port=0)
        return {"segments": segments}

    scale(tmp_path / "repository", "double", 2.0, width=-1)
    values = np.arange(2_500_000, dtype="f4")
    async with models_served(tmp_path / "repository", of("m"), first_worker=False) as scene:
        scene._sections = of(directory)
        await scene.worker("w1", lease_s=0.2, renew_every_s=0.05, max_deliveries=2)
        await eventually(lambda: worker_owner("w1") in sharing(scene).readers, description="w1 as a reader")
        held = await given_up(scene, values)
        letters = scene.gateway._delivery.dead_letters

        async def is_dead() -> bool:
            return await letters.count("double") == 1

        await scene.http.load_model("double")
        await eventually(is_dead, description="a dead letter")
        held.release()
        (listed,) = await letters.list("double")
        letter = await letters.show("double", listed.id)
        assert letter is not None
        (tensor,) = decode_request(letter.frame, letter.payload).inputs
        assert tensor.data == values.tobytes()
        assert len(letter.frame) < 1000

        assert await letters.replay("double", letter.id)
        await eventually(lambda: scene.waits("double", 0), description="an empty lane")
        assert await letters.count("double") == 0


async def given_up(scene: ServedModels, values: np.ndarray) -> HeldTensors:
    """Lets two workers that die take a request, whose tensors lie behind other bytes of the gateway's memory."""
    held = sharing(scene).own.write([bytes(200), values.data.cast("B")], 200 + values.nbytes, "")
    assert held is not None
    tensor = Tensor("x", "FP32", (1, len(values)), values.tobytes())
    request = InferRequest(model="double", version=1, id="r", timeout_s=60.0, reply_to="r:dead", inputs=(tensor,))
    queue, lane, submitted = scene.gateway._delivery, Lane("double", 1), asyncio.Event()
    queue.submit(lane, encode_referring_request(request, held.reference, [200]), lambda _: submitted.set())
    await submitted.wait()
    assert len(await queue.fetch([lane], "dead1", 1, 0.0)) == 1

    async def is_taken() -> bool:
        return bool(await queue.reclaim([lane], "dead2", 0.01, 1))

    await eventually(is_taken, description="a second delivery")
    return held
