"""What docker-compose.yml has Redis and the store do, done by the same commands without containers."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from qinfer_workers.bridge.config import load_config
from tests.support.deploy.deployments import DEPLOY, SECRETS, compose
from tests.support.servers.s3_server import S3Server
from tests.support.servers.servers import free_port, is_listening, valkey, wait_until

SERVICES = compose()["services"]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Runs the command of the service `redis`, on a port and in a directory of the test."""
    service, port = SERVICES["redis"], free_port()
    (tmp_path / "valkey-server").symlink_to(valkey())
    settings = (DEPLOY / "compose" / "redis.conf").read_text().replace("port 6379", f"port {port}")
    (tmp_path / "redis.conf").write_text(settings.replace("dir /data", f"dir {tmp_path}"))
    text = service["command"][0].replace("/etc/qinfer/redis.conf", str(tmp_path / "redis.conf"))
    process = subprocess.Popen(
        [*service["entrypoint"], text],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **service["environment"]},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_listening(port))
        yield process, port
    finally:
        process.kill()
        process.wait()


def _client(port: int, password: str | None = SECRETS["REDIS_PASSWORD"]) -> redis.Redis:
    return redis.Redis(port=port, password=password, decode_responses=True, retry=Retry(NoBackoff(), 0))


def test_redis_is_as_the_queue_needs_it(queue: tuple["subprocess.Popen[bytes]", int]) -> None:
    """It writes all down, throws nothing away, asks for the password and does not show it, and ends on SIGTERM."""
    process, port = queue

    with _client(port) as client:
        said = client.config_get("maxmemory*", "append*")
    with _client(port, None) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    shown = Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGTERM)

    assert (said["appendonly"], said["appendfsync"]) == ("yes", "everysec")
    assert (said["maxmemory-policy"], said["maxmemory"]) == ("noeviction", str(2**30))
    assert SECRETS["REDIS_PASSWORD"] not in shown
    assert process.wait(20) == 0


def test_the_bucket_is_made_and_may_be_there() -> None:
    """The one-shot container works on a new store, and again on the next `up`."""
    service = SERVICES["store-bucket"]
    program, flag, code = service["command"]
    twice = "; ".join([code, "s3fs.S3FileSystem.clear_instance_cache()", code])
    with S3Server() as server:
        environment = os.environ | dict(server.environment) | {"BUCKET": service["environment"]["BUCKET"]}

        subprocess.run([sys.executable, flag, twice], env=environment, check=True, timeout=30)

        with urllib.request.urlopen(f"{server.endpoint}/qinfer") as answer:
            assert b"<Name>qinfer</Name>" in answer.read()
    assert program == "python"


def test_the_example_of_routes_is_one() -> None:
    """The bridge takes it, and serves metrics where Prometheus asks."""
    config = load_config(DEPLOY / "compose" / "routes.yaml", {"BRIDGE_PASSWORD": "secret"})

    assert config.metrics_host == "0.0.0.0"
