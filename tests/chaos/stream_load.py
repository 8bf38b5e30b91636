"""Callers of decoupled models, and what they saw: each response tells its stream, its index and who computed it.

Each stream is asked of any of the gateways, and one that ends early is not repeated: the next one begins.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from qinfer.client import AsyncClient
from qinfer.client.results import RequestHandle
from qinfer.errors import ErrorCode, QinferError
from qinfer.wire.kserve_client import JSON_LENGTH_HEADER
from tests.chaos.verdict import Verdict
from tests.support.python_models import write_model
from tests.support.rpc import stub_of

BREAKS, RESUMES = "breaks", "resumes"
GRPC, HTTP, STORED = "grpc", "http", "stored"

_PATIENCE_S = 60.0
"""Far more than a stream, leases and restarts can take: a stream that takes longer hangs."""
_PAUSE_S = 0.1
_COUNTS = (20, 100)
_CALLERS = {GRPC: 4, HTTP: 3, STORED: 3}
_COLUMNS = 4  # the stream's seed, the index, a value that follows from both, the process
_SHOWN = 20
_BROKEN = "the worker that executed the request ended"

_CODE = """
import os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            seed, count = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().tolist()
            sender = request.get_response_sender()
            threading.Thread(target=self.send, args=(sender, seed, count), daemon=True).start()

    def send(self, sender, seed, count):
        for index in range(count):
            if sender.is_cancelled():
                break
            row = np.array([seed, index, (seed * 31 + index * 7919) % 1000003, os.getpid()], "<i4")
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", row)]))
            time.sleep(0.02)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_models(repository: Path) -> tuple[str, str]:
    """Writes both models, of which one promises the same responses each time; returns their names."""
    policy = "model_transaction_policy { decoupled: true }"
    resumes = ' parameters { key: "qinfer.stream_resume" value { string_value: "skip" } }'
    for name, more in ((BREAKS, policy), (RESUMES, policy + resumes)):
        directory = write_model(repository, _CODE, name, max_batch_size=0, datatype="INT32", more=more)
        config = directory.parent / "config.pbtxt"
        config.write_text(config.read_text().replace("dynamic_batching { max_queue_delay_microseconds: 0 }", ""))
    return BREAKS, RESUMES


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request: its seed and how many responses it asks for, and what came.

    Attributes:
        way: How it was asked.
        model: The model.
        seed: Its number.
        count: How many responses it asks for.
        rows: The responses, in the order in which they came.
        stored: Those of the result that was read last; `None` = it was not read.
        trouble: Why it ended early; empty = it says that it is complete.
        may_repeat: Whether the error says that the request may be sent again.
    """

    way: str
    model: str
    seed: int
    count: int
    rows: list[list[int]] = field(default_factory=list)
    stored: list[list[int]] | None = None
    trouble: str = ""
    may_repeat: bool = False

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return {"x": np.array([self.seed, self.count], "<i4")}

    def end(self, trouble: str, *, may_repeat: bool) -> None:
        self.trouble, self.may_repeat = trouble, may_repeat


class StreamClients:
    """See the module docstring.

    Args:
        urls: Where the gateways serve HTTP.
        grpc_targets: Where they serve gRPC.
        seed: Decides what is asked.

    Attributes:
        streams: What was seen.
    """

    def __init__(self, urls: Sequence[str], grpc_targets: Sequence[str], seed: int) -> None:
        self._urls = urls
        self._grpc_targets = grpc_targets
        self._rng = random.Random(seed)
        self._seeds = iter(range(1, 10**6))
        self._is_over = asyncio.Event()
        self.streams: list[Stream] = []

    async def run(self) -> None:
        """Asks until `stop`; streams that have begun are read to their end."""
        ways = {GRPC: self._by_grpc, HTTP: self._by_http, STORED: self._stored}
        async with asyncio.TaskGroup() as group:
            for way, ask in ways.items():
                for _ in range(_CALLERS[way]):
                    group.create_task(self._ask_on(way, ask))

    def stop(self) -> None:
        self._is_over.set()

    async def _ask_on(self, way: str, ask: Callable[[Stream], AsyncGenerator[list[int], None]]) -> None:
        while not self._is_over.is_set():
            model = self._rng.choice((BREAKS, RESUMES))
            stream = Stream(way=way, model=model, seed=next(self._seeds), count=self._rng.randint(*_COUNTS))
            self.streams.append(stream)
            try:
                async with asyncio.timeout(_PATIENCE_S), aclosing(ask(stream)) as rows:
                    async for row in rows:
                        stream.rows.append(row)
            except QinferError as error:
                stream.end(f"{error.code}: {error.message}", may_repeat=error.retryable)
            except grpc.aio.AioRpcError as error:
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
                stream.end(f"{error.code().name}: {error.details()}", may_repeat=is_gone)
            except TimeoutError:
                stream.end(f"it has not ended within {_PATIENCE_S} s", may_repeat=False)
            if stream.trouble:
                await asyncio.sleep(_PAUSE_S)

    async def _by_grpc(self, stream: Stream) -> AsyncGenerator[list[int], None]:
        request = pb.ModelInferRequest(model_name=stream.model, model_version="1")
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        request.inputs.add(name="x", datatype="INT32", shape=[2])
        request.raw_input_contents.append(stream.inputs["x"].tobytes())
        is_complete = False
        async with grpc.aio.insecure_channel(self._rng.choice(self._grpc_targets)) as channel:
            call = stub_of(channel).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
            await call.write(request)
            async for reply in call:
                for blob in reply.infer_response.raw_output_contents:
                    yield np.frombuffer(blob, "<i4").tolist()
                if reply.infer_response.parameters["triton_final_response"].bool_param:
                    is_complete = True
                    await call.done_writing()
        if not is_complete:
            stream.end("gRPC ended it without a final response and without an error", may_repeat=False)

    async def _by_http(self, stream: Stream) -> AsyncGenerator[list[int], None]:
        async with AsyncClient(self._rng.choice(self._urls), max_retries=0) as client:
            async for result in client.infer_stream(stream.model, stream.inputs, version=1):
                yield result["y"].tolist()

    async def _stored(self, stream: Stream) -> AsyncGenerator[list[int], None]:
        """Reads as they come what is stored, over as many connections as it takes; and the result, once it is there."""
        url = self._rng.choice(self._urls)
        async with AsyncClient(url, max_retries=30) as client:
            handle = await client.submit(
                stream.model, stream.inputs, version=1, request_id=f"stream-{stream.seed}", timeout_s=_PATIENCE_S
            )
            async for result in client.responses(handle):
                yield result["y"].tolist()
        stream.stored = await self._result(handle)

    async def _result(self, handle: RequestHandle) -> list[list[int]]:
        async with httpx.AsyncClient() as client:
            while True:
                url = self._rng.choice(self._urls)
                try:
                    reply = await client.get(f"{url}{handle.url}/result")
                except httpx.TransportError:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if reply.status_code == 200:
                    binary = reply.content[int(reply.headers[JSON_LENGTH_HEADER]) :]
                    return np.frombuffer(binary, "<i4").reshape(-1, _COLUMNS).tolist()
                await asyncio.sleep(_PAUSE_S)


def judge(streams: Sequence[Stream], *, kills: int) -> Verdict:
    """Counts, and says what is wrong; a stream may end early only with an error that says so, and may be repeated."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for stream in streams:
        counts["streams"] += 1
        counts["responses"] += len(stream.rows)
        counts[f"complete-{stream.way}"] += not stream.trouble
        counts["broken"] += bool(stream.trouble and stream.rows)
        counts["refused"] += bool(stream.trouble and not stream.rows)
        counts["resumed"] += len({row[-1] for row in stream.rows}) > 1
        indexes = [row[1] for row in stream.rows]
        counts["twice"] += len(indexes) - len(set(indexes))
        counts["wrong"] += sum(row[:-1] != _row(stream.seed, row[1]) for row in stream.rows)
        what = f"{stream.way} {stream.model} {stream.seed}, {len(stream.rows)} of {stream.count}: "
        problems += [what + problem for problem in _problems(stream, indexes)]
    problems += [f"{counts[name]} {name}" for name in ("twice", "wrong") if counts[name]]
    problems += [f"no stream by {way} is complete" for way in _CALLERS if not counts[f"complete-{way}"]]
    words = ("streams", "responses", "resumed", "broken", "refused", "twice", "wrong")
    return Verdict(" ".join(f"{word}={counts[word]}" for word in words) + f" kills={kills}", problems[:_SHOWN])


def _row(seed: int, index: int) -> list[int]:
    return [seed, index, (seed * 31 + index * 7919) % 1000003]


def _problems(stream: Stream, indexes: list[int]) -> list[str]:
    """Says what is wrong with one stream."""
    found = []
    if indexes != list(range(len(indexes))):
        found.append(f"the indexes are {indexes}")
    if not stream.trouble and len(indexes) != stream.count:
        found.append("it ended as if it were complete")
    if stream.trouble and not stream.may_repeat:
        found.append(f"it ended with {stream.trouble}")
    if stream.model == BREAKS and len({row[-1] for row in stream.rows}) > 1:
        found.append("two executions were mixed")
    if stream.model == RESUMES and (_BROKEN in stream.trouble or ErrorCode.STREAM_BROKEN in stream.trouble):
        found.append(f"it was not resumed: {stream.trouble}")
    if stream.way == STORED and not stream.trouble and stream.stored != stream.rows:
        found.append(f"its result has {len(stream.stored or ())} responses, others than those that came")
    return found
