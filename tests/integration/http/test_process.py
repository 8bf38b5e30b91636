"""`python -m qinfer_api` as a process: its exit codes, its log line, its drain.

`tests/integration/worker/test_starts_without_redis.py` has its start while Redis is away.
"""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server")

COMMAND = [sys.executable, "-m", "qinfer_api"]


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A private Redis on a unix socket."""
    path = tmp_path / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "yes"]
    with subprocess.Popen(["redis-server", *options], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "ready to accept connections" in line.lower():
                break
        yield f"unix://{path}"
        server.terminate()
        server.stdout.read()


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    free = {"QINFER_GRPC__PORT": "0", "QINFER_METRICS__PORT": "0"}
    return {"PATH": "/usr/bin:/bin", "QINFER_REPOSITORY__PATH": str(tmp_path / "none"), **free, **variables}


def test_it_serves_and_drains(tmp_path: Path, redis_url: str) -> None:
    """One log line tells the real ports; SIGTERM ends it with 0."""
    variables = environment(tmp_path, QINFER_REDIS__URL=redis_url, QINFER_HTTP__PORT="0")
    with subprocess.Popen(COMMAND, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        with urllib.request.urlopen(line["url"] + "/v2", timeout=10) as reply:
            name = json.load(reply)["name"]
        with urllib.request.urlopen(line["metrics"], timeout=10) as reply:
            metrics = reply.read().decode()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        code = process.wait(20)

    assert (line["event"], name, code) == ("gateway serving", "triton", 0), rest
    assert re.search(r'^qinfer_store_up\{process="gateway-\w+"\} 1.0$', metrics, re.MULTILINE)


def test_it_ends_by_sigterm_while_it_waits_for_redis(tmp_path: Path) -> None:
    variables = environment(tmp_path, QINFER_REDIS__URL=f"unix://{tmp_path}/nothing.sock", QINFER_HTTP__PORT="0")
    variables["QINFER_REDIS__CONNECT_TIMEOUT_S"] = "0.2"
    with subprocess.Popen(COMMAND, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        waiting = next(line for line in process.stderr if "start waits for redis" in line)
        process.terminate()
        rest = process.stderr.read()
        code = process.wait(20)

    assert code == 0, waiting + rest
    assert "Traceback" not in rest


def test_it_can_be_interrupted_while_it_starts(tmp_path: Path) -> None:
    """Exit code 130 and no traceback, though Redis does not answer."""
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        variables = environment(tmp_path, QINFER_REDIS__URL=f"unix://{path}", QINFER_HTTP__PORT="0")
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in a shell's &
        with subprocess.Popen(COMMAND, env=variables, stderr=subprocess.PIPE, text=True) as process:
            signal.signal(signal.SIGINT, inherited)
            connection, _ = mute.accept()
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=30)
            connection.close()

    assert (process.returncode, rest) == (130, "")


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    """Exit code 2, and the variable."""
    variables = environment(tmp_path, QINFER_HTTP__PORT="many")

    ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    assert "QINFER_HTTP__PORT" in ended.stderr


def test_a_taken_port_is_named(tmp_path: Path, redis_url: str) -> None:
    """Exit code 2, and what to change."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        variables = environment(tmp_path, QINFER_REDIS__URL=redis_url, QINFER_HTTP__PORT=port)
        ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    assert f"QINFER_HTTP__PORT={port}" in ended.stderr


def test_a_taken_grpc_port_is_named(tmp_path: Path, redis_url: str) -> None:
    """Exit code 2, what to change, and not a word more."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        free = {"QINFER_HTTP__PORT": "0", "QINFER_GRPC__PORT": port}
        variables = environment(tmp_path, QINFER_REDIS__URL=redis_url) | free
        ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    assert f"QINFER_GRPC__PORT={port}" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("section", ["HTTP", "GRPC"])
def test_a_wrong_certificate_is_named(tmp_path: Path, section: str) -> None:
    """Exit code 2 before Redis is looked for, and not a word more."""
    (tmp_path / "junk.pem").write_text("junk")
    tls = {f"QINFER_{section}__TLS_{kind}": str(tmp_path / "junk.pem") for kind in ("CERTFILE", "KEYFILE")}
    variables = environment(tmp_path, QINFER_HTTP__PORT="0", **tls)

    ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    assert f"QINFER_{section}__TLS_KEYFILE" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_help_needs_no_redis() -> None:
    """It says how to configure the program."""
    ended = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 0
    assert "QINFER_REDIS__URL" in ended.stdout
