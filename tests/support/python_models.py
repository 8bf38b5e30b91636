"""Models of the `python` backend for tests: written to disk, loaded in real processes, and asked without a queue."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from qinfer.backends.base import Array, Batch, ManagesModels
from qinfer.backends.python import PythonBackend
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.core.settings import LimitSettings
from qinfer.errors import Cancelled, QinferError
from qinfer.models.config import config
from qinfer.models.spec import Device, ModelSpec
from qinfer.tensors import Tensor, to_numpy
from tests.support.backends import Answers
from tests.support.models import CONTROLS, DIRECT, sequence_batching

DECOUPLED = "model_transaction_policy { decoupled: true }"
PATIENCE_S = 30.0

HEADER = """
import ctypes, json, os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

def reply(array, name="y", **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)], **more)

def x(request, name="x"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

"""

ECHO = HEADER + (
    """
class TritonPythonModel:
    def execute(self, requests):
        return [reply(x(request)) for request in requests]
"""
)

ACCUMULATOR = HEADER + (
    """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        if not x(request, "READY").all():
            return reply(np.zeros_like(x(request)))
        key = x(request, "CORRID").item()
        before = 0 if x(request, "START").all() else self.sums[key]
        total = before + x(request)
        self.sums[key] = total
        if x(request, "END").all():
            del self.sums[key]
        return reply(total, parameters={"correlation_id": request.correlation_id(), "flags": request.flags()})
"""
)
"""Sums `x` of a sequence's requests to `y`: keeps the sums itself, told by control inputs, which sequence is which.

Response parameters tell the correlation ID and the flags of the request.
"""

CONFIG = """
name: "{name}" backend: "python" max_batch_size: {max_batch_size}
input {{ name: "x" data_type: TYPE_{datatype} dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_{datatype} dims: [ {dims} ] }}
{scheduling}
{more}
"""


def execute(body: str, before: str = "") -> str:
    """Returns a model whose `execute` is `body`, a statement a line; `before` are further methods."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    methods = "\n".join(f"    {line}" for line in before.splitlines())
    return f"{HEADER}\nclass TritonPythonModel:\n{methods}\n    def execute(self, requests):\n{lines}\n"


def write_model(repository: Path, code: str, name: str = "m", **options: object) -> Path:
    """Writes a model with input `x` and output `y`; returns the directory of its version."""
    fields = {"max_batch_size": 64, "datatype": "FP32", "dims": "-1", "delay_us": 0, "more": "", **options}
    fields.setdefault("scheduling", f"dynamic_batching {{ max_queue_delay_microseconds: {fields['delay_us']} }}")
    directory = repository / name / "1"
    directory.mkdir(parents=True)
    (directory.parent / "config.pbtxt").write_text(CONFIG.format(name=name, **fields))
    (directory / "model.py").write_text(code)
    return directory


def write_accumulator(repository: Path, name: str = "accumulator", strategy: str = DIRECT, **options: object) -> Path:
    """Writes `ACCUMULATOR` with all control inputs; returns the directory of its version.

    Args:
        repository: Where it is written to.
        name: The model's name.
        strategy: `models.DIRECT`, `models.OLDEST`, or another text of `config.pbtxt`.
        **options: As of `write_model`.
    """
    options = {"max_batch_size": 4, "dims": 1, "scheduling": sequence_batching(strategy, CONTROLS), **options}
    return write_model(repository, ACCUMULATOR, name, **options)


def spec_of(directory: Path) -> ModelSpec:
    """Reads a model's configuration."""
    parsed = config.parse((directory.parent / "config.pbtxt").read_text())
    return config.to_spec(config.normalise(parsed, directory.parent.name, ["model.py"]), LimitSettings())


def load(directory: Path, device: Device | None = None, models: ManagesModels | None = None) -> PythonBackend:
    """Loads a model, which may have others loaded by `models`; unload it."""
    backend = PythonBackend(models)
    backend.load(spec_of(directory), directory, device or Device())
    return backend


@contextmanager
def loaded(
    repository: Path, code: str, name: str = "m", models: ManagesModels | None = None, **options: object
) -> Iterator[PythonBackend]:
    """Writes and loads a model."""
    backend = load(write_model(repository, code, name, **options), models=models)
    try:
        yield backend
    finally:
        backend.unload()


def batch_of(array: Array, rows: Sequence[int] | None = None, **request: object) -> Batch:
    """Returns a batch with input `x`; every request has the fields given."""
    rows = [1] * len(array) if rows is None else rows
    requests = [InferRequest(model="m", inputs=(), **request) for _ in rows]  # type: ignore[arg-type]
    return Batch(requests=requests, rows=rows, inputs={"x": array})


def run(backend: PythonBackend, array: Array, rows: Sequence[int] | None = None, **request: object) -> Answers:
    """Executes a batch."""
    answers = Answers()
    backend.execute(batch_of(array, rows, **request), answers)
    return answers


def floats(*values: float) -> Array:
    """Returns a column of numbers, a row each."""
    return np.array(values, dtype="<f4").reshape(-1, 1)


class Streamed(Answers):
    """A context of a decoupled model: keeps every response; the test says what the callers take.

    Args:
        window_bytes: The window of each item.
        stream: Answers calls to decoupled models.
    """

    def __init__(
        self, window_bytes: int = 1 << 20, stream: Callable[[InferRequest], Iterator[Response]] | None = None
    ) -> None:
        super().__init__()
        self._window_bytes = window_bytes
        self._stream = stream
        self._changed = threading.Condition()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._untold: dict[int, int] = {}
        self._unwanted: set[int] = set()
        self.finals: dict[int, tuple[Tensor, ...] | QinferError] = {}
        self.numbers: dict[int, list[float]] = {}
        """The first number of each response with outputs, by item."""
        self.said: list[Mapping[str, Scalar]] = []
        self.errors: list[str] = []

    @property
    def is_decoupled(self) -> bool:
        return True

    @property
    def window_bytes(self) -> int:
        return self._window_bytes

    def offer(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        with self._changed:
            if item in self._unwanted:
                raise Cancelled("nobody waits")
            assert item not in self.finals
            if isinstance(outputs, QinferError):
                self.errors.append(outputs.message)
            elif outputs:
                self.numbers.setdefault(item, []).append(float(to_numpy(outputs[0]).flat[0]))
            if parameters:
                self.said.append(parameters)
            if final:
                self.finals[item] = outputs
            self._changed.notify_all()

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        with self._changed:
            self._callbacks[item] = callback
            untold, is_over = self._untold.pop(item, 0), item in self._unwanted
        if untold or is_over:
            callback(0 if is_over else untold)

    def cancelled(self, item: int) -> bool:
        return item in self._unwanted

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        assert self._stream is not None
        return self._stream(request)

    def take(self, nbytes: int, item: int = 0) -> None:
        """Has the caller of an item take so many bytes."""
        with self._changed:
            callback = self._callbacks.get(item)
            if callback is None:
                self._untold[item] = self._untold.get(item, 0) + nbytes
        if callback is not None:
            callback(nbytes)

    def cancel(self, item: int = 0) -> None:
        """Has the caller of an item leave."""
        with self._changed:
            self._unwanted.add(item)
            callback = self._callbacks.get(item)
        if callback is not None:
            callback(0)

    def final(self, item: int = 0) -> tuple[Tensor, ...] | QinferError:
        """Waits for the final response of an item."""
        with self._changed:
            assert self._changed.wait_for(lambda: item in self.finals, PATIENCE_S)
            return self.finals[item]

    def failure(self, item: int = 0) -> str:
        """Waits for the final response of an item, which is an error; returns its text."""
        error = self.final(item)
        assert isinstance(error, QinferError), error
        return error.message

    def await_count(self, count: int, item: int = 0) -> None:
        """Waits until an item has so many responses with outputs."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.numbers.get(item, ())) >= count, PATIENCE_S)
