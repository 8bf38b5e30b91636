"""`qinfer up --reload`: saves under load, one of them broken, without a failed request."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qinfer.testing import wait_until

APP = """
import qinfer


@qinfer.model
class Hi:
    def setup(self) -> None:
        {setup}

    def predict(self, text: str) -> str:
        return text + "{version}"
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app" / "app.py"
    path.parent.mkdir()
    path.write_text(APP.format(setup="pass", version=1))
    return path


@pytest.fixture
def url(app: Path, tmp_path: Path) -> Iterator[str]:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "qinfer.cli.main", "up", str(app), "--reload", "--data-dir", str(data)]
    command += [
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
        "--model-repository",
        f"{data}/functions",
    ]
    process = subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    running = next(json.loads(line) for line in process.stderr if '"running"' in line)
    rest = threading.Thread(target=process.stderr.read)
    rest.start()
    yield next(line.split()[1] for line in running["summary"] if line.startswith("URL"))
    process.terminate()
    process.wait(20)
    rest.join()
    process.stderr.close()


@pytest.mark.timeout(120)
def test_the_old_model_answers_until_the_new_one_is_ready_and_if_it_never_is(app: Path, url: str) -> None:
    statuses: set[int] = set()
    seen: set[str] = set()
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url) as client:
            while not is_over.is_set():
                answer = client.post("/models/hi", json={"text": "a"})
                statuses.add(answer.status_code)
                seen.add(answer.json().get("output", answer.text))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        app.write_text(APP.format(setup="pass", version=2))
        wait_until(lambda: "a2" in seen, 30)
        app.write_text("import nowhere_at_all\n")
        app.write_text(APP.format(setup="raise RuntimeError('broken')", version=3))
        app.write_text(APP.format(setup="pass", version=4))
        wait_until(lambda: "a4" in seen, 30)
    finally:
        is_over.set()
        for asker in askers:
            asker.join()

    assert (statuses, seen) == ({200}, {"a1", "a2", "a4"})
