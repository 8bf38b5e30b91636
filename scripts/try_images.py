"""Builds each target of deploy/docker/Dockerfile, runs it as it would run in a cluster, and prints what was seen.

    scripts/images                    every target
    scripts/images gateway worker     these alone
    scripts/images --engine buildah   with this engine; default: docker, podman or buildah, whichever works

Each program has to run as uid 10001, become healthy by the image's own health check, and end with 0 after SIGTERM,
within the grace period of docker-compose.yml. Gateway and worker answer a request for a model that is mounted
read-only; with the bulk worker they score a file; the bridge takes a message and replies. Exits with 1 when an image
does not work.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import yaml
from kombu import Connection

import qinfer
from examples import digits
from qinfer.queue.embedded import find_redis_server
from scripts.containers import ROOT, Config, Container, Engine, ImageFailed, find_engine, removed_after
from scripts.rooms import free_port

UID = 10001
HEALTHY_WITHIN_S, SERVED_WITHIN_S, GRACE_S = 90.0, 90.0, 10.0
TARGETS = ("runtime", "gateway", "worker", "bulk", "bridge", "flower")
ROUTES = """
routes:
  - name: digits
    model: digits
    source: {{url: "{redis}", queue: tasks}}
    sink: {{reply_to: true, routing_key: predictions}}
    body: {{columns: {{image: pixels}}}}
"""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One line of the table.

    Attributes:
        target: The target.
        size: The image's size.
        uid: The user id that the program runs as.
        healthy_s: Seconds until its health check said so.
        served: What it did.
        ended: Its exit status after SIGTERM, and the seconds that took.
    """

    target: str
    size: str = ""
    uid: str = ""
    healthy_s: str = ""
    served: str = ""
    ended: str = ""

    def __str__(self) -> str:
        return f"{self.target:8} {self.size:>8} {self.uid:>6} {self.healthy_s:>8} {self.ended:>12}  {self.served}"


@dataclass(slots=True, kw_only=True)
class Scene:
    """A place where the images run together: a Redis on loopback, a model, a folder of data, a file of routes."""

    directory: Path
    redis: str = ""
    port: int = field(default_factory=free_port)
    rows: dict[str, Seen] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What all programs are started with; they bind loopback, because they share the machine's network."""
        return {
            "QINFER_REDIS__URL": f"{self.redis}/0",
            "QINFER_HTTP__HOST": "127.0.0.1",
            "QINFER_HTTP__PORT": str(self.port),
            "QINFER_GRPC__PORT": "0",
            "QINFER_METRICS__PORT": "0",
            "QINFER_STORES__ALLOW": '["file:///data"]',
            "CELERY_BROKER_URL": f"{self.redis}/0",
        }

    @property
    def volumes(self) -> list[str]:
        """What is mounted into every container."""
        mounts = [f"{self.directory}/models:/models:ro", f"{self.directory}/data:/data"]
        return [*mounts, f"{self.directory}/routes.yaml:/etc/qinfer/routes.yaml:ro"]

    def prepare(self) -> None:
        """Writes what is mounted, for uid 10001 to read, and to write the data."""
        digits.build(self.directory / "models")
        (self.directory / "data").mkdir()
        images = pa.array([[0.0] * 64] * 100, pa.list_(pa.float32()))
        pq.write_table(pa.table({"id": range(100), "image": images}), self.directory / "data" / "in.parquet")
        (self.directory / "routes.yaml").write_text(ROUTES.format(redis=f"{self.redis}/1"))
        for path in [self.directory, *self.directory.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        (self.directory / "data").chmod(0o777)


def main() -> int:
    """Builds and runs the targets that were named; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the images for CPUs, run each, and print their sizes.")
    parser.add_argument("targets", nargs="*", metavar="target", help=f"default: all; {', '.join(TARGETS)}")
    parser.add_argument("--engine", default="", choices=["docker", "podman", "buildah"], help="default: what works")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    targets = [each for each in TARGETS if not arguments.targets or each in arguments.targets]
    try:
        engine = find_engine(arguments.engine)
        images = {target: _build(engine, target) for target in targets}
        with _scene() as scene:
            try_images(engine, images, scene)
    except ImageFailed as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    print("target       size    uid  healthy        ended  served")
    for row in scene.rows.values():
        print(row)
    return 0


def try_images(engine: Engine, images: dict[str, str], scene: Scene) -> None:
    """Runs all images together, uses them, and ends them one after the other.

    Raises:
        ImageFailed: One does not work.
    """
    with ExitStack() as stack:
        running: dict[str, Container] = {}
        for target, image in images.items():
            config = engine.config(image)
            _check_config(target, config)
            row = scene.rows[target] = Seen(target=target, size=engine.size(image))
            command = [] if config.health else ["sleep", "3600"]
            if target == "flower":
                command = [word.replace("0.0.0.0", "127.0.0.1") for word in config.command[2:]]  # noqa: S104  it is replaced
            container = stack.enter_context(
                removed_after(engine.start(image, command, scene.environment, scene.volumes))
            )
            row.healthy_s = _until_healthy(target, container, config)
            row.uid = str(container.uid())
            if row.uid != str(UID):
                raise ImageFailed(f"{target} runs as uid {row.uid}")
            running[target] = container
        for needed, use in USES.items():
            if set(needed) <= images.keys():
                text = _used(use, scene, {target: running[target] for target in needed})
                scene.rows[needed[-1]].served = text
        for target, container in reversed(running.items()):
            scene.rows[target].ended = _end(target, container)


def infer(scene: Scene, _: dict[str, Container]) -> str:
    """Asks the gateway for a prediction of the worker's model."""
    with qinfer.Client(scene.url) as client:
        result = client.infer(digits.NAME, {"image": [[0.0] * 64]}, timeout_s=SERVED_WITHIN_S)
    return f"a request: label {result['label'].item()}"


def score(scene: Scene, _: dict[str, Container]) -> str:
    """Lets the bulk worker plan, and the worker score, a file of 100 rows."""
    with qinfer.Client(scene.url) as client:
        job = client.submit_job(digits.NAME, "file:///data/in.parquet", "file:///data/out", key="id")
        status = job.wait(timeout_s=SERVED_WITHIN_S)
    rows = ds.dataset(scene.directory / "data" / "out", exclude_invalid_files=True).count_rows()
    if status.state != "completed" or rows != 100:
        raise ImageFailed(f"the job is {status.state} with {rows} rows: {status.error}")
    return f"a bulk job: {rows} rows"


def pass_messages(scene: Scene, _: dict[str, Container]) -> str:
    """Puts a task into the bridge's queue, and takes the prediction."""
    with Connection(f"{scene.redis}/1") as connection:  # type: ignore[attr-defined]  # its types lack it
        connection.SimpleQueue("tasks").put({"pixels": [0.0] * 64}, reply_to="predictions", correlation_id="1")
        message = connection.SimpleQueue("predictions").get(timeout=SERVED_WITHIN_S)
        message.ack()
    return f"a message: {str(message.payload)[:40]}"


def show_version(_: Scene, containers: dict[str, Container]) -> str:
    """Asks the command line for its version."""
    printed = containers["runtime"].run(["qinfer", "--version"]).stdout.strip()
    if qinfer.__version__ not in printed:
        raise ImageFailed(f"qinfer --version prints {printed!r}")
    return printed


USES: dict[tuple[str, ...], Callable[[Scene, dict[str, Container]], str]] = {
    ("runtime",): show_version,
    ("gateway", "worker"): infer,
    ("gateway", "worker", "bulk"): score,
    ("gateway", "worker", "bridge"): pass_messages,
}
"""What the programs of some targets do together; the table has it in the line of the last."""


def _build(engine: Engine, target: str) -> str:
    began_s = time.monotonic()
    image = engine.build(target)
    print(f"{target}: built in {time.monotonic() - began_s:.0f} s", flush=True)
    return image


def _check_config(target: str, config: Config) -> None:
    """Compares what an image says of itself with what clusters rely on."""
    if config.user != f"{UID}:{UID}":
        raise ImageFailed(f"{target} has the user {config.user!r}")
    version = config.labels.get("org.opencontainers.image.version")
    if version != qinfer.__version__:
        raise ImageFailed(f"{target} has the label of version {version!r}")


def _until_healthy(target: str, container: Container, config: Config) -> str:
    """Waits until the image's health check passes; returns the seconds."""
    if not config.health:
        return "-"
    began_s = time.monotonic()
    while (checked := container.run(config.health)).returncode:
        if container.has_ended() or time.monotonic() - began_s > HEALTHY_WITHIN_S:
            printed = f"{checked.stdout}{checked.stderr}\n{container.log()}"
            raise ImageFailed(f"{target} is not healthy; its health check and log:\n{printed}")
        time.sleep(0.5)
    return f"{time.monotonic() - began_s:.1f} s"


def _used(use: Callable[[Scene, dict[str, Container]], str], scene: Scene, containers: dict[str, Container]) -> str:
    try:
        return use(scene, containers)
    except Exception as error:  # noqa: BLE001  whatever it is, the logs tell more
        logs = "\n".join(f"--- {target}\n{container.log()[-3000:]}" for target, container in containers.items())
        raise ImageFailed(f"{use.__name__}: {type(error).__name__}: {error}\n{logs}") from None


def _end(target: str, container: Container) -> str:
    """Ends a program as clusters do; returns its exit status, and the seconds."""
    began_s = time.monotonic()
    status = container.stop(_grace_s(target))
    if status and target != "runtime":  # where it is `sleep`
        raise ImageFailed(f"{target} ended with {status} after SIGTERM; its log:\n{container.log()}")
    return f"{status}, {time.monotonic() - began_s:.1f} s"


def _grace_s(target: str) -> float:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return float(str(services.get(target, {}).get("stop_grace_period", GRACE_S)).removesuffix("s"))


@contextmanager
def _scene() -> Iterator[Scene]:
    """Starts a Redis, and writes what the containers read."""
    with tempfile.TemporaryDirectory(prefix="qinfer-images-") as name:
        port = free_port()
        options: Sequence[str] = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", name]
        server = subprocess.Popen([find_redis_server(), *options], stdout=subprocess.DEVNULL)
        try:
            scene = Scene(directory=Path(name), redis=f"redis://127.0.0.1:{port}")
            scene.prepare()
            yield scene
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
