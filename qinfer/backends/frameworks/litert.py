"""LiteRT (TensorFlow Lite): a `.tflite` file, by one of its signatures, or by its tensors if it has no signature.

Parameters: `signature`; `num_threads`; `use_xnnpack` (`true`); `delegate`, a library that the dynamic loader finds, and
`delegate_options` (`key:value,key:value`). A fixed first dimension is resized to the rows of a batch if
`max_batch_size` is set. A quantised tensor may be FP32 in the configuration; then it is converted here:
real = scale * (value - zero point) (ai.google.dev/edge/litert/conversion/tensorflow/quantization).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType, load_delegate

from qinfer.backends.frameworks.base import datatype_of, flag, number, taken
from qinfer.backends.python_host.messages import DeclaredTensor, LoadFramework
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed

_DEFAULT_SIGNATURE = "serving_default"


def load(asked: LoadFramework) -> "TfliteModel":
    """Loads a `.tflite` file."""
    resolver = OpResolverType.BUILTIN if flag(asked, "use_xnnpack", default=True) else _WITHOUT_XNNPACK
    try:
        interpreter = Interpreter(
            asked.path,
            num_threads=number(asked, "num_threads", asked.threads),
            experimental_delegates=_delegates(asked),
            experimental_op_resolver_type=resolver,
        )
    except (ValueError, RuntimeError) as error:
        raise ModelLoadFailed(f"LiteRT can't load the model: {_on_one_line(error)}") from error
    model = TfliteModel(interpreter, _subgraph(asked, interpreter), asked)
    model.try_rows(asked.max_batch_size)
    return model


_WITHOUT_XNNPACK = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES


def _delegates(asked: LoadFramework) -> list[Any] | None:
    library = asked.parameters.get("delegate")
    if not library:
        return None
    pairs = [pair.partition(":") for pair in asked.parameters.get("delegate_options", "").split(",") if pair.strip()]
    try:
        return [load_delegate(library, {key.strip(): value.strip() for key, _, value in pairs})]
    except (ValueError, OSError) as error:
        raise ModelLoadFailed(
            f"delegate '{library}' can't be used: {_on_one_line(error)}; install it on the worker's machine, or remove "
            "the parameter 'delegate'"
        ) from error


class _Details:
    """Name → LiteRT's description of each input and output, and the function that executes them."""

    def __init__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], runner: Any) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.runner = runner


def _subgraph(asked: LoadFramework, interpreter: Any) -> _Details:
    signatures = interpreter.get_signature_list()
    wanted = asked.parameters.get("signature", "")
    if not signatures and not wanted:
        inputs = {each["name"]: each for each in interpreter.get_input_details()}
        outputs = {each["name"]: each for each in interpreter.get_output_details()}
        return _Details(inputs, outputs, None)
    name = wanted or (_DEFAULT_SIGNATURE if _DEFAULT_SIGNATURE in signatures else next(iter(signatures)))
    if name not in signatures:
        has = ", ".join(sorted(signatures)) or "no signatures"
        raise ModelLoadFailed(f"parameter 'signature' is '{name}'; the model has {has}")
    runner = interpreter.get_signature_runner(name)
    return _Details(runner.get_input_details(), runner.get_output_details(), runner)


class TfliteModel:
    """One subgraph of a `.tflite` file."""

    def __init__(self, interpreter: Any, details: _Details, asked: LoadFramework) -> None:
        self._interpreter = interpreter
        self._details = details
        self._real = {meta.name for meta in (*asked.inputs, *asked.outputs) if meta.datatype == "FP32"}
        self.inputs: Sequence[DeclaredTensor] = [_declared(*pair, asked) for pair in details.inputs.items()]
        self.outputs: Sequence[DeclaredTensor] = [
            _declared(name, each, asked) for name, each in details.outputs.items()
        ]
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def try_rows(self, rows: int) -> None:
        """Resizes a file of fixed rows to the largest batch, so that the load fails if it can't."""
        fixed = [
            name
            for name, each in self._details.inputs.items()
            if len(each["shape_signature"]) == 0 or -1 not in each["shape_signature"]
        ]
        if not rows or len(fixed) < len(self._details.inputs):
            return
        zeros = {
            name: np.zeros((rows, *each["shape"][1:]), each["dtype"]) for name, each in self._details.inputs.items()
        }
        try:
            self._invoke(zeros)
        except InferenceFailed as error:
            raise ModelLoadFailed(
                f"the file's first dimension can't be resized to max_batch_size {rows} ({error.message}); set "
                "max_batch_size to 0, and give the full dims"
            ) from error

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Runs the subgraph."""
        given = {name: self._stored(name, each, inputs) for name, each in self._details.inputs.items()}
        outputs = self._invoke(given)
        return {name: self._shown(name, array) for name, array in outputs.items() if name in wanted}

    def _invoke(self, given: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            if self._details.runner is not None:
                outputs: Mapping[str, Array] = self._details.runner(**given)
                return outputs
            return self._invoked(given)
        except (ValueError, RuntimeError) as error:
            self._shapes = {}
            raise InferenceFailed(f"LiteRT error: {_on_one_line(error)}") from error

    def _invoked(self, given: Mapping[str, Array]) -> Mapping[str, Array]:
        interpreter, details = self._interpreter, self._details
        shapes = {name: array.shape for name, array in given.items()}
        if shapes != self._shapes:
            for name, shape in shapes.items():
                interpreter.resize_tensor_input(details.inputs[name]["index"], shape)
            interpreter.allocate_tensors()
            self._shapes = shapes
        for name, array in given.items():
            interpreter.set_tensor(details.inputs[name]["index"], array)
        interpreter.invoke()
        return {name: interpreter.get_tensor(each["index"]) for name, each in details.outputs.items()}

    def _stored(self, name: str, details: Any, inputs: Mapping[str, Array]) -> Array:
        array = taken(inputs, name)
        if array.dtype == object:
            return array.astype(np.bytes_)
        if name not in self._real or not _is_quantised(details):
            return array
        scale, zero = details["quantization"]
        bounds = np.iinfo(details["dtype"])
        stored: Array = np.clip(np.rint(array / scale) + zero, bounds.min, bounds.max).astype(details["dtype"])
        return stored

    def _shown(self, name: str, array: Array) -> Array:
        details = self._details.outputs[name]
        if name not in self._real or not _is_quantised(details):
            return array
        scale, zero = details["quantization"]
        real: Array = (array.astype(np.float32) - zero) * np.float32(scale)
        return real


def _is_quantised(details: Any) -> bool:
    return bool(details["quantization"][0]) and np.dtype(details["dtype"]).kind in "iu"


def _declared(name: str, details: Any, asked: LoadFramework) -> DeclaredTensor:
    signature = details["shape_signature"]
    dims = tuple(int(d) for d in (signature if len(signature) else details["shape"]))
    if asked.max_batch_size and dims and -1 not in dims:
        dims = (-1, *dims[1:])  # by resizing
    return DeclaredTensor(name, datatype_of(name, details["dtype"]), dims, ("FP32",) if _is_quantised(details) else ())


def _on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
