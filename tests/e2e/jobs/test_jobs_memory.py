"""Jobs over files that are made to cost memory, through the whole server: no process takes more than it may.

Each file lies in a directory, and on S3. The peaks of gateway, worker, bulk worker and their examiners are read while
it is examined, planned and scored, and compared with those of an ordinary job.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pytest
from onnx import helper

from qinfer.client import Client
from qinfer.client.job_flows import JobOptions
from qinfer.errors import QinferError
from tests.e2e.conftest import running
from tests.support import models
from tests.support.jobs.bounded_reading import READ_BYTES
from tests.support.jobs.hostile_files import FILES, MIB, NUMBERS, NUMBERS_LIST, TEXT, TEXTS, Hostile, parquet
from tests.support.jobs.job_proof import Place
from tests.support.servers import s3_server
from tests.support.servers.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

WITHIN_S = 120.0
LOOK_EVERY_S = 0.1
ORDINARY_ROWS = 20_000
NAMES: dict[tuple[str, tuple[int, ...]], str] = {
    TEXT: "text",
    TEXTS: "texts",
    NUMBERS: "numbers",
    NUMBERS_LIST: "number_lists",
}
PROGRAMS = {"qinfer_api": "gateway", "qinfer_workers.inference": "worker", "qinfer_workers.jobs": "bulk worker"}
EXAMINER = "qinfer.jobs.examiner"
BOUNDS = {
    "gateway": 4 * READ_BYTES,
    "worker": 4 * READ_BYTES,
    "bulk worker": 512 * MIB,
    "examiner of gateway": 768 * MIB,
    "examiner of worker": 4 * READ_BYTES,
    "examiner of bulk worker": 768 * MIB,
}
"""Memory that a process may take beyond its peak of an ordinary job."""
PLANNED_AS_TEXT = ("CSV: nothing but commas",)
"""Files whose `x` has no value: a plan makes it text, where an empty value is an empty text and not null."""


class Scene(NamedTuple):
    """A running server with a model of each kind of input, that may use a store."""

    client: Client
    place: Place
    pid: int


@pytest.fixture(scope="module", params=["file", "s3"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("memory")
    write_models(folder / "models")
    with ExitStack() as stack:
        place, environment = Place(f"file://{folder}/objects"), dict[str, str]()
        if request.param == "s3":
            endpoint = stack.enter_context(S3Server()).endpoint
            s3_server.make_bucket(endpoint, "hostile")
            environment = dict(s3_server.environment(endpoint))
            words = {"key": environment["AWS_ACCESS_KEY_ID"], "secret": environment["AWS_SECRET_ACCESS_KEY"]}
            place = Place("s3://hostile", {"endpoint_url": endpoint, "use_listings_cache": False, **words})
        environment["QINFER_STORES__ALLOW"] = f'["{place.url}"]'
        server = stack.enter_context(running(folder / "models", folder, **environment))
        yield Scene(stack.enter_context(Client(f"http://{server.address}")), place, server.pid)


def write_models(repository: Path) -> None:
    """Writes models whose output is a zero for each row, so that the memory is that of the job."""
    zero = helper.make_tensor("zero", models.ELEMENT_TYPES["FP32"], [1], [0.0])
    first, one = (helper.make_tensor(str(n), models.ELEMENT_TYPES["INT64"], [1], [n]) for n in (0, 1))
    nodes = [
        helper.make_node("Constant", [], ["first"], value=first),
        helper.make_node("Constant", [], ["one"], value=one),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["rows"]),
        helper.make_node("Concat", ["rows", "one"], ["size"], axis=0),
        helper.make_node("ConstantOfShape", ["size"], ["y"], value=zero),
    ]
    for (datatype, dims), name in NAMES.items():
        models.write(repository, name, nodes, [("x", datatype, dims)], [("y", "FP32", (1,))])


class Peaks:
    """The peaks of the server's processes, by role: the highest where there are several."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self._bytes: dict[str, int] = {}

    @contextmanager
    def watched(self) -> Iterator[Mapping[str, int]]:
        """Reads them again and again until the block ends: examiners come and go."""
        has_ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(has_ended,))
        watching.start()
        try:
            yield self._bytes
        finally:
            has_ended.set()
            watching.join()
            self._look()

    def _watch(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        for child in self._server.children(recursive=True):
            try:
                role, peak = role_of(child), peak_bytes(child.pid)
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            self._bytes[role] = max(peak, self._bytes.get(role, 0))


def role_of(process: psutil.Process) -> str:
    """Returns what a process is; empty = none of those that matter."""
    command = process.cmdline()
    if EXAMINER in command:
        parent = process.parent()
        return f"examiner of {role_of(parent)}" if parent is not None else ""
    return next((role for module, role in PROGRAMS.items() if module in command), "")


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int((status.partition("VmHWM:")[2].split() or ["0"])[0]) * 1024


def outcome_of(scene: Scene, name: str, file: Hostile) -> tuple[int, int, str]:
    """Has a file scored; returns rows and failed rows of the output, and the error of a file that is refused."""
    number = list(FILES).index(name) if name in FILES else len(FILES)
    source, output = f"in/{number}.{file.extension}", f"{scene.place.url}/out-{number}"
    scene.place.put(source, file.data())
    options: JobOptions = {"error_threshold": -1}
    if file.copies:
        options |= {"passthrough": ["*"], "exclude": ["x"]}
    try:
        job = scene.client.submit_job(NAMES[file.of], f"{scene.place.url}/{source}", output, **options)
        status = job.wait(timeout_s=WITHIN_S)
    except QinferError as error:
        return 0, 0, error.message
    is_done = status.state == "completed"
    return (status.rows_done + status.rows_failed, status.rows_failed, "") if is_done else (0, 0, status.error)


def test_no_process_takes_more_than_it_may(scene: Scene) -> None:
    peaks, wrong = Peaks(scene.pid), list[str]()
    words = pa.array([b"word %d" % number for number in range(ORDINARY_ROWS)])
    plain = Hostile("parquet", lambda: parquet(words))
    with peaks.watched() as found:
        assert outcome_of(scene, "", plain) == (ORDINARY_ROWS, 0, "")
    base = dict(found)
    assert base.keys() >= BOUNDS.keys()
    for name, file in FILES.items():
        before = dict(found)
        with peaks.watched():
            rows, failed, message = outcome_of(scene, name, file)
        expected = (file.rows, 0 if name in PLANNED_AS_TEXT else file.failed)
        if (rows, failed) != expected or (not rows and file.message not in message):
            wrong.append(f"{name}: {rows} rows, {failed} failed: {message}")
        for role, bound in BOUNDS.items():
            if found[role] > max(before[role], base[role] + bound):
                wrong.append(f"{name}: {role} took {(found[role] - base[role]) // MIB} MiB beside an ordinary job's")

    assert not wrong, "\n".join(wrong)
