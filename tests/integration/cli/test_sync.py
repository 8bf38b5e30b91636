"""`qinfer models sync` beside a real worker: what it waits for, and how it ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner

from qinfer.cli.main import app
from tests.support import models
from tests.support.worker_processes import worker_processes

pytestmark = pytest.mark.timeout(120)


def write(repository: Path, name: str) -> Path:
    """Writes a model whose output is its input."""
    port = [("x", "FP32", (1,))], [("y", "FP32", (1,))]
    return models.write(repository, name, [helper.make_node("Identity", ["x"], ["y"])], *port)


def install_unknown(version: Path) -> None:
    """Gives a model an operator that no runtime has: it can be read, and not be loaded."""
    model = onnx.load(version / "model.onnx")
    model.graph.node[0].domain = "nowhere"
    model.opset_import.append(helper.make_opsetid("nowhere", 1))
    onnx.save(model, version / "model.onnx")


async def sync(url: str, repository: Path, *words: str) -> tuple[int, Any, str]:
    arguments = ["models", "sync", "-m", str(repository), "--redis", url, "--json", *words]
    ended = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return ended.exit_code, {row["model"]: row for row in json.loads(ended.stdout)}, ended.stderr


async def test_a_sync_waits_and_tells_what_can_not_be_served(tmp_path: Path) -> None:
    """Not ready in time without a worker, ready with one; not loadable; not readable."""
    repository = tmp_path / "repository"
    write(repository, "good")
    async with worker_processes(tmp_path) as pool:
        late = await sync(pool.url, repository, "--wait", "--timeout", "0")
        pool.start()
        ready = await sync(pool.url, repository, "--wait")
        install_unknown(write(repository, "broken"))
        broken = await sync(pool.url, repository, "--wait")
        (repository / "broken" / "config.pbtxt").write_text("no configuration {")
        unread = await sync(pool.url, repository)

    assert (late[0], "model 'good' is not ready after 0 s" in late[2]) == (69, True), late
    assert ready[0] == 0, ready
    assert (broken[0], "model 'broken' can't be loaded: " in broken[2]) == (1, True), broken
    assert (unread[0], "model 'broken' can't be read: " in unread[2]) == (1, True), unread
    assert unread[1]["broken"]["error"]
