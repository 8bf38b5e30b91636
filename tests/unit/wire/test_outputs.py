"""What is done to outputs before they are told of."""

from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, RegionUnavailable, UnsupportedFeature
from qinfer.tensors import Bytes, from_numpy, to_numpy
from qinfer.wire.outputs import NO_REGIONS, OutputPlan, Special, bind, prepare, read_special


class Memory:
    """Regions that remember what is done with them."""

    def __init__(self) -> None:
        self.checked: list[tuple[str, int, int]] = []
        self.written: list[tuple[str, int, bytes]] = []

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        raise NotImplementedError

    def check(self, name: str, offset: int, byte_size: int) -> None:
        self.checked.append((name, offset, byte_size))

    def write(self, name: str, offset: int, data: Bytes) -> None:
        self.written.append((name, offset, bytes(data)))


RESPONSE = Response(
    request_id="r",
    outputs=(from_numpy("a", np.array([[1, 3]], np.uint8)), from_numpy("b", np.array([[2, 1]], np.uint8))),
)


def test_nothing_special_leaves_outputs_as_they_are() -> None:
    """The same objects, without a copy."""
    plan = OutputPlan(binary=True)

    assert prepare(RESPONSE, plan, NO_REGIONS).outputs is RESPONSE.outputs
    assert bind(plan, {"a": ("x",)}, batched=True) is plan


def test_classes_and_shared_memory() -> None:
    """Each output by itself; labels and the batch dimension are the model's."""
    memory = Memory()
    special = {"a": Special(classes=1), "b": Special(region="r", offset=4, byte_size=2)}
    plan = bind(OutputPlan(special=special), {"a": ("x", "y")}, batched=True)

    outputs, placed = prepare(RESPONSE, plan, memory)

    assert to_numpy(outputs[0]).tolist() == [[b"3:1:y"]]
    assert outputs[1] is RESPONSE.outputs[1]
    assert placed == {"b"}
    assert memory.written == [("r", 4, b"\x02\x01")]


@pytest.mark.parametrize(
    ("parameters", "special"),
    [
        ({}, None),
        ({"binary_data": True}, None),
        ({"classification": 0}, None),
        ({"classification": 3, "binary_data": True}, Special(classes=3)),
        ({"shared_memory_region": "r"}, Special(region="r")),
        (
            {
                "shared_memory_region": "r",
                "shared_memory_offset": 1,
                "shared_memory_byte_size": 2,
                "binary_data": False,
            },
            Special(region="r", offset=1, byte_size=2),
        ),
    ],
)
def test_what_parameters_say(parameters: dict[str, Any], special: Special | None) -> None:
    """A region is looked up at once."""
    memory = Memory()

    assert read_special(parameters, memory) == special
    assert memory.checked == (
        [(special.region, special.offset, special.byte_size)] if special and special.region else []
    )


@pytest.mark.parametrize("other", [{"classification": 0}, {"classification": 1}, {"binary_data": True}])
def test_shared_memory_goes_with_nothing_else(other: dict[str, Any]) -> None:
    """Triton's text."""
    with pytest.raises(InvalidRequest, match=f"Output can't set both 'shared_memory_region' and '{next(iter(other))}'"):
        read_special({"shared_memory_region": "r", **other}, Memory())


def test_an_output_that_is_too_large_is_not_written() -> None:
    """Not even in part."""
    memory = Memory()
    plan = OutputPlan(special={"b": Special(region="r", byte_size=1)})

    with pytest.raises(
        RegionUnavailable, match=r"for output 'b' \(1 bytes\) should be at least 2 bytes to hold the results"
    ):
        prepare(RESPONSE, plan, memory)
    assert memory.written == []


def test_where_shared_memory_is_off() -> None:
    """Triton's answer, whatever is asked."""
    for call in (NO_REGIONS.view, NO_REGIONS.check):
        with pytest.raises(UnsupportedFeature, match="Client shared memory is disabled"):
            call("r", 0, 1)
    with pytest.raises(UnsupportedFeature, match="Client shared memory is disabled"):
        NO_REGIONS.write("r", 0, b"")


def test_a_plan_survives_being_stored() -> None:
    """Asynchronous requests keep theirs; one that an older gateway stored is read too."""
    plan = OutputPlan(overrides={"a": True}, special={"b": Special(classes=2, labels=("x",), batched=True)})

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=OutputPlan) == plan
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"binary": True, "overrides": {}}), type=OutputPlan) == (
        OutputPlan(binary=True)
    )
