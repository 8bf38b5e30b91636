"""`qinfer up` keeps large tensors and results of stored requests in files of its data directory, not in Redis."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis

from qinfer.cli.local.machine import read_run
from qinfer.testing import wait_until
from tests.integration.cli.test_up import QUICK_LEASES, WITHIN_S, Up, run
from tests.support import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = "identity_fp32"
TENSOR = np.arange(2**20, dtype="<f4").tobytes()  # 4 MiB
SMALL_BYTES = 2**20
NO_OWNER = hashlib.sha256(b"").hexdigest()[:16]


class Installation:
    """An `up` that may be started again."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data #1 %20"
        models.identity(folder / "models", "FP32")
        self.start()

    def start(self) -> None:
        folder = self.data_dir.parent
        options = ("--durability", "always", "--allow-store", str(folder))
        self.up = Up(folder / "models", self.data_dir, *options, env=QUICK_LEASES).wait_ready()

    def stop(self) -> None:
        assert self.up.stop() == 0, self.up.log.read_text()


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    one = Installation(tmp_path)
    yield one
    one.stop()


def submit(up: Up) -> str:
    """Submits a request of one large tensor; returns the URL of its record, without the host."""
    parameters = {"binary_data_size": len(TENSOR)}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(TENSOR) // 4], "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    url = f"{up.url}/v1/models/{MODEL}/requests"
    reply = httpx.post(url, content=head + TENSOR, headers=headers, timeout=WITHIN_S)
    assert reply.status_code == 202, reply.text
    return str(reply.headers["Location"])


def result(up: Up, request: str) -> httpx.Response:
    return httpx.get(f"{up.url}{request}/result?wait=30", timeout=WITHIN_S)


def outputs(reply: httpx.Response) -> bytes:
    assert reply.status_code == 200, reply.text
    return reply.content[int(reply.headers["Inference-Header-Content-Length"]) :]


def files(data_dir: Path) -> list[Path]:
    """Returns the files of requests; a process that starts writes one of no owner to try the store, and removes it."""
    found = [path for path in (data_dir / "payloads").rglob("*") if path.is_file()]
    return [path for path in found if not path.name.startswith(NO_OWNER)]


def sizes_in_redis(data_dir: Path) -> dict[str, int]:
    run = read_run(data_dir)
    assert run is not None
    with redis.Redis.from_url(run.redis_url) as client:
        return {key.decode(): client.memory_usage(key, samples=0) or 0 for key in client.scan_iter()}


def test_large_tensors_and_results_are_files(installation: Installation) -> None:
    """Beside Redis, not in its memory nor its append-only file; a restart keeps them, and DELETE removes them."""
    up, data_dir = installation.up, installation.data_dir
    worker = up.child("qinfer_workers.inference")
    worker.suspend()
    request = submit(up)
    (tensors,) = files(data_dir)
    assert tensors.read_bytes() == TENSOR
    worker.resume()
    assert outputs(result(up, request)) == TENSOR
    wait_until(lambda: not tensors.exists(), WITHIN_S, "the removal of the tensors")

    (stored,) = files(data_dir)
    assert len(TENSOR) < stored.stat().st_size < len(TENSOR) + 10_000
    assert (data_dir / "payloads").stat().st_mode & 0o777 == 0o700
    assert {key: size for key, size in sizes_in_redis(data_dir).items() if size > SMALL_BYTES} == {}
    assert sum(path.stat().st_size for path in (data_dir / "redis").rglob("*") if path.is_file()) < SMALL_BYTES

    job = {"model": MODEL, "inputs": [f"file://{stored}"], "output": {"url": f"file://{data_dir.parent}/out"}}
    refused = httpx.post(f"{up.url}/v1/jobs", json=job, timeout=WITHIN_S)
    assert (refused.status_code, "is in none of the stores" in refused.text) == (403, True), refused.text
    doctor = run("doctor", "--data-dir", str(data_dir), "--no-runtimes", "--json")
    found = [one["text"] for one in doctor.document["findings"] if one["subject"] == "payload store"]
    assert found[0] == "readable and writable", found

    installation.stop()
    installation.start()
    assert outputs(result(installation.up, request)) == TENSOR
    assert files(data_dir) == [stored]
    httpx.delete(f"{installation.up.url}{request}", timeout=WITHIN_S).raise_for_status()
    wait_until(lambda: files(data_dir) == [], WITHIN_S, "the removal of the result")
    assert result(installation.up, request).status_code == 410


def test_a_lost_file_is_an_error_that_says_so(installation: Installation) -> None:
    """A request or result is lost with its file, and nothing else; its dead letter says that it can't be replayed."""
    for damage in ("removed", "cut"):
        lose(installation.up, installation.data_dir, damage)


def lose(up: Up, data_dir: Path, damage: str) -> None:
    worker = up.child("qinfer_workers.inference")
    worker.suspend()
    lost = submit(up)
    spoil(files(data_dir), damage)
    kept = submit(up)
    worker.resume()

    failed = result(up, lost)
    said = "they were deleted there before their time" if damage == "removed" else f"1 of {len(TENSOR)} bytes"
    assert (failed.status_code, said in failed.text) == (500, True), failed.text
    assert outputs(result(up, kept)) == TENSOR
    (letter,) = run("dlq", "list", MODEL, "--data-dir", str(data_dir), "--json").document
    wait_until(lambda: len(files(data_dir)) == (1 if damage == "removed" else 2), WITHIN_S, "one result")
    if damage == "removed":
        for command in ("show", "replay"):
            shown = run("dlq", command, MODEL, letter["id"], "--data-dir", str(data_dir))
            assert "can't be replayed" in " ".join((shown.stdout + shown.stderr).split()), shown
    assert run("dlq", "purge", MODEL, "--all", "--yes", "--data-dir", str(data_dir)).code == 0

    (stored,) = files(data_dir)
    spoil([stored], damage)
    gone = result(up, kept)
    assert (gone.status_code, "is lost: it was deleted or damaged" in gone.text) == (410, True), gone.text
    another = submit(up)
    assert outputs(result(up, another)) == TENSOR
    for request in (kept, another):
        httpx.delete(f"{up.url}{request}", timeout=WITHIN_S).raise_for_status()
    wait_until(lambda: files(data_dir) == [], WITHIN_S, "the removal of the results")


def spoil(paths: list[Path], damage: str) -> None:
    for path in paths:
        path.unlink()
        if damage == "cut":
            path.write_bytes(b"x")
