"""gRPC messages of all sizes through the whole server, refused ones that leave no memory behind, many connections."""

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import hash_key
from qinfer.testing import wait_until
from qinfer_api.rpc import frames
from tests.e2e.conftest import Stack, running
from tests.support import models
from tests.support.http2 import DATA, HEADERS, Requests, settings_frame

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

INFER = "/inference.GRPCInferenceService/ModelInfer"
MAX_MESSAGE_BYTES = 2**31 - 1
HEADS_BYTES = 200
"""More than a request or reply has beside its tensor."""
NEEDED_BYTES = 13 * 2**30
RAW_INPUT_CONTENTS = 7
STRETCH = 251 * 2**15
PATTERN = np.resize(np.arange(251, dtype=np.uint8), STRETCH)
LARGE_BYTES, LARGE_LIMIT = 100_000_000, 104_857_600
REFUSED, MAY_STAY_BYTES = 200, 50 * 2**20
CONNECTIONS = 1000
KEY = "the-key"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Takes messages as large as gRPC's are, and stores large tensors in a directory."""
    repository, store = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("store")
    models.identity(repository, "UINT8")
    settings = {
        "QINFER_GRPC__MAX_MESSAGE_BYTES": str(MAX_MESSAGE_BYTES),
        "QINFER_LIMITS__MAX_RECEIVING_BYTES": str(2 * MAX_MESSAGE_BYTES),
        "QINFER_LIMITS__PAYLOAD_URL": store.as_uri(),
        "QINFER_LIMITS__DEFAULT_TIMEOUT_S": "300",
    }
    with running(repository, tmp_path_factory.mktemp("up"), **settings) as one:
        yield one


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Takes messages of 100 MiB from those who have the key."""
    repository, directory = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("up")
    models.identity(repository, "UINT8")
    keys = directory / "keys.json"
    keys.write_text(f'{{"keys": [{{"id": "a", "tenant": "t", "sha256": "{hash_key(KEY)}", "scopes": ["infer"]}}]}}')
    settings = {
        "QINFER_GRPC__MAX_MESSAGE_BYTES": str(LARGE_LIMIT),
        "QINFER_AUTH__MODE": "keys",
        "QINFER_AUTH__KEYS_FILE": str(keys),
    }
    with running(repository, directory, **settings) as one:
        yield one


def encoded(size: int, model: str = "identity_uint8") -> bytes:
    """Returns a request for a tensor of so many bytes."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    # The last field by hand: protobuf would hold the largest tensors twice.
    head = request.SerializeToString() + bytes([RAW_INPUT_CONTENTS << 3 | 2]) + _varint(size)
    message = bytearray(len(head) + size)
    message[: len(head)] = head
    tensor = np.frombuffer(message, np.uint8, offset=len(head))
    for begin in range(0, size, STRETCH):
        part = tensor[begin : begin + STRETCH]
        part[:] = PATTERN[: len(part)]
    return bytes(message)


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def infer(stack: Stack) -> tuple[grpc.Channel, Any]:
    """Returns a channel, and a call that takes and gives encoded messages."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(stack.grpc_address, unlimited)
    return channel, channel.unary_unary(INFER, None, None)


async def test_a_thousand_connections_at_once(stack: Stack) -> None:
    """All are open, and each is answered twice. First of all: what is large makes the estimate of the wait long."""
    clients = [Requests() for _ in range(CONNECTIONS)]
    message = encoded(100)
    streams = [await asyncio.open_connection("127.0.0.1", stack.grpc_port) for _ in clients]
    for client, (_, writer) in zip(clients, streams, strict=True):
        writer.write(frames.PREFACE + settings_frame() + client.call(1, message, INFER))
    first = await asyncio.gather(*[_refusal(reader, 1) for reader, _ in streams])
    for client, (_, writer) in zip(clients, streams, strict=True):
        writer.write(client.call(3, message, INFER))
    second = await asyncio.gather(*[_refusal(reader, 3) for reader, _ in streams])
    for _, writer in streams:
        writer.close()
    await asyncio.gather(*[writer.wait_closed() for _, writer in streams])

    assert [*first, *second] == [b""] * 2 * CONNECTIONS


async def _refusal(reader: asyncio.StreamReader, number: int) -> bytes:
    """Returns the header block that ends a stream without a reply of 100 bytes and more; empty of one with it."""
    size = 0
    while True:
        word, flags, stream = frames.HEAD.unpack(await reader.readexactly(frames.HEAD_BYTES))
        payload = await reader.readexactly(word >> 8)
        if stream == number and word & 0xFF == DATA:
            size += len(payload)
        if stream == number and word & 0xFF == HEADERS and flags & frames.END_STREAM:
            return b"" if size > 100 else payload


@pytest.mark.parametrize("size", [1, 1000, 65_530, 2**20 + 1, 64 * 2**20, 2**30, MAX_MESSAGE_BYTES - HEADS_BYTES])
def test_a_message_of_any_size_comes_back(stack: Stack, size: int) -> None:
    """The largest is 2 GiB less what stands before its tensor; client, gateway and worker take 11 GiB together."""
    if size > 2**30 and psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip(f"less than {NEEDED_BYTES / 2**30:g} GiB of memory are free")
    channel, call = infer(stack)
    message = encoded(size)
    wanted = hashlib.blake2b(memoryview(message)[-size:]).hexdigest()

    with channel:
        reply = call(message, timeout=300)

    assert hashlib.blake2b(memoryview(reply)[-size:]).hexdigest() == wanted


def gateway_of(stack: Stack) -> psutil.Process:
    for child in psutil.Process(stack.pid).children():
        with contextlib.suppress(psutil.ZombieProcess):  # of a step of the start that has ended
            if "qinfer_api" in child.cmdline():
                return child
    raise AssertionError("there is no gateway")


REFUSALS: dict[str, tuple[int, str, str, grpc.StatusCode]] = {
    "key": (LARGE_BYTES, "identity_uint8", "another-key", grpc.StatusCode.UNAUTHENTICATED),
    "model": (LARGE_BYTES, "nothing", KEY, grpc.StatusCode.NOT_FOUND),
    "size": (LARGE_LIMIT + 1, "identity_uint8", KEY, grpc.StatusCode.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refused_messages_leave_no_memory_behind(guarded: Stack, reason: str) -> None:
    size, model, key, code = REFUSALS[reason]
    gateway = gateway_of(guarded)
    channel, call = infer(guarded)
    small, large = encoded(10), encoded(size, model)

    with channel:
        call(small, metadata=(("x-api-key", KEY),), timeout=60)
        before = gateway.memory_info().rss
        for _ in range(REFUSED):
            with pytest.raises(grpc.RpcError) as refusal:
                call(large, metadata=(("x-api-key", key),), timeout=60)
            assert refusal.value.code() is code
        call(small, metadata=(("x-api-key", KEY),), timeout=60)

    wait_until(lambda: gateway.memory_info().rss - before < MAY_STAY_BYTES, 10.0, "the gateway's memory as before")


@pytest.mark.parametrize("size", [LARGE_LIMIT + 1, 2**31, 2**32 - 1])
def test_one_byte_too_many_is_refused_by_the_length_alone(guarded: Stack, size: int) -> None:
    """The message is never sent."""
    assert f"({size} vs. {LARGE_LIMIT})".encode() in refusal_by_length(guarded, size)


def test_no_message_has_two_gibibytes(stack: Stack) -> None:
    """Whatever the setting is: protobuf has no larger ones."""
    assert f"({2**31} vs. {MAX_MESSAGE_BYTES})".encode() in refusal_by_length(stack, 2**31)


def refusal_by_length(stack: Stack, size: int) -> bytes:
    """Sends the length of a message, and not the message; returns what the server sends."""
    client = Requests()
    head = client.block(INFER, ("x-api-key", KEY))
    prefix = b"\0" + size.to_bytes(4)
    with socket.create_connection(("127.0.0.1", stack.grpc_port), timeout=30) as connection:
        connection.sendall(frames.PREFACE + settings_frame() + client.headers(1, head))
        connection.sendall(frames.frame(DATA, 0, 1, prefix))
        received = b""
        while b"grpc-message" not in received:
            received += connection.recv(65536)
        return received
