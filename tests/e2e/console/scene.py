"""A server with everything that the console shows: traffic, a failing and a broken model, jobs, a canary, dead letters.

python -m tests.e2e.console.scene FOLDER     serves it until Ctrl-C, for a look by hand
"""

import asyncio
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import numpy as np
from pydantic import SecretStr

from qinfer.cli.example import Name, write
from qinfer.cli.local.machine import read_run
from qinfer.client import Client
from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy
from qinfer.testing import wait_until
from qinfer.wire.frame import encode_request
from qinfer_api.console.tensors import png
from tests.e2e import conftest

APP = """
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

import qinfer

FRUIT = {"orange": (235, 130, 30), "plum": (120, 40, 110), "lime": (110, 175, 40)}

@dataclass
class Fruit:
    boxes: Annotated[np.ndarray, "FP32", 3, 4]
    scores: Annotated[np.ndarray, "FP32", 3]
    labels: Annotated[np.ndarray, "BYTES", 3]

@qinfer.model
def fruit(image: Annotated[np.ndarray, "FP32", 240, 320, 3]) -> list[Fruit]:
    return [Fruit(*map(np.array, zip(*(find(one, name) for name in FRUIT)))) for one in image]

def find(image, name):
    # the box of a colour, the share of the disc in it that has the colour, and its name
    rows, columns = np.nonzero(np.abs(255 * image - FRUIT[name]).sum(axis=-1) < 110)
    if not rows.size:
        return np.zeros(4, np.float32), np.float32(0), name.encode()
    box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], np.float32)
    disc = np.pi / 4 * (box[2] - box[0]) * (box[3] - box[1])
    return box, np.float32(min(rows.size / disc, 0.97)), name.encode()

@qinfer.model
def shout(text: str) -> str:
    return text.upper()

@qinfer.model
def rate(text: str) -> float:
    if text == "bad":
        raise ValueError("the text is <b>bad</b>")
    return len(text) / 2

@qinfer.model
def tell(prompt: str) -> Iterator[str]:
    for word in prompt.split():
        yield word
"""
WITHIN_S = 120.0
START_WITHIN_S = 240.0
"""Several models and an app start slowly on a busy machine."""
ENDPOINT = {
    "targets": [
        {"model": "digits", "version": 1, "role": "stable"},
        {"model": "digits", "version": 2, "role": "canary"},
    ],
    "canary": {"steps": [{"weight": 0.1, "least_s": 600.0}, {"weight": 0.5, "least_s": 600.0}]},
}
LETTERS = 3
FRUIT = ((150, 330, 76, (110, 175, 40)), (330, 250, 92, (120, 40, 110)), (510, 320, 110, (235, 130, 30)))
"""The discs in the picture for the model `fruit`: x, y, radius and colour."""


class Scene(NamedTuple):
    """A running server: its address, and the console's."""

    url: str
    folder: Path

    @property
    def console(self) -> str:
        return f"{self.url}/console/"


@contextmanager
def showing(folder: Path) -> Iterator[Scene]:
    """Runs the server, with traffic until the block ends."""
    write(Name.digits, folder)
    models = folder / "models"
    shutil.copytree(models / "digits" / "1", models / "digits" / "2")
    config = models / "digits" / "config.pbtxt"
    config.write_text(config.read_text() + "\nversion_policy: { all { } }\n")
    broken = models / "broken"
    (broken / "1").mkdir(parents=True)
    (broken / "1" / "model.onnx").write_bytes(b"no model")
    (broken / "config.pbtxt").write_text('name: "broken" backend: "onnxruntime"')
    (folder / "app.py").write_text(APP)
    options = (
        str(folder / "app.py"),
        "--model-control-mode",
        "explicit",
        "--load-model",
        "*",
        "--allow-store",
        str(folder),
    )
    patient = mock.patch.object(conftest, "READY_WITHIN_S", START_WITHIN_S)
    with patient, conftest.running(models, folder, 1, options, QINFER_REPOSITORY__STRICT_READINESS="false") as stack:
        scene = Scene(f"http://{stack.address}", folder)
        over = threading.Event()
        with httpx.Client(base_url=scene.url, timeout=30) as http:
            for name in ("digits", "shout", "rate", "tell", "fruit"):
                wait_until(partial(_is_ready, http, name), WITHIN_S, name)
            reply = http.put("/v1/endpoints/reader", json=ENDPOINT)
            assert reply.status_code == 200, reply.text
        threads = [threading.Thread(target=_ask, args=(scene.url, over, number)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            _submit_job(scene)
            burying = threading.Thread(target=lambda: asyncio.run(_bury(folder)))  # playwright has a loop in this one
            burying.start()
            burying.join()
            yield scene
        finally:
            over.set()
            for thread in threads:
                thread.join()


def fruit_picture() -> bytes:
    """Returns a PNG of 640x480 pixels with a lime, a plum and an orange, which the model `fruit` finds."""
    rows, columns = np.mgrid[0:480, 0:640]
    pixels = np.empty((480, 640, 3))
    pixels[:] = np.where(rows < 330, 232, 205)[..., None] - rows[..., None] / 30
    for x, y, radius, colour in (
        (150, 330, 76, (110, 175, 40)),
        (330, 250, 92, (120, 40, 110)),
        (510, 320, 110, (235, 130, 30)),
    ):
        shadow = ((columns - x) / (1.1 * radius)) ** 2 + ((rows - y - radius) / (0.22 * radius)) ** 2 < 1
        pixels[shadow] *= 0.86
        distance = ((columns - x) ** 2 + (rows - y) ** 2) / radius**2
        light = 1.06 - 0.3 * (((columns - x + radius / 3) ** 2 + (rows - y + radius / 3) ** 2) / (1.6 * radius) ** 2)
        disc = distance < 1
        pixels[disc] = (np.array(colour) * light[..., None])[disc]
    return png(np.clip(pixels, 0, 255).astype(np.uint8))


def _is_ready(http: httpx.Client, name: str) -> bool:
    return http.get(f"/v2/models/{name}/ready").status_code == 200


def _ask(url: str, over: threading.Event, number: int) -> None:
    image = np.zeros((1, 64), np.float32).tolist()
    with httpx.Client(base_url=url, timeout=30) as http:
        count = 0
        while not over.wait(0.02):
            count += 1
            with suppress(httpx.HTTPError):
                name = "reader" if count % 4 == 0 else "digits"
                http.post(f"/models/{name}", json={"image": image})
                if count % 5 == number:
                    http.post("/models/shout", json={"text": "hello"})
                if count % 9 == 0:
                    http.post("/models/rate", json={"text": "bad" if count % 4 == 0 else "good"})


def _submit_job(scene: Scene) -> None:
    """Scores rows, a few of which are damaged, in a job that allows that, and in one that does not."""
    rows = (scene.folder / "digits.jsonl").read_text().splitlines()
    damaged = json.dumps({**json.loads(rows[40]), "pixels": [0]})
    (scene.folder / "rows.jsonl").write_text("\n".join([*rows * 30, damaged, *rows * 30]) + "\n")
    wanted: dict[str, Any] = {"columns": {"image": "pixels"}, "rows_per_part": 250, "key": "id"}
    with Client(scene.url) as client:
        for name, threshold in (("nightly-scores", -1), ("strict-scores", 0)):
            output = str(scene.folder / "out" / name)
            client.submit_job(
                "digits", str(scene.folder / "rows.jsonl"), output, id=name, error_threshold=threshold, **wanted
            )


async def put(queue: Queue, lane: Lane, request: InferRequest) -> None:
    """Puts a request into a lane, and waits until it is there."""
    submitted = asyncio.Event()
    queue.submit(lane, encode_request(request), lambda _: submitted.set())
    await submitted.wait()


async def _bury(folder: Path) -> None:
    """Buries requests from a lane that no worker reads."""
    run = read_run(folder / "data")
    assert run is not None
    queue = await Queue.connect(RedisSettings(url=SecretStr(run.redis_url)))
    lane = Lane("digits", 1, "p32")
    await queue.ensure([lane])
    for number in range(LETTERS):
        image = np.zeros((1, 64), np.float32)
        image[0, number * 8 : number * 8 + 30] = 16.0
        request = InferRequest(
            model="digits", version=1, id=f"01JX3M3TC8Z6Q5RYB7WS2K4D9{number}.0.digits",
            inputs=(from_numpy("image", image),), timeout_s=30.0, reply_to="",
        )  # fmt: skip
        await put(queue, lane, request)
        (lease,) = await queue.fetch([lane], "scene", 1, 5)
        await queue.bury(
            lease, request.id, "inference_failed", f"the worker died {3} times while it executed image {number}"
        )
    await queue.close()


if __name__ == "__main__":
    with showing(Path(sys.argv[1])) as shown:
        sys.stdout.write(f"{shown.console}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            signal.pause()
