"""`ModelSpec`: a model's configuration for the rest of qinfer, made by `config` from a `ModelConfig`; its lanes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from qinfer.models.sequence_spec import SequenceSpec
from qinfer.queue.entries import DELAYED, Lane

Dims = tuple[int, ...]

MAX_PARTS = 64

IN_PROCESS = frozenset(("onnxruntime", "openvino", "pytorch", "tensorrt"))
"""Backends whose runtime a worker imports; their models never see their configuration."""

FRAMEWORKS = frozenset(("tensorflow", "litert", "forest", "jax", "mlflow"))
"""Backends whose runtime only the process of an instance imports; a worker completes their configurations by it."""


class BatchInputKind(StrEnum):
    """Kinds of batch inputs (`model_config.proto`; Triton's docs/user_guide/ragged_batching.md)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


class BatchInputSpec(NamedTuple):
    """An input of the model file that the server makes from the shapes of the input `source`.

    `rank` has no batch dimension.
    """

    kind: BatchInputKind
    name: str
    datatype: str
    source: str
    rank: int


class BatchOutputSpec(NamedTuple):
    """An output of one dimension that is cut by the shapes of the input `source`; -1 in `dims` = as there."""

    name: str
    dims: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: The name of the tensor.
        datatype: The wire datatype, such as `FP32`.
        dims: The dimensions without the batch dimension; -1 is variable.
        optional: Whether a request may leave out this input.
        ragged: Whether the variable dimensions may differ within a batch (`allow_ragged_batch`, `batch_output`); the
            model file has one dimension for it.
        reshape: The dimensions that the model sees instead, if they differ.
        labels: The names of an output's classes (`label_filename`).
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    reshape: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()

    @property
    def seen_dims(self) -> tuple[int, ...]:
        """The dimensions that the model sees; -1 is variable."""
        return self.dims if self.reshape is None else self.reshape

    def file_shape(self, *, batched: bool) -> tuple[int, ...]:
        """Returns its shape in the model file; -1 is variable."""
        if self.ragged:
            return (-1,)
        return (-1, *self.seen_dims) if batched else self.seen_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """The queue policy of one priority level (reference §3.3, queue policy).

    Attributes:
        max_queue_size: The most waiting requests; 0 = the lane's capacity.
        timeout_s: The longest wait; 0 = a request may wait until its deadline.
        delay: A late request goes behind its level (DELAY) instead of being refused (REJECT).
        allow_override: A request's own `timeout` may shorten `timeout_s`.
    """

    max_queue_size: int = 0
    timeout_s: float = 0.0
    delay: bool = False
    allow_override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSpec:
    """The `dynamic_batching` part of a configuration (reference §3.3).

    Attributes:
        preferred_sizes: Sizes worth stopping at, ascending; `[max_batch_size]` by default.
        max_queue_delay_s: The longest wait of the oldest request for the batch to fill.
        priority_levels: The lowest level, 1 being the highest; 0 = there are no levels.
    """

    preferred_sizes: tuple[int, ...]
    max_queue_delay_s: float = 0.0
    priority_levels: int = 0
    default_priority: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)

    def level(self, asked: int) -> int:
        """Returns the level of a request: 1 … `priority_levels`, or 0."""
        return asked if 1 <= asked <= self.priority_levels else self.default_priority

    def policy(self, level: int) -> QueuePolicy:
        """Returns the queue policy of a level."""
        return self.policies.get(level, self.default_policy)

    @property
    def is_bounded(self) -> bool:
        """Tells whether a queue policy limits waiting requests."""
        return any(policy.max_queue_size for policy in (self.default_policy, *self.policies.values()))

    @property
    def is_plain(self) -> bool:
        """Tells whether all requests are alike (reference §3.3 step 3)."""
        return not self.priority_levels and self.default_policy == QueuePolicy()

    @property
    def may_prefetch(self) -> bool:
        """Tells whether requests run in order, and only deadlines end waits."""
        return not self.priority_levels and not self.default_policy.timeout_s

    @property
    def is_in_order(self) -> bool:
        """Tells whether requests run in arrival order; some may be refused."""
        return not self.priority_levels and not self.default_policy.delay


class WarmupInput(NamedTuple):
    """One input of a `model_warmup` sample: zeros, random or the first row of a `file` in the directory `warmup`."""

    datatype: str
    dims: tuple[int, ...]
    random: bool = False
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpec:
    """One `model_warmup` sample: `batch_size` requests of one row, executed `count` times."""

    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


class Device(NamedTuple):
    """The device of a model instance.

    Attributes:
        kind: `cpu` or `gpu`.
        number: The number of the GPU; 0 for the CPU.
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    number: int = 0


class ResourceSpec(NamedTuple):
    """Units of a resource that an execution holds; global = one for all workers."""

    name: str
    units: int
    is_global: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """Instances of a model on one device: one spec for each group, and for each GPU of a group.

    Attributes:
        resources: Where the server limits rates.
        priority: The weight among executions that wait for resources; 0 counts as 1.
    """

    device: Device = field(default_factory=Device)
    count: int = 1
    name: str = ""
    resources: tuple[ResourceSpec, ...] = ()
    priority: int = 0


class Accelerator(NamedTuple):
    """An entry of `optimization.execution_accelerators`, such as `tensorrt`."""

    name: str
    parameters: Mapping[str, str]


class EnsembleStep(NamedTuple):
    """A step in an ensemble's configuration.

    Attributes:
        version: The version of the model; 0 = the highest that is READY when the ensemble is loaded.
        inputs: Input of the model → tensor of the ensemble.
        outputs: Output of the model → tensor of the ensemble.
    """

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's normalised configuration.

    Attributes:
        platform: Triton's platform, such as `onnxruntime_onnx`; may be empty.
        max_batch_size: 0 = no batch dimension; ≥ 1 = every tensor has a leading batch dimension.
        inputs: The inputs, without those that the server fills (`sequences`).
        batching: The rules by which requests are merged; `None` = they are never merged.
        sequences: The rules by which requests of sequences are batched; `None` = the model has no sequences.
        instances: The devices of its instances, each of which runs one execution at a time.
        parameters: The `parameters` map; qinfer's own begin with `qinfer.`.
        default_timeout_s: The timeout of a request without one.
        max_timeout_s: The longest timeout that a request may ask for.
        graph_level: `optimization.graph.level`; `None` leaves it to the backend.
        gpu_accelerators: `optimization.execution_accelerators` for instances on GPUs, in order.
        cuda_graphs: `optimization.cuda.graphs`: record an execution of each shape, and replay it.
        urgent: `optimization.priority` is PRIORITY_MAX: work on a GPU goes before that of other models.
        pins_inputs: `optimization.input_pinned_memory`: inputs may cross to a GPU from pinned memory.
        pins_outputs: `optimization.output_pinned_memory`, the same for outputs.
        lane_capacity: The most waiting requests of one lane.
        min_workers: 0 = READY without a live worker: requests wait.
        decoupled: A request has 0, 1 or many responses (`model_transaction_policy`).
        preserves_order: A gateway answers in arrival order (`preserve_ordering`); never if decoupled.
        stream_resume: A stream whose worker dies is executed again, without the responses already sent: the model is
            deterministic.
        cached_for_all: Whether a cached response serves other tenants, too.
        config_json: The configuration in the dialect of `GET …/config`, for backends whose models see it.
        steps: The steps of an ensemble, which has no backend.
        max_inflight: The most responses of a request's decoupled step that later steps may hold.
        batch_inputs: Inputs made of the shapes of a batch's requests.
        batch_outputs: Outputs that are cut by the shapes of an input.
        splits: A request of more than `max_batch_size` rows is executed in parts.
        slo_latency_s: The latency objective; 0 = the objective of the server.
        slo_target: The share of requests that should succeed within it; 0 = the share of the server's objective.
        metric_tags: More labels among Triton's metrics, without the leading underscore.
        strict_outputs: Refuse outputs whose datatype or shape is not as declared.
        execute_timeout_s: The longest execution; 0 = no limit, here and below.
        max_strings: The most elements of one request's BYTES inputs together.
    """

    name: str
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str = ""
    max_batch_size: int = 0
    batching: BatchingSpec | None = None
    sequences: SequenceSpec | None = None
    instances: tuple[InstanceSpec, ...] = (InstanceSpec(),)
    filename: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    warmup: tuple[WarmupSpec, ...] = ()
    default_timeout_s: float = 60.0
    max_timeout_s: float = 3600.0
    graph_level: int | None = None
    gpu_accelerators: tuple[Accelerator, ...] = ()
    cpu_accelerators: tuple[Accelerator, ...] = ()
    cuda_graphs: bool = False
    urgent: bool = False
    pins_inputs: bool = True
    pins_outputs: bool = True
    lane_capacity: int = 10_000
    min_workers: int = 1
    decoupled: bool = False
    preserves_order: bool = False
    stream_resume: bool = False
    is_cached: bool = False
    cached_for_all: bool = False
    config_json: str = ""
    steps: tuple[EnsembleStep, ...] = ()
    max_inflight: int = 0
    batch_inputs: tuple[BatchInputSpec, ...] = ()
    batch_outputs: tuple[BatchOutputSpec, ...] = ()
    splits: bool = False
    slo_latency_s: float = 0.0
    slo_target: float = 0.0
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    strict_outputs: bool = False
    execute_timeout_s: float = 0.0
    load_timeout_s: float = 0.0
    warmup_timeout_s: float = 0.0
    max_strings: int = 1_000_000

    @property
    def max_request_rows(self) -> int:
        """The most rows of an online request; 0 = no batch dimension."""
        return self.max_batch_size * (MAX_PARTS if self.splits else 1)

    @property
    def is_stateful(self) -> bool:
        """Tells whether a sequence's requests go to one worker, in order."""
        return self.sequences is not None and not self.sequences.iterative

    @property
    def copies_once(self) -> bool:
        """Tells whether only a batch reads requests' tensors; strings, streams and steps are read more often."""
        is_special = self.decoupled or self.steps or self.sequences is not None
        return not is_special and all(port.datatype != "BYTES" for port in self.inputs)

    def accelerates(self, name: str, device: Device) -> bool:
        """Tells whether instances on a device have an accelerator."""
        entries = self.gpu_accelerators if device.kind == "gpu" else self.cpu_accelerators
        return any(entry.name == name for entry in entries)

    @property
    def file_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of requests and batches, then control inputs, then states."""
        if self.sequences is None:
            return (*self.inputs, *map(_of_batch, self.batch_inputs))
        controls = tuple(TensorSpec(name=c.name, datatype=c.datatype, dims=(1,)) for c in self.sequences.controls)
        states = tuple(TensorSpec(name=s.input, datatype=s.datatype, dims=s.dims) for s in self.sequences.states)
        return (*self.inputs, *controls, *states)

    @property
    def file_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of responses, then the other states."""
        if self.sequences is None:
            return self.outputs
        answered = {output.name for output in self.outputs}
        states = [s for s in self.sequences.states if s.output not in answered]
        return (*self.outputs, *(TensorSpec(name=s.output, datatype=s.datatype, dims=s.dims) for s in states))

    @property
    def is_limited(self) -> bool:
        """Tells whether executions need limited resources."""
        return any(resource.units for group in self.instances for resource in group.resources)

    @property
    def instance_count(self) -> int:
        """The most parallel executions in one worker."""
        return sum(group.count for group in self.instances)


def _of_batch(made: BatchInputSpec) -> TensorSpec:
    if made.kind is BatchInputKind.ITEM_SHAPE:
        return TensorSpec(name=made.name, datatype=made.datatype, dims=(made.rank,))
    return TensorSpec(name=made.name, datatype=made.datatype, dims=(), ragged=True)


class Reshape(NamedTuple):
    """A tensor's change of shape, without the batch dimension (reference §3.2); -1 is variable.

    Variable dimensions of the two shapes correspond in order: `[-1, 4, -1]` and `[-1, 2, 2, -1]`.
    """

    before: Dims
    after: Dims
    batched: bool

    def apply_to(self, shape: Dims) -> Dims:
        """Returns the new shape; a missing variable dimension becomes 0."""
        lead = 1 if self.batched else 0
        sizes = iter([size for size, dim in zip(shape[lead:], self.before, strict=False) if dim == -1])
        return shape[:lead] + tuple([next(sizes, 0) if dim == -1 else dim for dim in self.after])


def inward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the inputs' changes."""
    batched = spec.max_batch_size > 0
    return {i.name: Reshape(i.dims, i.reshape, batched) for i in spec.inputs if i.reshape is not None}


def outward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the outputs' changes."""
    batched = spec.max_batch_size > 0
    return {o.name: Reshape(o.reshape, o.dims, batched) for o in spec.outputs if o.reshape is not None}


MAX_LANES = 32
"""The most lanes of a version, because each costs a fetch three commands; more levels share lanes."""

LANE_NAMES = tuple(f"p{number}{suffix}" for number in range(1, MAX_LANES + 1) for suffix in ("", DELAYED))

_NO_POLICY = QueuePolicy()


class LaneRoute(NamedTuple):
    """The route of one level; entries of the lanes `ahead` are read first."""

    lane: Lane
    policy: QueuePolicy
    ahead: tuple[Lane, ...]

    @property
    def is_usual(self) -> bool:
        """Tells whether requests wait in one lane."""
        return not self.policy.timeout_s and len(self.ahead) == 1


class Routes:
    """The routes of one model version; if `are_plain`, all requests take the default route."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        lanes = lanes_of(spec, version)
        self._batching: BatchingSpec | None = spec.batching
        self._ahead = {lane.name: lanes[:number] for number, lane in enumerate(lanes, start=1)}
        self.are_plain = spec.batching is None or spec.batching.is_plain
        self.default = self._of_level(0 if spec.batching is None else spec.batching.default_priority)

    def for_priority(self, priority: int) -> LaneRoute:
        """Returns the route of a priority."""
        batching = self._batching
        if batching is None or not batching.priority_levels:
            return self.default
        return self._of_level(batching.level(priority))

    def _of_level(self, level: int) -> LaneRoute:
        batching = self._batching
        ahead = self._ahead[lane_name(0 if batching is None else batching.priority_levels, level)]
        return LaneRoute(ahead[-1], _NO_POLICY if batching is None else batching.policy(level), ahead)


def lane_name(levels: int, level: int) -> str:
    """Returns the lane of a level: `p1` … `p32`."""
    return f"p{_number(levels, level)}"


def lanes_of(spec: ModelSpec, version: int) -> tuple[Lane, ...]:
    """Returns a version's online lanes in reading order, without a loop over up to 2⁶⁴ levels."""
    batching = spec.batching or BatchingSpec(preferred_sizes=(1,))
    levels = batching.priority_levels
    names: list[str] = []
    for number in range(1, min(max(levels, 1), MAX_LANES) + 1):
        names.append(f"p{number}")
        if _delays(batching, number):
            names.append(f"p{number}{DELAYED}")
    return tuple(Lane(spec.name, version, name) for name in names)


def _number(levels: int, level: int) -> int:
    if levels <= MAX_LANES:
        return max(level, 1)
    return 1 + (level - 1) * MAX_LANES // levels


def _delays(batching: BatchingSpec, number: int) -> bool:
    levels = batching.priority_levels
    own = [policy for level, policy in batching.policies.items() if _number(levels, level) == number]
    if any(policy.delay for policy in own):
        return True
    size = 1 if levels <= MAX_LANES else _first(levels, number + 1) - _first(levels, number)
    return batching.default_policy.delay and len(own) < size


def _first(levels: int, number: int) -> int:
    return 1 - (1 - number) * levels // MAX_LANES
