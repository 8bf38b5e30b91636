"""The ceiling: what two processes in Python take at least to receive a tensor, execute the model, and reply.

The front reads each body into a slot of memory that both have; the worker executes the slots that have come as one
batch. There is no queue and no check; bodies are those that `bodies.encode` makes for `binary`.
"""

import asyncio
import mmap
import os
import re
import socket
from array import array
from math import prod
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.inprocess import session
from benchmarks.models import MAX_BATCH_SIZE, MODELS

MODEL = MODELS[os.environ["BENCH_MODEL"]]
SLOTS, PAGE = 256, mmap.PAGESIZE
INPUT, OUTPUT = 4 * prod(MODEL.input_dims), 4 * prod(MODEL.output_dims)
SLOT = PAGE + -(-(INPUT + OUTPUT) // PAGE) * PAGE
"""A page, at whose end the JSON of the body lies; then the input, and the output."""
MEMORY = memoryview(mmap.mmap(-1, SLOTS * SLOT))
FREE, READY, WAITING = list(range(SLOTS)), array("H"), dict[int, asyncio.Transport]()
JSON_BYTES = re.compile(rb"\r\ninference-header-content-length: *(\d+)", re.IGNORECASE)
JSON = f'{{"outputs":[{{"name":"y","shape":{[1, *MODEL.output_dims]},"datatype":"FP32"}}]}}'.encode()
LENGTHS = b"Content-Length: %d\r\nInference-Header-Content-Length: %d" % (len(JSON) + OUTPUT, len(JSON))
HEAD = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (LENGTHS, JSON)


def work(channel: socket.socket) -> None:
    loaded = session(Path(os.environ["BENCH_MODEL_FILE"]))
    places = [slot * SLOT + PAGE for slot in range(SLOTS)]
    inputs = [np.ndarray((1, *MODEL.input_dims), np.float32, MEMORY, place) for place in places]
    outputs = [np.ndarray(MODEL.output_dims, np.float32, MEMORY, place + INPUT) for place in places]
    batch = np.empty((MAX_BATCH_SIZE, *MODEL.input_dims), np.float32)
    while slots := array("H", channel.recv(2 * SLOTS)):
        for begin in range(0, len(slots), MAX_BATCH_SIZE):
            part = slots[begin : begin + MAX_BATCH_SIZE]
            x = [inputs[slot] for slot in part]
            joined = x[0] if len(part) == 1 else np.concatenate(x, out=batch[: len(part)])
            for slot, y in zip(part, loaded.run(None, {"x": joined})[0], strict=True):
                outputs[slot][...] = y
            channel.send(part)


class Front(asyncio.BufferedProtocol):
    """A connection; `rest` is where its next bytes go, first of a head, then of a body."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self.slot, self.head = channel, -1, bytearray(PAGE)
        self.rest = memoryview(self.head)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def get_buffer(self, _: int) -> memoryview:
        return self.rest

    def buffer_updated(self, nbytes: int) -> None:
        self.rest = self.rest[nbytes:]
        if self.slot < 0 and (begin := self.head.find(b"\r\n\r\n", 0, PAGE - len(self.rest)) + 4) >= 4:
            came = memoryview(self.head)[begin : PAGE - len(self.rest)]
            json_bytes = int(JSON_BYTES.findall(self.head[:begin])[0])
            self.slot = FREE.pop()
            place = self.slot * SLOT + PAGE
            MEMORY[place - json_bytes :][: len(came)] = came
            self.rest = MEMORY[place - json_bytes + len(came) : place + INPUT]
        if self.slot >= 0 and not self.rest:
            READY.append(self.slot)
            if len(READY) == 1:
                asyncio.get_running_loop().call_soon(self.flush)
            WAITING[self.slot], self.slot, self.rest = self.transport, -1, memoryview(self.head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.slot >= 0:
            FREE.append(self.slot)

    def flush(self) -> None:
        self.channel.send(READY)
        del READY[:]


def answer(channel: socket.socket) -> None:
    for slot in array("H", channel.recv(2 * SLOTS)):
        begin, transport = slot * SLOT + PAGE + INPUT, WAITING.pop(slot)
        FREE.append(slot)
        if not transport.is_closing():
            transport.write(HEAD + MEMORY[begin : begin + OUTPUT])


async def serve(channel: socket.socket) -> None:
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    loop.add_reader(channel, answer, channel)
    server = await loop.create_server(lambda: Front(channel), "127.0.0.1", int(os.environ["BENCH_PORT"]))
    await server.serve_forever()


if __name__ == "__main__":
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        uvloop.run(serve(ours))
    ours.close()
    work(theirs)
