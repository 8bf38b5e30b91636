"""How a client wants each output: in which form, ranked into classes, or in shared memory (reference §1.6 to §1.15).

The same for HTTP and gRPC. A request's parameters become an `OutputPlan` (`read_special` reads those of one output);
`bind` adds what the model's configuration knows; `prepare` does to the outputs what the plan says.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, UnsupportedFeature
from qinfer.tensors import Bytes, Tensor
from qinfer.wire.classification import classify

_NO_SHARED_MEMORY = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Regions(Protocol):
    """The shared memory that clients registered; every method raises `UnsupportedFeature` where it is off."""

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a part of a region: what the client writes there later does not change it."""
        ...

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Makes sure that a region has that part."""
        ...

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region."""
        ...


class NoRegions:
    """The `Regions` of a server where shared memory is off."""

    def view(self, name: str, offset: int, byte_size: int) -> NoReturn:
        """Refuses."""
        raise no_shared_memory()

    def check(self, name: str, offset: int, byte_size: int) -> NoReturn:
        """Refuses."""
        raise no_shared_memory()

    def write(self, name: str, offset: int, data: Bytes) -> NoReturn:
        """Refuses."""
        raise no_shared_memory()


NO_REGIONS = NoRegions()
"""The one that is needed."""


class Special(msgspec.Struct, frozen=True):
    """What is done with an output that does not simply travel in the reply.

    Attributes:
        classes: So many of its best classes are wanted instead of its elements; 0 = its elements.
        region: The shared memory region that it is written to; empty = none.
        offset: Where in the region, in bytes.
        byte_size: How many bytes it may take there.
        labels: The names of its classes; `bind` sets them.
        batched: Whether its first dimension counts rows; `bind` sets it.
    """

    classes: int = 0
    region: str = ""
    offset: int = 0
    byte_size: int = 0
    labels: tuple[str, ...] = ()
    batched: bool = False


class OutputPlan(msgspec.Struct, frozen=True):
    """How the outputs of a response travel.

    Attributes:
        binary: Whether as binary data, where an output does not say: the request's `binary_data_output`.
        overrides: Output name → its own `binary_data`.
        special: Output name → what else is done with it; `None` for nothing, as nearly always.
    """

    binary: bool = False
    overrides: Mapping[str, bool] = {}
    special: Mapping[str, Special] | None = None

    def is_binary(self, output: str) -> bool:
        """Tells whether `output` travels as binary data."""
        return self.overrides.get(output, self.binary)


class Prepared(NamedTuple):
    """Outputs as the reply tells of them.

    Attributes:
        outputs: The outputs, classes in the place of those that were ranked.
        placed: Names of the outputs whose data is in shared memory, and not in the reply.
    """

    outputs: tuple[Tensor, ...]
    placed: frozenset[str]


def no_shared_memory() -> UnsupportedFeature:
    """Makes Triton's answer to everything about shared memory where it is off."""
    return UnsupportedFeature(_NO_SHARED_MEMORY)


def read_special(parameters: Mapping[str, Any], regions: Regions) -> Special | None:
    """Reads what is special about an output from its parameters; `None` for nothing.

    Args:
        parameters: The output's own, those with a meaning of the right types.
        regions: The registered regions.

    Raises:
        InvalidRequest: Parameters contradict one another.
        QinferError: The region has no such part, is not registered, or shared memory is off.
    """
    if "shared_memory_region" not in parameters:
        classes = parameters.get("classification", 0)
        return Special(classes=classes) if classes else None
    for other in ("classification", "binary_data"):
        if other in parameters and parameters[other] is not False:
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    special = Special(
        region=parameters["shared_memory_region"],
        offset=parameters.get("shared_memory_offset", 0),
        byte_size=parameters.get("shared_memory_byte_size", 0),
    )
    regions.check(special.region, special.offset, special.byte_size)
    return special


def bind(plan: OutputPlan, labels: Mapping[str, tuple[str, ...]], *, batched: bool) -> OutputPlan:
    """Completes a plan by what the model's configuration knows; needed for plans with something special only.

    Args:
        plan: What the request said.
        labels: Output → the names of its classes; outputs without labels may be left out.
        batched: Whether the model has a batch dimension.
    """
    if plan.special is None:
        return plan
    special = {
        name: msgspec.structs.replace(output, labels=labels.get(name, ()), batched=batched)
        if output.classes
        else output
        for name, output in plan.special.items()
    }
    return msgspec.structs.replace(plan, special=special)


def prepare(response: Response, plan: OutputPlan, regions: Regions) -> Prepared:
    """Ranks outputs into classes and writes outputs to shared memory, as a bound plan says.

    It takes long for large outputs, and is then to be called off the event loop.

    Args:
        response: A response that carries outputs.
        plan: How they travel.
        regions: The registered regions.

    Raises:
        InvalidRequest: An output can't be ranked, or does not fit where it is to be written.
        QinferError: The region was unregistered meanwhile, or shared memory is off.
    """
    if plan.special is None:
        return Prepared(response.outputs, frozenset())
    outputs: list[Tensor] = []
    placed: set[str] = set()
    for tensor in response.outputs:
        special = plan.special.get(tensor.name)
        if special is not None and special.classes:
            outputs.append(classify(tensor, special.classes, special.labels, batched=special.batched))
            continue
        if special is not None:
            _place(tensor, special, regions)
            placed.add(tensor.name)
        outputs.append(tensor)
    return Prepared(tuple(outputs), frozenset(placed))


def _place(tensor: Tensor, special: Special, regions: Regions) -> None:
    if tensor.nbytes > special.byte_size:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{tensor.name}' ({special.byte_size} bytes) "
            f"should be at least {tensor.nbytes} bytes to hold the results"
        )
    regions.write(special.region, special.offset, tensor.data)
