"""A gateway in a process of its own that fuzz tests call: `python -m tests.fuzz.gateway FOLDER`.

It serves HTTP, gRPC and metrics, asks for keys, and has stores, the queue of bulk tasks, and the echo worker of
`tests.support.gateway` behind it. `FOLDER` has its keys, its log, and the files that jobs may name. It prints where it
serves as a line of JSON, and ends with its standard input.
"""

import asyncio
import json
import re
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import SecretStr

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import (
    BulkSettings,
    LogSettings,
    RepositorySettings,
    RequestSettings,
    Settings,
    StoreSettings,
    TenantStores,
)
from qinfer.core.settings_sections import MetricsSettings
from qinfer.observe import logs
from qinfer_api.rest.side_ports import MetricsPort, open_metrics_port
from tests.support.gateway import MODELS, running_gateway, settings_of
from tests.support.servers.servers import RedisServer, embedded_server, redis_6_2

GOOD: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": ["good"]}]}
MAX_INPUT_BYTES = 2**22
"""The largest body, and message."""
GROWTH_BYTES = 200 * 2**20
"""Memory that the gateway may have more after a run than before: its limits leave it a multiple of what it receives."""
SCOPES = {"acme": (Scope.INFER,), "other": (Scope.INFER,), "root": (Scope.ADMIN,)}
"""The tenants: two that ask, and one who may do everything."""
NAMES = tuple(name for name in MODELS if name != "hasty")
"""Models that tests may ask: that one waits for 30 s by its own configuration."""
UNLOADED = ("half", "asleep", "nobody")
"""Models that tests may load and unload: the others are needed."""
_TRIES = 10
UNWANTED = re.compile(r'Traceback|"level":"(ERROR|CRITICAL)"')


class Tenant(NamedTuple):
    """A caller of the gateway.

    Attributes:
        name: The tenant.
        key: Its API key.
        mark: Part of all that it names, and unknown to the others.
    """

    name: str
    key: str
    mark: str


class FuzzedGateway:
    """The process, as tests see it."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        assert process.stdout is not None
        places = json.loads(process.stdout.readline())
        self.http, self.grpc, self.metrics = places["http"], places["grpc"], places["metrics"]
        self.tenants = tuple(Tenant(**fields) for fields in places["tenants"])
        self.folder = folder
        self._process = psutil.Process(process.pid)
        self._client = httpx.Client(base_url=self.http, timeout=20)
        self.check()
        self._rss_bytes = self._process.memory_info().rss

    def check(self) -> None:
        """Sees that it answers a request as it should, and has logged nothing that it should not."""
        headers = {"authorization": f"Bearer {self.tenants[0].key}"}
        for _ in range(_TRIES):
            reply = self._client.post("/v2/models/text/infer", json=GOOD, headers=headers)
            # Requests have little time where the machine does other things.
            if "timeout expired" not in reply.text:
                break
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["data"] == ["good"]
        log = (self.folder / "gateway.log").read_text(errors="replace")
        found = UNWANTED.search(log)
        assert found is None, log[max(0, log.rfind("\n", 0, found.start())) : found.start() + 4000]

    def check_memory(self) -> None:
        """Sees that what requests needed was given back."""
        assert self._process.memory_info().rss - self._rss_bytes < GROWTH_BYTES

    @contextmanager
    def growing_within(self, most_bytes: int) -> Iterator[None]:
        """Sees that its memory is never so much more than before during the block."""
        proc = Path(f"/proc/{self._process.pid}")
        before = self._process.memory_info().rss
        (proc / "clear_refs").write_text("5")  # forgets the peak
        yield
        peak = re.search(r"VmHWM:\s*(\d+) kB", (proc / "status").read_text())
        assert peak is not None
        assert int(peak[1]) * 1024 - before < most_bytes

    def close(self) -> None:
        self._client.close()


@contextmanager
def fuzzed_gateway(folder: Path) -> Iterator[FuzzedGateway]:
    """Runs the process until the block ends."""
    rows = {"x": pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32())), "n": [7], "name": ["a"]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    command = [sys.executable, "-m", "tests.fuzz.gateway", str(folder)]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        gateway = FuzzedGateway(process, folder)
        yield gateway
        gateway.check()
        gateway.check_memory()
        gateway.close()
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def settings(folder: Path, broker: str) -> Settings:
    """Returns settings with short times, in which every feature is on that a tenant may use."""
    everywhere = f"file://{folder}"
    shared = TenantStores(read=(everywhere,), write=(everywhere,))
    base = settings_of(
        limits={"default_timeout_s": 0.3, "max_timeout_s": 0.3, "max_receiving_bytes": 5 * MAX_INPUT_BYTES // 2},
        http={"request_read_timeout_s": 2.0, "max_input_bytes": MAX_INPUT_BYTES},
        auth={"mode": "keys", "keys_file": str(folder / "keys.json")},
        grpc={"max_message_bytes": MAX_INPUT_BYTES},
    )
    return base.model_copy(
        update={
            "metrics": MetricsSettings(port=0),
            "stores": StoreSettings(allow=(everywhere,), tenants=dict.fromkeys(SCOPES, shared)),
            "bulk": BulkSettings(broker_url=SecretStr(broker), max_jobs=300, record_ttl_s=60),
            "requests": RequestSettings(
                default_timeout_s=2,
                max_timeout_s=2,
                result_ttl_s=20,
                tombstone_ttl_s=20,
                idempotency_ttl_s=20,
                max_wait_s=0.2,
            ),
            "repository": RepositorySettings(control_mode="explicit", load_timeout_s=0.05),
        }
    )


async def serve(folder: Path, tenants: Sequence[Tenant], broker: str) -> None:
    """Serves until standard input ends."""
    chosen = settings(folder, broker)
    async with running_gateway(chosen) as running:
        running.requests = deque(maxlen=1)  # type: ignore[assignment]  # none of an hour's is looked at
        places = {"http": running.url, "grpc": running.grpc_target, "tenants": [tenant._asdict() for tenant in tenants]}
        listener = open_metrics_port(chosen)
        assert listener is not None
        metrics = MetricsPort(listener, running.gateway._reporting.metrics)
        serving = asyncio.create_task(metrics.serve())
        sys.stdout.write(json.dumps({**places, "metrics": metrics.url}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        serving.cancel()
        await asyncio.wait([serving])


def main(folder: Path) -> None:
    """Runs the program."""
    logs.configure(LogSettings(level="WARNING"), "gateway")
    tenants = [
        Tenant(name, add_key(folder / "keys.json", name, scopes)[1], f"{name}-{secrets.token_hex(4)}")
        for name, scopes in SCOPES.items()
    ]
    broker = RedisServer(redis_6_2(), folder)
    try:
        asyncio.run(serve(folder, tenants, broker.url))
    finally:
        broker.kill()
        embedded_server().stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
