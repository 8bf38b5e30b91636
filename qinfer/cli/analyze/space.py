"""The space of `qinfer analyze`: configurations of a model by dimension; pure.

A *candidate* names a value of each dimension, a *point* is a candidate under a number of concurrent requests.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from qinfer.errors import InvalidRequest

THREAD_PARAMETERS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
}
"""Backend → the parameter with the threads of an instance; these have the accelerator `auto_mixed_precision`, too."""

Precision = Literal["full", "mixed"]
_MIXED = "auto_mixed_precision"
_DEVICES = ("cpu_execution_accelerator", "gpu_execution_accelerator")


class Candidate(NamedTuple):
    """A configuration.

    Attributes:
        instances: Instances of the model in each worker.
        max_batch: The most rows of a batch; 0 = the model has no batch dimension.
        threads: Threads of an instance; 0 = the backend's default.
        precision: `mixed` = the accelerator `auto_mixed_precision`.
    """

    instances: int
    max_batch: int
    delay_ms: float
    threads: int
    backend: str
    precision: Precision = "full"

    def text(self) -> str:
        """Returns it as `2 onnxruntime, batch 32, delay 1 ms, 1 thread`."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        batch = f", batch {self.max_batch}, delay {self.delay_ms:g} ms" if self.max_batch else ""
        precision = ", mixed precision" if self.precision == "mixed" else ""
        return f"{self.instances} {self.backend}{batch}{threads}{precision}"


def computations(candidates: Mapping[str, Candidate]) -> frozenset[tuple[str, str, int, Precision]]:
    """Returns the part of models' candidates that may change answers; instances and batches do not."""
    return frozenset((name, one.backend, one.threads, one.precision) for name, one in candidates.items())


class Point(NamedTuple):
    """A candidate under a level of load, which is a number of concurrent requests."""

    candidate: Candidate
    level: int


class Space(NamedTuple):
    """The values of each dimension in ascending order, the levels, and the model's present candidate."""

    instances: tuple[int, ...]
    max_batch: tuple[int, ...]
    delay_ms: tuple[float, ...]
    threads: tuple[int, ...]
    backend: tuple[str, ...]
    levels: tuple[int, ...]
    today: Candidate
    precision: tuple[Precision, ...] = ("full",)

    def candidates(self) -> Iterator[Candidate]:
        """Yields all combinations."""
        values = (self.instances, self.max_batch, self.delay_ms, self.threads, self.backend, self.precision)
        return (Candidate(*one) for one in product(*values))

    def points(self) -> Iterator[Point]:
        """Yields all combinations under each load."""
        return (Point(*one) for one in product(self.candidates(), self.levels))

    @property
    def size(self) -> int:
        """The number of points."""
        return sum(1 for _ in self.points())


def today_of(config: Mapping[str, Any]) -> Candidate:
    """Returns the candidate that a configuration (Triton's JSON) is."""
    batching = config.get("dynamic_batching")
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or ()
    backend = str(config.get("backend") or "")
    given = (config.get("optimization") or {}).get("execution_accelerators") or {}
    is_mixed = any(entry.get("name") == _MIXED for device in _DEVICES for entry in given.get(device) or ())
    threads = config.get("parameters", {}).get(THREAD_PARAMETERS.get(backend, ""), {}).get("string_value", 0)
    return Candidate(
        sum(int(group.get("count", 1)) for group in groups) or 1,
        int(config.get("max_batch_size", 0)) if batching is not None else min(int(config.get("max_batch_size", 0)), 1),
        int((batching or {}).get("max_queue_delay_microseconds", 0)) / 1000,
        int(threads),
        backend,
        "mixed" if is_mixed else "full",
    )


def configured(config: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Returns a configuration, in Triton's JSON, with a candidate's values.

    Only what differs from the configuration changes: preferred sizes above the largest batch go, and a group of
    instances keeps its kind and its devices.

    Raises:
        InvalidRequest: The configuration has several groups of instances and the candidate another number.
    """
    today = today_of(config)
    changed = copy.deepcopy(dict(config))
    if candidate.instances != today.instances:
        groups = changed.get("instance_group") or [{"kind": "KIND_AUTO"}]
        if len(groups) > 1:
            raise InvalidRequest(
                f"the model has {len(groups)} instance groups, so that {candidate.instances} instances can't be "
                f"divided among them; give --instances {today.instances}"
            )
        changed["instance_group"] = [{**groups[0], "count": candidate.instances}]
    if candidate.max_batch != today.max_batch or candidate.delay_ms != today.delay_ms:
        changed["max_batch_size"] = max(candidate.max_batch, min(int(changed.get("max_batch_size", 0)), 1))
        changed.pop("dynamic_batching", None)
        if candidate.max_batch > 1 or candidate.delay_ms:
            batching = copy.deepcopy(dict(config.get("dynamic_batching") or {}))
            sizes = [size for size in batching.get("preferred_batch_size", ()) if size <= candidate.max_batch]
            batching["preferred_batch_size"] = sizes
            batching["max_queue_delay_microseconds"] = int(candidate.delay_ms * 1000)
            changed["dynamic_batching"] = batching
    if candidate.backend != today.backend:
        changed["backend"], changed["platform"] = candidate.backend, ""
        old = THREAD_PARAMETERS.get(today.backend, "")
        changed["parameters"] = {k: v for k, v in changed.get("parameters", {}).items() if k != old}
        if candidate.backend == "openvino" and not changed.get("default_model_filename"):
            changed["default_model_filename"] = "model.onnx"
    if candidate.threads and (candidate.threads, candidate.backend) != (today.threads, today.backend):
        name = THREAD_PARAMETERS[candidate.backend]
        changed["parameters"] = {**changed.get("parameters", {}), name: {"string_value": str(candidate.threads)}}
    if candidate.precision != today.precision:
        given = changed.setdefault("optimization", {}).setdefault("execution_accelerators", {})
        for device in _DEVICES:
            others = [entry for entry in given.get(device) or () if entry.get("name") != _MIXED]
            given[device] = [*others, {"name": _MIXED}] if candidate.precision == "mixed" else others
    return changed


def config_text(config: Mapping[str, Any]) -> str:
    """Returns a configuration as `config.pbtxt`."""
    from google.protobuf import text_format

    from qinfer.models.config.message import from_json

    return text_format.MessageToString(from_json(json.dumps(config)))


def powers_of_two(most: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, … and `most`."""
    return (*(1 << n for n in range(most.bit_length()) if 1 << n < most), most) if most else (0,)
