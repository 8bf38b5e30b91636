"""The registry of shared memory regions, on real shared memory objects."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from qinfer.core.messages import Response
from qinfer.errors import (
    AlreadyExists,
    InvalidRequest,
    PayloadTooLarge,
    RegionNotFound,
    RegionUnavailable,
    UnsupportedFeature,
)
from qinfer.tensors import Tensor
from qinfer.wire.kserve_json import decode_infer
from qinfer.wire.outputs import OutputPlan, Special
from qinfer_api.http.infer import reply_bytes
from qinfer_api.shared_memory import DIRECTORY, KnownRequest, Region, RequestRegions, SharedMemory, TakesLong


@pytest.fixture
def key() -> Iterator[str]:
    """Names an object of 64 bytes, which count from 0."""
    name = f"qinfer-test-{uuid4().hex}"
    path = Path(DIRECTORY) / name
    path.write_bytes(bytes(range(64)))
    yield f"/{name}"
    path.unlink(missing_ok=True)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    registry = SharedMemory(allowed=True)
    yield registry
    registry.close()


def test_a_region_is_read_and_written(memory: SharedMemory, key: str) -> None:
    """At its offset in the object."""
    memory.register("r", key, 16, 32)

    memory.write("r", 8, b"\xff\xfe")

    assert bytes(memory.view("r", 0, 4)) == bytes([16, 17, 18, 19])
    assert bytes(memory.view("r", 7, 4)) == bytes([23, 0xFF, 0xFE, 26])
    assert (Path(DIRECTORY) / key[1:]).read_bytes()[24:26] == b"\xff\xfe"


def test_what_was_read_does_not_change(memory: SharedMemory, key: str) -> None:
    """A request is what it was when it was read."""
    memory.register("r", key, 0, 8)
    seen = memory.view("r", 0, 8)

    memory.write("r", 0, bytes(8))

    assert bytes(seen) == bytes(range(8))


def test_the_status_tells_what_is_registered(memory: SharedMemory, key: str) -> None:
    """All regions, or the one that is asked for."""
    memory.register("a", key, 0, 8)
    memory.register("b", key, 8, 8)

    assert memory.status() == [Region("a", key, 0, 8), Region("b", key, 8, 8)]
    assert memory.status("b") == [Region("b", key, 8, 8)]
    with pytest.raises(RegionNotFound, match="Unable to find system shared memory region: 'c'"):
        memory.status("c")


def test_regions_are_forgotten(memory: SharedMemory, key: str) -> None:
    """One, one that there is not, and all; their names are free again."""
    memory.register("a", key, 0, 8)
    memory.register("b", key, 8, 8)
    memory.unregister("a")
    memory.unregister("nothing")

    assert [region.name for region in memory.status()] == ["b"]
    memory.unregister()
    assert memory.status() == []
    memory.register("a", key, 0, 8)


def test_forgotten_regions_hold_no_descriptor(memory: SharedMemory, key: str) -> None:
    """Neither do refused ones."""
    before = len(os.listdir("/proc/self/fd"))
    memory.register("a", key, 0, 8)
    memory.view("a", 0, 8)
    memory.unregister("a")
    with pytest.raises(InvalidRequest):
        memory.register("a", key, 0, 65)

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_is_taken_once(memory: SharedMemory, key: str) -> None:
    """Triton's text."""
    memory.register("r", key, 0, 8)

    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        memory.register("r", key, 8, 8)


@pytest.mark.parametrize(("offset", "size"), [(0, 65), (60, 5), (64, 1), (2**64 - 1, 2**64 - 1), (0, 0)])
def test_a_region_lies_within_its_object(memory: SharedMemory, key: str, offset: int, size: int) -> None:
    """Also where the sum is beyond what a machine word holds."""
    with pytest.raises(InvalidRequest, match="failed to register shared memory region 'r': invalid args"):
        memory.register("r", key, offset, size)


def test_a_region_stays_while_requests_use_it(memory: SharedMemory, key: str) -> None:
    """Regions stay open as long as the `RequestRegions` of each request; then the name is free."""
    memory.register("r", key, 0, 16)
    first, second = memory.limited(100), memory.limited(100)
    first.view("r", 0, 8)
    first.check("r", 8, 8)
    second.check("r", 0, 16)

    memory.unregister()
    del first
    assert bytes(second.view("r", 0, 2)) == bytes([0, 1])
    with pytest.raises(AlreadyExists):
        memory.register("r", key, 0, 16)
    del second

    assert memory.status() == []


def test_tenants_have_regions_of_their_own(memory: SharedMemory, key: str) -> None:
    """Equal names are different regions; what one unregisters stays with the others."""
    for offset, tenant in enumerate(("", "acme", "evil")):
        memory.for_tenant(tenant).register("r", key, offset, 8)
    memory.for_tenant("evil").register("s", key, 0, 8)

    memory.for_tenant("evil").unregister()

    assert memory.for_tenant("evil").status() == []
    assert [region.offset for region in memory.for_tenant("acme").status()] == [1]
    assert bytes(memory.for_tenant("acme").view("r", 0, 1)) == bytes([1])
    with pytest.raises(RegionNotFound):
        memory.for_tenant("evil").view("r", 0, 1)
    memory.close()
    assert memory.for_tenant("acme").status() == []


def test_a_tenant_that_has_all_regions_leaves_others_their_share(
    memory: SharedMemory, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer_api.shared_memory.MAX_REGIONS", 4)
    for number in range(4):
        memory.for_tenant("evil").register(f"r{number}", key, 0, 8)

    memory.for_tenant("acme").register("r0", key, 0, 8)
    memory.for_tenant("acme").register("r1", key, 0, 8)

    for tenant in ("acme", "evil"):
        with pytest.raises(InvalidRequest, match="are registered already"):
            memory.for_tenant(tenant).register("more", key, 0, 8)


def test_an_object_that_is_not_there(memory: SharedMemory) -> None:
    """An internal error, as in Triton."""
    with pytest.raises(RegionUnavailable, match="Unable to open shared memory region: '/nothing-of-that-name'"):
        memory.register("r", "/nothing-of-that-name", 0, 1)


@pytest.mark.parametrize(
    "bad",
    ["", "/", "///", "../../etc/passwd", "/../etc/passwd", "//..", "a/b", "//a/b", ".", "..", "\0", "x" * 300],
)
def test_only_shared_memory_objects_are_opened(memory: SharedMemory, bad: str) -> None:
    """A key is a name, and no path."""
    with pytest.raises(InvalidRequest, match="invalid shm key"):
        memory.register("r", bad, 0, 1)


def test_links_and_directories_are_not_opened(memory: SharedMemory, tmp_path: Path) -> None:
    """A link in the directory could lead anywhere."""
    target, name = tmp_path / "secret", f"qinfer-test-{uuid4().hex}"
    target.write_bytes(bytes(8))
    link, folder, pipe = (Path(DIRECTORY) / f"{name}-{kind}" for kind in ("link", "folder", "pipe"))
    link.symlink_to(target)
    folder.mkdir()
    os.mkfifo(pipe)
    try:
        for path in (link, folder, pipe):
            with pytest.raises(RegionUnavailable, match="Unable to open shared memory region"):
                memory.register("r", path.name, 0, 8)
    finally:
        link.unlink()
        folder.rmdir()
        pipe.unlink()


def test_a_key_may_begin_with_slashes(memory: SharedMemory, key: str) -> None:
    memory.register("r", f"//{key}", 0, 8)

    assert bytes(memory.view("r", 0, 3)) == bytes(range(3))


@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_the_keys_of_python_models_are_reserved(memory: SharedMemory, slashes: str) -> None:
    """Triton's text."""
    key = f"{slashes}triton_python_backend_shm_region_1"
    with pytest.raises(InvalidRequest) as caught:
        memory.register("r", key, 0, 8)

    assert caught.value.message == (
        f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved prefix "
        "'triton_python_backend_shm_region_'"
    )


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (8, 0, "Invalid offset for shared memory region: 'r'"),
        (2**64, 1, "Invalid offset for shared memory region: 'r'"),
        (4, 5, r"Invalid offset \+ byte size for shared memory region: 'r'"),
        (
            1,
            2**64 - 1,
            r"Integer overflow detected: byte_size \(18446744073709551615\) \+ offset \(1\) exceeds maximum value "
            r"\(18446744073709551615\) for region 'r'",
        ),
    ],
)
def test_a_part_lies_within_its_region(memory: SharedMemory, key: str, offset: int, size: int, text: str) -> None:
    """The object may go on; the region does not."""
    memory.register("r", key, 0, 8)

    with pytest.raises(InvalidRequest, match=text):
        memory.view("r", offset, size)
    with pytest.raises(InvalidRequest, match=text):
        memory.check("r", offset, size)


def test_writing_stays_within_the_region(memory: SharedMemory, key: str) -> None:
    """Nothing of it is written."""
    memory.register("r", key, 0, 8)

    with pytest.raises(InvalidRequest, match="Invalid offset"):
        memory.write("r", 4, bytes(5))
    assert (Path(DIRECTORY) / key[1:]).read_bytes() == bytes(range(64))


def test_an_object_that_was_made_shorter_harms_nobody(memory: SharedMemory, key: str) -> None:
    """Where it is mapped, the process that reads it is killed; and writing may not make it longer again."""
    memory.register("r", key, 0, 64)
    os.truncate(Path(DIRECTORY) / key[1:], 10)

    with pytest.raises(InvalidRequest, match="shorter than when it was registered"):
        memory.view("r", 0, 64)
    with pytest.raises(InvalidRequest, match="shorter than when it was registered"):
        memory.write("r", 0, bytes(64))
    assert (Path(DIRECTORY) / key[1:]).stat().st_size == 10


def test_a_request_may_not_read_more_than_a_body_may_have(memory: SharedMemory, key: str) -> None:
    """All its inputs together."""
    memory.register("r", key, 0, 64)
    limited = memory.limited(48)
    limited.view("r", 0, 40)

    with pytest.raises(PayloadTooLarge, match="exceed the maximum allowed input size"):
        limited.view("r", 0, 9)


def test_nothing_works_where_it_is_off(key: str) -> None:
    """Triton's text, for everything."""
    memory = SharedMemory(allowed=False)
    for call in (
        lambda: memory.register("r", key, 0, 8),
        lambda: memory.unregister("r"),
        memory.unregister,
        lambda: memory.view("r", 0, 8),
        lambda: memory.check("r", 0, 8),
        lambda: memory.write("r", 0, b""),
    ):
        with pytest.raises(UnsupportedFeature, match=r"Client shared memory is disabled\. Start the server with"):
            call()


def part(name: str = "x", offset: int = 0, size: int = 8, **more: Any) -> dict[str, Any]:
    """Returns an input or output in the region."""
    where = {"shared_memory_region": "r", "shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {"name": name, "shape": [size], "datatype": "UINT8", "parameters": where, **more}


def read(memory: SharedMemory, body: dict[str, Any], times: int = 2) -> RequestRegions:
    """Reads a request of HTTP a few times, as a gateway does, and returns the last one's regions."""
    text = json.dumps(body).encode()
    for _ in range(times):
        regions = memory.limited(1000, lambda _: None)
        request, plan = decode_infer(text, None, "m", 0, regions=regions)
        regions.learn(memory.texts, text, request, plan, "")
    return regions


def repeated(memory: SharedMemory) -> KnownRequest:
    (known,) = memory.texts.values()
    return known


def test_a_repeated_request_is_copied_anew(memory: SharedMemory, key: str) -> None:
    """Without its text; model and version are those of the URL."""
    memory.register("r", key, 16, 32)
    output = {"name": "y", "parameters": part(offset=16)["parameters"]}
    read(memory, {"id": "7", "inputs": [part(offset=4), part("z", 0, 3)], "outputs": [output]})
    memory.write("r", 4, b"\xff\xfe")

    request = repeated(memory).read("n", 5, lambda _: None)

    assert (request.model, request.version, request.client_id, request.outputs) == ("n", 5, "7", ("y",))
    assert [(one.name, one.shape, bytes(one.data)) for one in request.inputs] == [
        ("x", (8,), bytes([0xFF, 0xFE, 22, 23, 24, 25, 26, 27])),
        ("z", (3,), bytes([16, 17, 18])),
    ]
    plan = repeated(memory).plan
    assert plan.special is not None
    assert isinstance(plan.held, RequestRegions)
    plan.held.write("r", plan.special["y"].offset, b"\xfd")
    assert (Path(DIRECTORY) / key[1:]).read_bytes()[32] == 0xFD


def test_inputs_of_a_repeated_request_lie_in_one_piece_of_memory(memory: SharedMemory, key: str) -> None:
    memory.register("r", key, 0, 64)
    read(memory, {"inputs": [part(offset=4), part("z", 40)]})
    taken = bytearray(16)

    request = repeated(memory).read("m", 0, lambda size: memoryview(taken)[:size])

    assert bytes(taken) == bytes([*range(4, 12), *range(40, 48)])
    assert [bytes(one.data) for one in request.inputs] == [taken[:8], taken[8:]]


def test_a_repeated_request_that_takes_long(memory: SharedMemory, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is to copy inputs for which there is no memory; a shortened object is an error."""
    memory.register("r", key, 0, 64)
    read(memory, {"inputs": [part(size=40)]})

    os.truncate(Path(DIRECTORY) / key[1:], 10)
    with pytest.raises(InvalidRequest, match="shorter than when it was registered"):
        repeated(memory).read("m", 0, lambda _: None)
    monkeypatch.setattr("qinfer_api.shared_memory.QUICK_BYTES", 39)
    with pytest.raises(TakesLong):
        repeated(memory).read("m", 0, lambda _: None)


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [part(), {"name": "z", "shape": [1], "datatype": "UINT8", "data": [1]}]},
        {"inputs": [part(datatype="BYTES")]},
        {"inputs": [part()], "parameters": {"priority": 1}},
        {"inputs": [part()], "parameters": {"mine": 1}},
        {"inputs": [part()], "parameters": {"sequence_id": 1}},
        {"inputs": [part()], "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
        {"inputs": [part()], "id": "7" * 2048},
    ],
)
def test_requests_that_are_read_anew_each_time(memory: SharedMemory, key: str, body: dict[str, Any]) -> None:
    memory.register("r", key, 0, 64)
    read(memory, body, times=3)

    assert memory.texts == {}


def test_a_repeated_request_is_forgotten_with_its_regions(memory: SharedMemory, key: str) -> None:
    """A remembered request holds no region open, and a request of a region that is about to close is not remembered."""
    memory.register("r", key, 0, 64)
    regions = read(memory, {"inputs": [part()]})
    assert len(memory.texts) == 1

    memory.unregister("r")
    read(memory, {"inputs": [part()]})

    assert [region.name for region in memory.status()] == ["r"]
    assert memory.texts == {}
    del regions
    assert memory.status() == []


def test_the_memory_of_repeated_requests_is_bounded(
    memory: SharedMemory, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer_api.shared_memory._MAX_KNOWN", 3)
    memory.register("r", key, 0, 64)
    for number in range(5):
        read(memory, {"inputs": [part()], "id": str(number)})

    assert len(memory.texts) == 2


def test_what_is_copied_into_regions_is_no_part_of_the_reply(memory: SharedMemory, key: str) -> None:
    """Classes are."""
    memory.register("r", key, 0, 64)
    regions = memory.limited(100)
    regions.check("r", 0, 8)
    plan = OutputPlan(special={"y": Special(region="r", byte_size=8), "z": Special(classes=1)}, held=regions)
    response = Response(request_id="1", outputs=tuple(Tensor(name, "UINT8", (8,), bytes(8)) for name in "xyz"))

    assert reply_bytes(response, plan) == 16
    assert reply_bytes(response, OutputPlan()) == 24
