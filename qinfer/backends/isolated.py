"""The backends of `frameworks/`: each instance in a process of its own, as those of the backend `python`.

No program of qinfer imports a framework. The process loads the file, says which tensors it has, and executes batches;
crashes, time limits, memory, restarts, shared memory and log lines are those of `PythonBackend`.
"""

from collections.abc import Sequence
from pathlib import Path

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.backends.parameters import compare, cores_each, model_file
from qinfer.backends.python import COMPLETE_S, ENVIRONMENT, PythonBackend, ask, environment_of, killed_after, prepare
from qinfer.backends.python_host.messages import (
    DeclaredTensor,
    Execute,
    ExecutedRows,
    FrameworkLoaded,
    HostRequest,
    LoadFramework,
    TensorMeta,
)
from qinfer.backends.python_host.process import HostProcess
from qinfer.backends.python_host.streams import tensors
from qinfer.errors import InferenceFailed, ModelLoadFailed
from qinfer.models.config.config import FILES_OF, complete
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.config.message import ModelConfig
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.tensors import to_numpy

PACKAGES = {
    "tensorflow": ("tensorflow",),
    "litert": ("ai_edge_litert",),
    "forest": ("treelite",),
    "jax": ("jax", "jaxlib"),
    "mlflow": ("mlflow", "pandas"),
}
"""Framework → the packages that its adapter imports."""


class FrameworkBackend(PythonBackend):
    """Runs the models of one framework."""

    def __init__(self, framework: str) -> None:
        super().__init__()
        self._framework = framework

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Starts the process, loads the model, and compares it with its configuration."""
        if device.kind != "cpu":
            raise ModelLoadFailed(
                f"model '{spec.name}' is for GPU {device.number}, where backend '{self._framework}' can't run; "
                "set the instance group's kind to KIND_CPU"
            )
        self._names = [output.name for output in spec.outputs]
        self._output_types = {output.name: output.datatype for output in spec.file_outputs}
        batched = spec.max_batch_size > 0
        message = LoadFramework(
            self._framework,
            spec.name,
            str(model_file(spec, version_dir, *FILES_OF[self._framework])),
            spec.parameters,
            cores_each(spec),
            [TensorMeta(i.name, i.datatype, i.file_shape(batched=batched)) for i in spec.file_inputs],
            [TensorMeta(o.name, o.datatype, o.file_shape(batched=batched)) for o in spec.file_outputs],
            spec.max_batch_size,
            spec.graph_level,
        )

        def initialise(process: HostProcess) -> None:
            found = _loaded(process, message)
            _compare(spec, "input", spec.file_inputs, found.inputs)
            _compare(spec, "output", spec.file_outputs, found.outputs)

        environment = environment_of(spec.name, spec.parameters.get(ENVIRONMENT, ""), version_dir)
        self._start(spec, version_dir, environment, initialise)

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Sends the batch, and cuts the outputs by its rows."""
        metas, buffers = self._inputs(batch)
        asked = HostRequest("", self._wanted(batch), {}, 0, "")
        ids = [request.id for request in batch.requests]
        answered = self._answered(Execute(next(self._numbers), metas, list(batch.rows), ids, [asked]), buffers, ctx)
        if answered is None:
            return
        outcome, data = answered
        if not isinstance(outcome, ExecutedRows):
            raise InferenceFailed(f"the process of model '{self._model}' answered with {type(outcome).__name__}")
        arrays = {tensor.name: to_numpy(tensor) for tensor in tensors(outcome.outputs, data)}
        respond_rows(batch, ctx, arrays, self._output_types, names=self._names)

    def _wanted(self, batch: Batch) -> tuple[str, ...]:
        wanted = {name for request in batch.requests for name in (request.outputs or self._names)}
        return tuple(name for name in self._output_types if name in wanted or name in batch.states)


def _loaded(process: HostProcess, message: LoadFramework) -> FrameworkLoaded:
    """Has a process load a file; a missing framework's error names the extra."""
    remedy = f"pip install 'qinfer-ml[{message.framework}]'"
    remedies = dict.fromkeys(PACKAGES[message.framework], remedy)
    return ask(process, message, FrameworkLoaded, message.model, remedies=remedies)


def _compare(spec: ModelSpec, kind: str, configured: Sequence[TensorSpec], ports: Sequence[DeclaredTensor]) -> None:
    if kind == "input" and (missing := {p.name for p in ports} - {c.name for c in configured}):
        raise ModelLoadFailed(f"model '{spec.name}' needs inputs that its configuration lacks: {sorted(missing)}")
    by_name = {port.name: port for port in ports}
    for tensor in configured:
        port = by_name.get(tensor.name)
        if port is not None and tensor.datatype in port.others:
            by_name[tensor.name] = DeclaredTensor(port.name, tensor.datatype, port.dims)
        compare(spec, kind, tensor, {name: (each.datatype, each.dims) for name, each in by_name.items()})


def complete_config(
    framework: str, config: ModelConfig, version_dir: Path, timeout_s: float = COMPLETE_S
) -> ModelConfig:
    """Completes a configuration by the file's tensors, which a process reads; blocking."""
    completed = ModelConfig()
    completed.CopyFrom(config)
    completed.name = model = config.name or version_dir.parent.name
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    path = version_dir / (config.default_model_filename or FILES_OF[framework][0])
    if not path.exists():
        raise ModelLoadFailed(f"model '{model}' has no file '{path.name}' in version {version_dir.name}")
    message = LoadFramework(framework, model, str(path), parameters, threads=1, max_batch_size=config.max_batch_size)
    too_long = f"reading model '{model}' took more than {timeout_s:g} s; write 'input' and 'output' into config.pbtxt"
    environment = environment_of(model, parameters.get(ENVIRONMENT, ""), version_dir)
    process = HostProcess(model, version_dir.name, environment=environment)
    try:
        prepare(process, model)
        with killed_after(timeout_s, process, too_long):
            found = _loaded(process, message)
    finally:
        process.kill()
    complete(completed, FileTensors(inputs=_file_tensors(found.inputs), outputs=_file_tensors(found.outputs)))
    completed.name = config.name
    return completed


def _file_tensors(ports: Sequence[DeclaredTensor]) -> tuple[FileTensor, ...]:
    return tuple(FileTensor(name=port.name, datatype=port.datatype, dims=port.dims) for port in ports)
