"""Backends in C for tests: compiled from `tests/data/c_backends`, and models that they serve.

Without NVIDIA's library, which `scripts/tools tritonserver` fetches, or a compiler, tests are skipped.
"""

import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qinfer.backends.parameters import use_triton_files
from qinfer.backends.triton import TritonBackend
from qinfer.backends.triton_host.library import TritonFiles
from qinfer.models.spec import Device
from qinfer.testing import wait_until
from tests.support.foreign import program, run, tool
from tests.support.python_models import DECOUPLED, spec_of
from tests.support.servers.servers import free_port

SOURCES = Path(__file__).parents[1] / "data" / "c_backends"
SUBJECTS = ("identity", "square", "repeat", "crash", "leak", "errors", "sequence", "shapes")

CONFIG = """
name: "{name}" backend: "{backend}" max_batch_size: {max_batch_size}
input {{ name: "INPUT" data_type: TYPE_{datatype} dims: [ {dims} ] }}
output {{ name: "OUTPUT" data_type: TYPE_{datatype} dims: [ {dims} ] }}
{more}
"""
BATCHED = "dynamic_batching { }"
SEQUENCE = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
MORE = {"repeat": DECOUPLED, "sequence": SEQUENCE}
DATATYPES = {"square": "FP32"}


def triton() -> Path:
    """Returns the directory of NVIDIA's server, or skips the test."""
    return tool("tritonserver", "server/bin/tritonserver") / "server"


def compile_backends(directory: Path) -> Path:
    """Compiles the backends into `<directory>/<name>`; skips the test without a compiler, or without the library."""
    triton()
    gcc, stub = program("gcc"), directory / "stub" / "libtritonserver.so"
    stub.parent.mkdir()
    # As NVIDIA's backends do, these need the name 'libtritonserver.so', which the wheel's library has not.
    names = re.findall(r"(TRITON(?:SERVER|BACKEND)_\w+)\(", (SOURCES / "triton_backend.h").read_text())
    (directory / "stub.c").write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(set(names))))
    run([gcc, "-shared", "-fPIC", "-Wl,-soname,libtritonserver.so", "-o", str(stub), str(directory / "stub.c")])
    for name in SUBJECTS:
        library = directory / "backends" / name / f"libtriton_{name}.so"
        library.parent.mkdir(parents=True)
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-unused-function", f"-DBEHAVIOUR={name.upper()}"]
        source = str(SOURCES / "subject.c")
        run([gcc, *flags, "-o", str(library), source, f"-L{stub.parent}", "-ltritonserver", "-lpthread"])
    return directory / "backends"


def write_model(repository: Path, backend: str, name: str = "m", **options: object) -> Path:
    """Writes a model with INPUT and OUTPUT; returns the directory of its version."""
    fields = {"max_batch_size": 8, "datatype": DATATYPES.get(backend, "INT32"), "dims": "-1", "more": BATCHED}
    if backend in MORE:
        fields |= {"more": MORE[backend]}
    if backend == "sequence":
        fields |= {"dims": "1"}
    directory = repository / name / "1"
    directory.mkdir(parents=True)
    (directory.parent / "config.pbtxt").write_text(CONFIG.format(name=name, backend=backend, **(fields | options)))
    return directory


@contextmanager
def loaded(repository: Path, backends: Path, backend: str, **options: object) -> Iterator[TritonBackend]:
    """Writes and loads a model."""
    directory = write_model(repository, backend, "m", **options)
    use_triton_files(TritonFiles(str(triton()), str(backends)))
    model = TritonBackend()
    model.load(spec_of(directory), directory, Device())
    try:
        yield model
    finally:
        model.unload()


@contextmanager
def server(repository: Path, backends: Path) -> Iterator[str]:
    """Runs NVIDIA's server; yields its URL."""
    directory, port = triton(), free_port()
    packages = directory.resolve().parents[1]
    command = [
        *(str(directory / "bin/tritonserver"), "--backend-directory", str(backends), "--allow-metrics", "false"),
        *("--model-repository", str(repository), "--allow-grpc", "false", "--http-address", "127.0.0.1"),
        *("--http-port", str(port)),
    ]
    links = repository.parent / "links"
    links.mkdir()
    libraries = packages / "nvidia_pytriton.libs"
    (links / "libtritonserver.so").symlink_to(next(libraries.glob("libtritonserver-*.so")))
    variables = {**os.environ, "LD_LIBRARY_PATH": f"{links}:{libraries}"}
    url = f"http://127.0.0.1:{port}"
    with (repository.parent / "log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(url), timeout_s=120)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
