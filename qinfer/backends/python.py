"""The `python` backend: Triton's `model.py`, each instance in a process of its own.

A crash of the model's code fails one batch, which the worker bisects: only the request that crashes the model alone
gets the error. A decoupled model's open streams end with an error.
https://github.com/triton-inference-server/python_backend
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec

from qinfer.backends.base import Batch, Context, ManagesModels, MemoryLost, cut_rows, item_shapes
from qinfer.backends.python_host.channel import INLINE_BYTES, Buffer, UnreadError, raw
from qinfer.backends.python_host.errors import to_qinfer
from qinfer.backends.python_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    CancelledAnswer,
    Close,
    Complete,
    CompletedConfig,
    EnvironmentReady,
    Execute,
    ExecutedAnswers,
    ExecutedRows,
    HostAnswer,
    HostCall,
    HostFailure,
    HostRequest,
    IsCancelled,
    LoadModel,
    Manage,
    Message,
    ModelLoaded,
    More,
    TensorMeta,
)
from qinfer.backends.python_host.process import HostInstance, HostProcess
from qinfer.backends.python_host.readiness import ReadinessProbe
from qinfer.backends.python_host.streams import Calls, HostStreams, Managing, failed_text, send, tensors
from qinfer.core.messages import InferRequest
from qinfer.errors import InferenceFailed, ModelLoadFailed, ModelNotReady, SequenceLost
from qinfer.models.config.message import ModelConfig, from_json, to_json
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.host import MemoryUse
from qinfer.tensors import Bytes, from_numpy

ENVIRONMENT = "EXECUTION_ENV_PATH"
"""Triton's parameter for a model's own environment."""

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
"""Prefixes a path within the model's directory."""

TRIES = 5
"""The number of deaths before a batch after which its requests fail as retryable."""

M = TypeVar("M", bound=Message)
_NO_REMEDIES: Mapping[str, str] = {}
COMPLETE_S = 120.0
"""Limits importing the model and `auto_complete_config`."""

PREPARE_S = 3600.0
"""Limits unpacking the model's environment."""

TOO_LONG = "the load of model '{}' lasted longer than its limit of {:g} s (qinfer.load_timeout_s)"


class HostedModel(NamedTuple):
    """A model as its process gets it.

    Attributes:
        message: The command that loads it; the backend adds the arguments about model and instance.
        environment: The model's own environment.
        variables: Environment variables of the process.
    """

    message: LoadModel
    environment: Path | None = None
    variables: Mapping[str, str] = MappingProxyType({})


def model_file_of(spec: ModelSpec, version_dir: Path, device: Device) -> HostedModel:
    """Returns a `model.py` as its process gets it."""
    del device
    check_model(spec.name, version_dir, spec.filename)
    environment = environment_of(spec.name, spec.parameters.get(ENVIRONMENT, ""), version_dir)
    return HostedModel(LoadModel(str(version_dir), spec.filename or "model.py", {}), environment)


class PythonBackend:
    """Runs `model.py` in a process; `models` loads models for its code.

    `host` describes a model that is not a `model.py`.
    """

    short_on_loop = False

    def __init__(
        self,
        models: ManagesModels | None = None,
        host: Callable[[ModelSpec, Path, Device], HostedModel] = model_file_of,
    ) -> None:
        self._models = models
        self._host = host
        # The watchdog reads these during the load.
        self._probe: ReadinessProbe | None = None
        self._interrupt: Callable[[], bool] = lambda: False
        self._instance_name = ""
        self._is_decoupled = self._is_stateful = self._keeps_state = False
        self._longest_s = 0.0
        self._memory: HostProcess | None = None
        self._streams: HostStreams | None = None
        self._numbers = count(1)

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Starts the process and initialises the model."""
        hosted = self._host(spec, version_dir, device)
        self._is_decoupled = spec.decoupled
        self._is_stateful = spec.is_stateful
        self._keeps_state = spec.sequences is not None
        self._longest_s = spec.max_timeout_s
        self._instance_name = _names.allocate(spec, device)
        args = {
            "model_config": spec.config_json,
            "model_instance_kind": device.kind.upper(),
            "model_instance_name": self._instance_name,
            "model_instance_device_id": str(device.number),
            "model_repository": str(version_dir.parent),
            "model_version": version_dir.name,
            "model_name": spec.name,
        }
        message = msgspec.structs.replace(hosted.message, args={**args, **hosted.message.args})

        def initialise(process: HostProcess) -> None:
            has_loaded = ask(process, message, ModelLoaded, spec.name, self._managing)
            if has_loaded.has_is_ready:
                probe = ReadinessProbe(process.asks, lambda: self._instance.is_busy, self.unready())
                probe.first()
                self._probe = probe

        try:
            self._start(spec, version_dir, hosted.environment, initialise, hosted.variables)
        except BaseException:
            _names.release(self._instance_name)
            raise

    def _start(
        self,
        spec: ModelSpec,
        version_dir: Path,
        environment: Path | None,
        initialise: Callable[[HostProcess], None],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Starts the process, which `initialise` loads, now and after a death."""
        self._model = spec.name
        self._datatypes = {i.name: i.datatype for i in spec.file_inputs}
        self._ragged = frozenset(i.name for i in spec.inputs if i.ragged)
        self._managing = Managing(self._models, spec.name)
        too_long = TOO_LONG.format(spec.name, spec.load_timeout_s)

        def load(process: HostProcess) -> None:
            with killed_after(spec.load_timeout_s or math.inf, process, too_long):
                prepare(process, spec.name)
                initialise(process)

        self._instance = HostInstance(spec.name, version_dir.name, load, environment, variables)
        limit_s = min(spec.warmup_timeout_s or math.inf, spec.execute_timeout_s or math.inf)
        self._interrupt = partial(self._instance.interrupt, limit_s)
        self._instance.start()

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Sends the batch and passes answers on."""
        metas, buffers = self._inputs(batch)
        requests = batch.requests
        are_alike = not self._is_decoupled and _are_alike(requests)
        asked = [_asked(request) for request in (requests[:1] if are_alike else requests)]
        shapes = {
            position: item_shapes(batch, name) for position, name in enumerate(batch.inputs) if name in self._ragged
        }
        message = Execute(
            next(self._numbers),
            metas,
            list(batch.rows),
            [each.id for each in requests],
            asked,
            ctx.window_bytes,
            shapes,
        )
        answered = self._answered(message, buffers, ctx)
        if answered is None:
            return
        outcome, data = answered
        if isinstance(outcome, ExecutedRows):
            columns = [cut_rows(tensor, outcome.rows) for tensor in tensors(outcome.outputs, data)]
            for item, outputs in enumerate(zip(*columns, strict=True)):
                ctx.respond(item, outputs)
            return
        if not isinstance(outcome, ExecutedAnswers):
            raise InferenceFailed(f"the process of model '{self._model}' answered with {type(outcome).__name__}")
        if not self._is_decoupled:
            self._respond(ctx, outcome.answers, data)
            return
        for item, answer in enumerate(outcome.answers):
            if answer.rescheduled:
                ctx.reschedule(item)

    def room(self, sizes: Sequence[int]) -> Sequence[Buffer] | None:
        """Returns memory of the process for large inputs."""
        process = self._instance.running
        if process is None or sum(sizes) <= INLINE_BYTES:
            return None
        try:
            return process.channel.reserve(sizes)
        except MemoryError:
            return None

    def interrupt(self) -> bool:
        """Ends the process if its batch is overdue."""
        return self._interrupt()

    def unready(self) -> str:
        """Returns why the model's `is_ready` says no, or ""."""
        return "" if self._probe is None else self._probe.poll_answer()

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the resident memory of the host process and its descendants."""
        return self._instance.memory()

    def metrics(self) -> Sequence[ModelSeries]:
        """Returns the model's own metrics."""
        return self._instance.metrics()

    def unload(self) -> None:
        """Lets open streams end, and ends the process."""
        if self._streams is not None:
            self._streams.drain(self._longest_s)
        self._instance.stop()
        _names.release(self._instance_name)

    def _inputs(self, batch: Batch) -> tuple[list[TensorMeta], list[Bytes]]:
        metas, buffers = [], []
        for name, array in batch.inputs.items():
            datatype = self._datatypes.get(name, "")
            metas.append(TensorMeta(name, datatype, array.shape))
            buffers.append(from_numpy(name, array).data if array.dtype.kind == "O" else raw(array))
        return metas, buffers

    def _answered(
        self, message: Execute, buffers: Sequence[Bytes], ctx: Context
    ) -> tuple[Message, list[Buffer]] | None:
        """Returns the outcome of a batch, unless it failed; `None` if the requests have an error."""
        executed = self._executed(message, buffers, ctx)
        if executed is None:
            # Bisecting would not help.
            error = ModelNotReady(f"model '{self._model}' can't be started again: {self._instance.reason}")
            for item in range(len(message.ids)):
                ctx.respond(item, error)
            return None
        self._instance.well()
        outcome, _ = executed
        if isinstance(outcome, HostFailure):
            raise InferenceFailed(failed_text(self._model, outcome))
        return executed

    def _executed(
        self, message: Execute, buffers: Sequence[Bytes], ctx: Context
    ) -> tuple[Message, list[Buffer]] | None:
        """Returns the process's outcome of a batch; `None` if there is no process."""
        for _ in range(TRIES):
            process = self._instance.process()
            if process is None:
                return None
            memory, self._memory = self._memory, None
            if memory is not None and memory is not process:
                raise MemoryLost(self._lost_text(memory.death()))
            try:
                outcome: tuple[Message, list[Buffer]]
                if self._is_decoupled:
                    outcome = self._streams_of(process).execute(message, buffers, ctx), []
                else:
                    outcome = self._outcome(process, message, buffers, ctx)
                self._memory = process if memory is not None or self._leaves_state(outcome[0]) else None
                return outcome
            except (OSError, UnreadError):  # it died while idle: this batch is not to blame
                how = process.death() if self._keeps_state else ""
                self._instance.lost(process)
                if self._keeps_state:
                    raise MemoryLost(self._lost_text(how)) from None
            except EOFError:
                how = process.death()
                self._instance.lost(process)
                if self._keeps_state:
                    raise SequenceLost(self._lost_text(how)) from None
                raise InferenceFailed(f"the process of model '{self._model}' died ({how})") from None
        return None

    def _leaves_state(self, outcome: Message) -> bool:
        return self._is_stateful or (
            self._keeps_state
            and isinstance(outcome, ExecutedAnswers)
            and any(answer.rescheduled for answer in outcome.answers)
        )

    def _lost_text(self, how: str) -> str:
        return f"the process of model '{self._model}' died ({how}) with the state in its memory"

    def _streams_of(self, process: HostProcess) -> HostStreams:
        if self._streams is None or self._streams.process is not process:
            self._streams = HostStreams(process, self._instance, self._managing, self._model)
        return self._streams

    def _outcome(
        self, process: HostProcess, batch: Execute, inputs: Sequence[Bytes], ctx: Context
    ) -> tuple[Message, list[Buffer]]:
        """Serves the model's calls until the batch has ended.

        Raises `OSError` or `UnreadError` if the process has not seen the batch, `EOFError` if it died later.
        """
        self._instance.begins()  # before it can hang
        number = batch.number
        calls: Calls | None = None
        process.held = lambda: batch.ids
        try:
            process.channel.send(batch, inputs)
            message, buffers = process.channel.receive()
            while True:
                if isinstance(message, HostCall | More | Close):
                    calls = calls or Calls(process.channel, self._model)
                    is_current = isinstance(message, HostCall) and message.batch == number
                    calls.hear(message, buffers, ctx if is_current else None)
                elif isinstance(message, Manage):
                    self._managing.hear(process.channel, message, buffers)
                elif isinstance(message, IsCancelled):
                    cancelled = message.batch != number or ctx.cancelled(message.item)
                    send(process.channel, CancelledAnswer(message.number, cancelled))
                else:
                    process.held = list
                    return message, buffers
                try:
                    message, buffers = process.channel.receive()
                except UnreadError:  # it was a reply of the above
                    raise EOFError from None
        finally:
            self._instance.is_busy = False
            if calls is not None:
                calls.end_streams()

    def _respond(self, ctx: Context, answers: Sequence[HostAnswer], data: Sequence[Buffer]) -> None:
        position = 0
        for item, answer in enumerate(answers):
            if answer.rescheduled:
                ctx.reschedule(item)
                continue
            if answer.error is not None:
                ctx.respond(item, to_qinfer(answer.error, answer.code))
                continue
            outputs = tensors(answer.outputs, data[position : position + len(answer.outputs)])
            position += len(answer.outputs)
            ctx.respond(item, outputs, parameters=answer.parameters or None)


def check_model(model: str, version_dir: Path, filename: str) -> None:
    """Raises `ModelLoadFailed` if a model's file is missing."""
    path = version_dir / (filename or "model.py")
    if not path.is_file():
        raise ModelLoadFailed(f"model '{model}' has no file '{path.name}' in version {version_dir.name}")
    if path.suffix != ".py":
        raise ModelLoadFailed(f"model '{model}': Model name must end with '.py'. Model name is \"{path.name}\".")


def environment_of(model: str, parameter: str, version_dir: Path) -> Path | None:
    """Returns a model's own environment: archive or directory."""
    if not parameter:
        return None
    inner = parameter.removeprefix(f"{MODEL_DIRECTORY}/")
    path = version_dir.parent.absolute() / inner if inner != parameter else Path(parameter)
    if inner != parameter and (inner.startswith("/") or ".." in Path(inner).parts):
        raise ModelLoadFailed(f"model '{model}': {ENVIRONMENT} '{parameter}' leads out of the model's directory")
    if not path.is_absolute():
        raise ModelLoadFailed(
            f"model '{model}': {ENVIRONMENT} '{parameter}' is neither an absolute path on the worker's machine nor one "
            f"in the model's directory, such as {MODEL_DIRECTORY}/env.tar.gz"
        )
    if not path.exists():
        raise ModelLoadFailed(f"model '{model}': {ENVIRONMENT} '{parameter}' is not there")
    return path


def prepare(process: HostProcess, model: str) -> None:
    """Waits until a process is in its environment."""
    if process.environment is not None:
        ask(process, None, EnvironmentReady, model)


def ask(
    process: HostProcess,
    message: Message | None,
    expected: type[M],
    model: str,
    managing: Managing | None = None,
    remedies: Mapping[str, str] = _NO_REMEDIES,
) -> M:
    """Sends a command to a process; returns the reply. `remedies`: missing module → the command that installs it."""
    try:
        if message is not None:
            process.channel.send(message)
        answer, buffers = process.channel.receive()
        while managing is not None and isinstance(answer, Manage):
            managing.hear(process.channel, answer, buffers)
            answer, buffers = process.channel.receive()
    except (OSError, EOFError):
        raise ModelLoadFailed(f"the process of model '{model}' died while it was loaded ({process.death()})") from None
    if isinstance(answer, expected):
        return answer
    text = answer.message if isinstance(answer, HostFailure) else f"unexpected {type(answer).__name__}"
    hint = ""
    if isinstance(answer, HostFailure) and answer.missing:
        where = "the worker's environment" if process.environment is None else f"its environment ({ENVIRONMENT})"
        hint = f"; install what provides '{answer.missing}' in {where}"
        if remedy := remedies.get(answer.missing.partition(".")[0]):
            hint += f": {remedy}"
    raise ModelLoadFailed(f"model '{model}' failed to load: {text}{hint}")


@contextmanager
def killed_after(timeout_s: float, process: HostProcess, text: str) -> Iterator[None]:
    """Kills a process at a time limit; the failure gets this text."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ModelLoadFailed:
        if is_late.is_set():
            raise ModelLoadFailed(text) from None
        raise
    finally:
        timer.cancel()


def _asked(request: InferRequest) -> HostRequest:
    sequence = request.sequence
    flags = 0
    if sequence is not None:
        flags = SEQUENCE_START * sequence.start | SEQUENCE_END * sequence.end
    return HostRequest(
        request.client_id,
        request.outputs,
        request.parameters,
        int(request.timeout_s * 1e6),
        request.trace,
        0 if sequence is None else sequence.id,
        flags,
    )


def _are_alike(requests: Sequence[InferRequest]) -> bool:
    outputs, timeout_s = requests[0].outputs, requests[0].timeout_s
    return not [
        True
        for each in requests
        if each.outputs != outputs
        or each.timeout_s != timeout_s
        or each.client_id
        or each.trace
        or each.parameters
        or each.sequence is not None
    ]


class _Names:
    """The names of instances: the name of the instance group, or else of the model, and the lowest unused number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def allocate(self, spec: ModelSpec, device: Device) -> str:
        group = next((g.name for g in spec.instances if g.device == device and g.name), spec.name)
        with self._lock:
            name = next(name for n in count() if (name := f"{group}_{n}") not in self._taken)
            self._taken.add(name)
        return name

    def release(self, name: str) -> None:
        with self._lock:
            self._taken.discard(name)


_names = _Names()


def complete_config(config: ModelConfig, version_dir: Path, timeout_s: float = COMPLETE_S) -> ModelConfig:
    """Completes a configuration by `auto_complete_config`; blocking."""
    model = config.name or version_dir.parent.name
    named = ModelConfig()
    named.CopyFrom(config)
    named.name = model
    filename = config.default_model_filename or "model.py"
    environment = config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in config.parameters else ""
    check_model(model, version_dir, filename)
    too_long = f"auto_complete_config of model '{model}' took more than {timeout_s:g} s; write its config.pbtxt"
    process = HostProcess(model, version_dir.name, environment=environment_of(model, environment, version_dir))
    try:
        with killed_after(
            PREPARE_S, process, f"unpacking the environment of model '{model}' took more than {PREPARE_S:g} s"
        ):
            prepare(process, model)
        with killed_after(timeout_s, process, too_long):
            answer = ask(process, Complete(str(version_dir), filename, to_json(named)), CompletedConfig, model)
    finally:
        process.kill()
    completed = from_json(answer.config)
    if not config.name:
        completed.name = ""
    return completed
