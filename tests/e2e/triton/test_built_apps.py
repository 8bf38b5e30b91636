"""A repository that `qinfer build` has made of an app, in NVIDIA's server and in qinfer: answers are compared."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.functions.repository import build_repository
from qinfer.testing import wait_until
from tests.support import functions_app
from tests.support.c_backends import server, triton
from tests.support.docs.doc_blocks import ROOT
from tests.support.servers.servers import free_port

pytestmark = pytest.mark.timeout(300)


def tensor(name: str, value: Any) -> Mapping[str, Any]:
    values = value if isinstance(value, list) else [value]
    datatype = "BYTES" if isinstance(values[0], str) else "INT64"
    return {"name": name, "shape": [len(values), 1], "datatype": datatype, "data": values}


def ask(url: str, model: str, parameters: Mapping[str, Any] | None = None, **inputs: Any) -> tuple[int, Any]:
    body = {"inputs": [tensor(*each) for each in inputs.items()], "parameters": parameters or {}}
    answer = httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=60)
    found = answer.json()
    return answer.status_code, {each["name"]: each["data"] for each in found.get("outputs", ())} or found["error"]


def events(url: str, model: str) -> list[str]:
    with httpx.stream("POST", f"{url}/v2/models/{model}/generate_stream", json={"prompt": "a"}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [line.partition('"output":')[2] or line for line in lines]


@contextmanager
def up(models: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "qinfer.cli.main", "up", "--model-repository", str(models)]
    command += ["--http-port", url.rpartition(":")[2], "--grpc-port", "0", "--metrics-port", "0"]
    strict = {"QINFER_REPOSITORY__STRICT_READINESS": "true"}
    data = models.parent / "data"
    with subprocess.Popen([*command, "--data-dir", str(data)], env={**os.environ, **strict}) as process:
        try:
            wait_until(lambda: is_ready(url), 120)
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    home = tmp_path_factory.mktemp("built")
    (home / "app").mkdir()
    shutil.copy(functions_app.__file__, home / "app" / "app.py")
    build_repository(str(home / "app" / "app.py"), home / "models", os.environ)
    shutil.rmtree(home / "app")
    shutil.copytree(home / "models", home / "theirs" / "models")
    # In place of an installation: NVIDIA's server ignores PYTHONPATH, and needs a numpy of its time.
    ours = next(each for each in sys.path if each.endswith("site-packages"))
    paths = [str(triton().resolve().parents[1]), ours, str(ROOT), str(ROOT / "workers")]
    for file in home.glob("theirs/models/*/1/model.py"):
        file.write_text(f"import sys\nsys.path[:0] = {paths!r}\n{file.read_text()}")
    with ExitStack() as stack:
        theirs = stack.enter_context(server(home / "theirs" / "models", triton() / "backends"))
        yield [theirs, stack.enter_context(up(home / "models"))]


@pytest.mark.parametrize(
    ("model", "inputs", "answer"),
    [
        ("embed", {"text": ["hé", "a"]}, (200, {"embedding": [2.0, 0.0, 1.0, 1.0]})),
        ("rate", {"title": "é"}, (200, {"label": ["É"], "score": [1.5]})),
        ("rate", {"title": "a", "stars": 5}, (200, {"label": ["A"], "score": [2.5]})),
        ("rate", {"title": "bad"}, (500, "ValueError: no bad titles")),
        ("upper", {"text": ["é", "b"]}, (200, {"output": ["É", "B"]})),
        ("size", {"image": "abc"}, (400, "input 'image' has an image that is no readable JPEG or PNG")),
    ],
)
def test_both_servers_answer_alike(urls: list[str], model: str, inputs: Any, answer: Any) -> None:
    assert [ask(url, model, **inputs) for url in urls] == [answer, answer]


def test_both_servers_keep_states(urls: list[str]) -> None:
    def step(url: str, number: int, **flags: bool) -> tuple[int, Any]:
        return ask(
            url, "total", {"sequence_id": 7, "sequence_start": False, "sequence_end": False, **flags}, number=number
        )

    for url in urls:
        assert step(url, 3, sequence_start=True) == (200, {"output": [3]})
        assert step(url, 4, sequence_end=True) == (200, {"output": [7]})


@pytest.mark.parametrize(
    ("model", "expected"),
    [("write", ['"a 0"}', '"a 1"}']), ("write_later", ['"a"}', '{"error":"RuntimeError: the pen broke"}'])],
)
def test_both_servers_stream(urls: list[str], model: str, expected: list[str]) -> None:
    assert [events(url, model) for url in urls] == [expected, expected]


def test_a_call_of_another_model_says_that_triton_can_not(urls: list[str]) -> None:
    theirs, ours = (ask(url, "longest", texts="a bcd") for url in urls)

    assert ours == (200, {"output": ["bcd"]})
    assert theirs[0] == 500
    assert "qinfer.call can't run model 'embed' in Triton" in theirs[1]
