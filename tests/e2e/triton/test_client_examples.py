"""Triton's four clients do what its examples do: strings, shared memory, sequences, reuse of objects."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import serialize_byte_tensor, serialized_byte_size

from qinfer.backends.base import Array
from tests.e2e.conftest import Stack, running
from tests.e2e.triton_clients import KINDS, TritonClient, connected, texts
from tests.support import models, python_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SUMS_OF_STRINGS = python_models.execute(
    """responses = []
for request in requests:
    a, b = (x(request, name).astype(int) for name in ("INPUT0", "INPUT1"))
    results = {"OUTPUT0": a + b, "OUTPUT1": a - b}
    tensors = [pb_utils.Tensor(name, value.astype(str).astype(object)) for name, value in results.items()]
    responses.append(pb_utils.InferenceResponse(tensors))
return responses"""
)
STRING_PORTS = " ".join(
    f'{kind} {{ name: "{kind.upper()}{n}" data_type: TYPE_STRING dims: [ 16 ] }}'
    for kind in ("input", "output")
    for n in range(2)
)
NUMBERS, ONES = np.arange(16).reshape(1, 16), np.ones((1, 16), int)
VALUES = (11, 7, 5, 3, 2, 0, 1)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    models.add_sub(repository)
    models.identity(repository, "BYTES")
    models.accumulator(repository, "sums", strategy=models.OLDEST)
    models.accumulator(repository, "numbered", controls=True)
    directory = repository / "simple_string" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(SUMS_OF_STRINGS)
    (directory.parent / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 8 {STRING_PORTS}')
    with running(repository, tmp_path_factory.mktemp("up"), QINFER_ALLOW_CLIENT_SHM="true") as stack:
        yield stack


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[TritonClient]:
    async with connected(request.param, stack) as one:
        yield one


def strings(numbers: Array) -> Array:
    return np.array([str(n).encode() for n in numbers.flat], object).reshape(numbers.shape)


async def test_query_parameters_are_taken(client: TritonClient) -> None:
    """Over HTTP, and metadata of gRPC's calls in their place."""
    more = {"query_params": {"test_1": 1, "test_2": 2}} if client.is_http else {"headers": {"test_1": "1"}}

    assert await client.call("is_server_live", **more)
    assert (await client.ask("get_model_metadata", "add_sub", **more))["name"] == "add_sub"
    assert (await client.ask("get_server_metadata"))["name"] == "triton"


async def test_sums_of_strings(client: TritonClient) -> None:
    """One input and one output as JSON, the others as bytes; gRPC has bytes only."""
    binary, plain = [{"binary_data": value} if client.is_http else dict[str, Any]() for value in (True, False)]
    inputs = [
        client.input("INPUT0", strings(NUMBERS), **binary),
        client.input("INPUT1", strings(ONES), **plain),
    ]

    outputs = [client.output("OUTPUT0", **binary), client.output("OUTPUT1", **plain)]
    result = await client.call("infer", "simple_string", inputs, outputs=outputs)

    for name, expected in (("OUTPUT0", NUMBERS + ONES), ("OUTPUT1", NUMBERS - ONES)):
        assert [int(text) for text in result.as_numpy(name).flat] == expected.flatten().tolist()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", [np.object_, np.bytes_])
async def test_strings_with_null_characters(client: TritonClient, kind: type, *, binary: bool) -> None:
    """The client sends strings as objects, and as numpy's own bytes of a fixed width."""
    if not (binary or client.is_http):
        pytest.skip("gRPC has no JSON")
    sent: Array = np.array([[b"he\x00llo", b"\x00\x01\x02\x03", b"grosse"]], kind)
    options = {"binary_data": binary} if client.is_http else {}
    one = client.module.InferInput("x", sent.shape, "BYTES")
    one.set_data_from_numpy(sent, **options)

    result = await client.call("infer", "identity_bytes", [one], outputs=[client.output("y", **options)])

    got = [each if isinstance(each, bytes) else each.encode() for each in result.as_numpy("y").flat]
    assert got == list(sent.flat)


async def test_strings_in_shared_memory(client: TritonClient) -> None:
    """Each input and each output in a region of its own, of exactly its size."""
    await client.call("unregister_system_shared_memory")
    await client.call("unregister_cuda_shared_memory")
    sent = {"INPUT0": strings(NUMBERS), "INPUT1": strings(ONES)}
    expected = {"OUTPUT0": strings(NUMBERS + ONES), "OUTPUT1": strings(NUMBERS - ONES)}
    regions: dict[str, tuple[Any, int]] = {}
    try:
        for name, array in {**sent, **expected}.items():
            data = serialize_byte_tensor(array)
            size, key = serialized_byte_size(data), f"/{name}_{uuid4().hex}"
            handle = shm.create_shared_memory_region(name, key, size)
            regions[name] = (handle, size)
            if name in sent:
                shm.set_shared_memory_region(handle, [data])
            await client.call("register_system_shared_memory", name, key, size)
        inputs = [client.module.InferInput(name, [1, 16], "BYTES") for name in sent]
        outputs = [client.output(name) for name in expected]
        for one in [*inputs, *outputs]:
            one.set_shared_memory(one.name(), regions[one.name()][1])

        result = await client.call("infer", "simple_string", inputs, outputs=outputs)

        for name, array in expected.items():
            assert result.get_output(name) is not None
            found = shm.get_contents_as_numpy(regions[name][0], np.object_, [1, 16])
            assert texts(found) == texts(array)
        status = str(await client.ask("get_system_shared_memory_status"))
        assert all(name in status for name in regions)
        await client.call("unregister_system_shared_memory")
        status = str(await client.ask("get_system_shared_memory_status"))
        assert not any(name in status for name in regions)
    finally:
        for handle, _ in regions.values():
            shm.destroy_shared_memory_region(handle)


async def test_objects_of_the_client_are_used_again(client: TritonClient) -> None:
    """The same inputs and outputs with data, in shared memory, and with data again."""
    a, b = np.arange(4, dtype=np.float32).reshape(1, 4), np.ones((1, 4), np.float32)
    inputs, output = [client.input("a", a), client.input("b", b)], client.output("sum")
    name = f"region_{uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 3 * a.nbytes)
    try:
        shm.set_shared_memory_region(handle, [a * 2, b * 2])
        await client.call("register_system_shared_memory", name, f"/{name}", 3 * a.nbytes)
        for _ in range(2):
            result = await client.call("infer", "add_sub", inputs, outputs=[output])
            assert result.as_numpy("sum").tolist() == (a + b).tolist()

            for number, one in enumerate([*inputs, output]):
                one.set_shared_memory(name, a.nbytes, offset=number * a.nbytes)
            await client.call("infer", "add_sub", inputs, outputs=[output])
            written = shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=2 * a.nbytes)
            assert written.tolist() == (2 * (a + b)).tolist()

            for one, array in zip(inputs, (a, b), strict=True):
                one.set_data_from_numpy(array)
            output.unset_shared_memory()
        await client.call("unregister_system_shared_memory", name)
    finally:
        shm.destroy_shared_memory_region(handle)


def steps(offset: int, model: str) -> list[tuple[str, int | str, int, dict[str, bool]]]:
    """Returns the steps of three sequences by turns: model, id (of `sums` one is a text), value, flags."""
    ids: list[int | str] = [1000 + offset, 1001 + offset, str(uuid4()) if model == "sums" else 1002 + offset]
    values = [(0, *VALUES), (100, *(-v for v in VALUES)), (20, *(-v for v in VALUES))]
    last = len(VALUES)
    return [
        (model, sequence, each[n], {"sequence_start": n == 0, "sequence_end": n == last})
        for n in range(last + 1)
        for sequence, each in zip(ids, values, strict=True)
    ]


def totals(sent: Sequence[tuple[str, int | str, int, dict[str, bool]]]) -> list[float]:
    """Returns the sum of each sequence so far, step by step."""
    sums: dict[int | str, float] = {}
    found = []
    for _, sequence, number, _ in sent:
        sums[sequence] = sums.get(sequence, 0) + number
        found.append(sums[sequence])
    return found


def value_of(client: TritonClient, number: int) -> list[Any]:
    return [client.input("INPUT", np.full((1, 1), number, np.float32))]


@pytest.mark.parametrize("model", ["sums", "numbered"])
async def test_sequences_by_turns(client: TritonClient, model: str) -> None:
    """One call a step: three sequences, each with its own sum."""
    sent = steps(10 * KINDS.index(client.kind), model)

    results = [
        await client.call("infer", name, value_of(client, number), sequence_id=sequence, **flags)
        for name, sequence, number, flags in sent
    ]

    assert [float(result.as_numpy("OUTPUT")[0, 0]) for result in results] == totals(sent)


@pytest.mark.parametrize("model", ["sums", "numbered"])
async def test_sequences_on_one_stream(stack: Stack, model: str) -> None:
    """All steps are sent before the first is answered."""
    sent = steps(100, model)
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    async with connected("grpc", stack) as client:
        client.raw.start_stream(callback=lambda result, error: came.put((result, error)))
        for position, (name, sequence, number, flags) in enumerate(sent):
            client.raw.async_stream_infer(
                name, value_of(client, number), request_id=str(position), sequence_id=sequence, **flags
            )
        results = [await asyncio.to_thread(came.get, timeout=PATIENCE_S) for _ in sent]
        client.raw.stop_stream()

    assert [error for _, error in results] == [None] * len(sent)
    found = {int(result.get_response().id): float(result.as_numpy("OUTPUT")[0, 0]) for result, _ in results}
    assert [found[position] for position in range(len(sent))] == totals(sent)


async def test_sequences_on_one_stream_of_the_asyncio_client(stack: Stack) -> None:
    sent = steps(200, "sums")
    async with connected("grpc.aio", stack) as client:

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for position, (name, sequence, number, flags) in enumerate(sent):
                inputs = value_of(client, number)
                more = {"request_id": str(position), "sequence_id": sequence, **flags}
                yield {"model_name": name, "inputs": inputs, **more}

        results = [each async for each in client.raw.stream_infer(requests())]

    assert [error for _, error in results] == [None] * len(sent)
    found = {int(result.get_response().id): float(result.as_numpy("OUTPUT")[0, 0]) for result, _ in results}
    assert [found[position] for position in range(len(sent))] == totals(sent)
