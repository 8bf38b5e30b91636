"""The whole server, with tenants, models of several kinds and every feature that takes bodies, and its memory.

`whole_server` runs `qinfer up`; `Memory` tells what gateway, worker, the processes of models, and Redis have and had.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from qinfer.core.api_keys import Scope, add_key
from tests.e2e.conftest import running
from tests.support import models, python_models
from tests.support.fuzzing import FUZZ_S, SHORT_S

T = TypeVar("T")

MIB = 2**20
MAX_INPUT_BYTES = 8 * MIB if FUZZ_S <= SHORT_S else 64 * MIB
"""The largest body: the default in long runs."""
SCOPES = {"acme": (Scope.INFER,), "evil": (Scope.INFER,), "root": (Scope.ADMIN,)}
"""Two tenants, and an administrator."""
GIVEN_BACK_WITHIN_S = 10.0
KINDS = {"qinfer_api": "gateway", "qinfer_workers.inference": "worker", "python_host": "model", "redis-server": "Redis"}
"""Parts of the command lines of processes, and how these are called here; one line has one part."""

PAUSE = python_models.execute("import time\nn = len(requests)\ntime.sleep(0.1)\nreturn [reply(x(r)) for r in requests]")
WIDE = python_models.execute("return [reply(np.ones((1, int(x(r).ravel()[0])), np.float32)) for r in requests]")
SELF = python_models.execute(
    "made = []\n"
    "for r in requests:\n"
    "    given = [pb_utils.get_input_tensor_by_name(r, 'x')]\n"
    "    one = pb_utils.InferenceRequest(model_name='calls', requested_output_names=['y'], inputs=given).exec()\n"
    "    made.append(reply(x(r)) if not one.has_error() else pb_utils.InferenceResponse(error=one.error()))\n"
    "return made"
)
MANY = python_models.execute(
    "for r in requests:\n"
    "    out = r.get_response_sender()\n"
    "    for _ in range(1000):\n"
    "        if out.is_cancelled():\n"
    "            break\n"
    "        out.send(reply(np.ones(50_000, np.float32)))\n"
    "    out.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
)
LABELS = """
name: {0}
model: text
project: {1}
tenant: {0}
mode: predict
inputs: {{x: {{field: text}}}}
results: [{{type: choices, from_name: label, to_name: text, label: y}}]
"""


class WholeServer(NamedTuple):
    """Where a server is, and who may call it.

    Attributes:
        http: The address of HTTP.
        grpc: The address of gRPC.
        keys: Tenant → its key.
        folder: Its data; `lake` in it has the files of jobs.
        redis: The socket of its Redis.
        pid: The supervisor.
    """

    http: str
    grpc: str
    keys: dict[str, str]
    folder: Path
    redis: str
    pid: int

    def dump(self) -> str:
        """Returns this as JSON, for another process."""
        return json.dumps(self._replace(folder=str(self.folder))._asdict())  # type: ignore[arg-type]

    @classmethod
    def load(cls, text: str) -> "WholeServer":
        """Reads what `dump` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "folder": Path(fields["folder"])})


@contextmanager
def whole_server(folder: Path, **settings: str) -> Iterator[WholeServer]:
    """Runs a server with all that attacks need, until the block ends."""
    keys = {name: add_key(folder / "keys.json", name, scopes, name)[1] for name, scopes in SCOPES.items()}
    for name in ("lake", "overlay", "mappings"):
        (folder / name).mkdir()
    for number, tenant in enumerate(("acme", "evil")):
        (folder / "lake" / tenant).mkdir()
        (folder / "mappings" / f"{tenant}.yaml").write_text(LABELS.format(tenant, number + 1))
    write_models(folder / "models")
    chosen = {
        "QINFER_ALLOW_INSPECTION": "true",  # of its memory
        "QINFER_AUTH__MODE": "keys",
        "QINFER_AUTH__KEYS_FILE": str(folder / "keys.json"),
        "QINFER_HTTP__MAX_INPUT_BYTES": str(MAX_INPUT_BYTES),
        "QINFER_GRPC__MAX_MESSAGE_BYTES": str(MAX_INPUT_BYTES),
        "QINFER_LIMITS__MAX_RECEIVING_BYTES": str(MAX_INPUT_BYTES * 5 // 2),
        "QINFER_REPOSITORY__OVERLAY": str(folder / "overlay"),
        "QINFER_STORES__ALLOW": json.dumps([f"file://{folder}/lake"]),
        "QINFER_LABELING__MAPPINGS": str(folder / "mappings"),
        "QINFER_LABELING__URL": "http://127.0.0.1:9",
        "QINFER_LABELING__TOKEN": "none",
        **settings,
    }
    options = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm")
    with running(folder / "models", folder, 1, options, **chosen) as stack:
        redis = str(next(path for path in (folder / "data").rglob("*") if path.is_socket()))
        yield WholeServer(stack.address, stack.grpc_address, keys, folder, redis, stack.pid)


def write_models(folder: Path) -> None:
    """Writes the models: what is plain, slow, wide, stateful or decoupled."""
    folder.mkdir()
    for datatype in ("FP32", "BYTES"):
        models.identity(folder, datatype)
    models.accumulator(folder, more="max_sequence_idle_microseconds: 60000000")
    python_models.write_model(folder, python_models.ECHO, "text", datatype="STRING", max_batch_size=8)
    python_models.write_model(folder, PAUSE, "slow", dims=1, max_batch_size=8)
    python_models.write_model(folder, WIDE, "wide", dims=-1, max_batch_size=1, scheduling="")
    python_models.write_model(
        folder, SELF, "calls", dims=1, max_batch_size=0, scheduling="", more="instance_group { count: 2 }"
    )
    decoupled = python_models.DECOUPLED
    python_models.write_model(folder, MANY, "many", dims=-1, max_batch_size=0, scheduling="", more=decoupled)


class Sizes(NamedTuple):
    """Bytes of memory by kind of process: of several, those of all together."""

    gateway: int = 0
    worker: int = 0
    model: int = 0
    redis: int = 0


class ServerMemory:
    """The memory of a server's processes.

    Args:
        pid: The supervisor.
    """

    def __init__(self, pid: int) -> None:
        self._supervisor = psutil.Process(pid)
        self._kinds: dict[int, str] = {}

    def now(self) -> Sizes:
        """Returns what they have."""
        return self._sum("VmRSS")

    def peak(self) -> Sizes:
        """Returns the most that each had since `forget_peak`."""
        return self._sum("VmHWM")

    def forget_peak(self) -> None:
        """Begins to look for the peak anew."""
        for pid in self.kinds():
            _unless_gone(partial(Path(f"/proc/{pid}/clear_refs").write_text, "5"), 0)

    def cpu_s(self) -> float:
        """Returns the seconds that all have computed."""
        return sum(_unless_gone(partial(_cpu_s, pid), 0.0) for pid in self.kinds())

    def settled(self, base: Sizes, more: int) -> Sizes:
        """Waits until all have given back what they needed; returns what they have then."""
        until_s = time.monotonic() + GIVEN_BACK_WITHIN_S
        while True:
            now = self.now()
            if all(have <= had + more for have, had in zip(now, base, strict=True)) or time.monotonic() > until_s:
                return now
            time.sleep(0.2)

    def kinds(self) -> dict[int, str]:
        """Returns the processes by id, and what each is called here."""
        found = {}
        for child in self._supervisor.children(recursive=True):
            if child.pid not in self._kinds:
                line = " ".join(_unless_gone(child.cmdline, []))
                self._kinds[child.pid] = next((kind for part, kind in KINDS.items() if part in line), "")
            if self._kinds[child.pid]:
                found[child.pid] = self._kinds[child.pid]
        return found

    def _sum(self, field: str) -> Sizes:
        sizes = dict.fromkeys(Sizes._fields, 0)
        for pid, kind in self.kinds().items():
            text = _unless_gone(Path(f"/proc/{pid}/status").read_text, "")
            if match := re.search(rf"{field}:\s*(\d+) kB", text):
                sizes[kind.lower()] += int(match[1]) * 1024
        return Sizes(**sizes)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _unless_gone(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except (OSError, psutil.Error):
        return otherwise
