"""MLflow: a version's directory with `MLmodel`, by its flavour `python_function` and its signature.

A column of a signature is an input of one element for each row; a tensor is an input of its own shape. MLflow executes
the code of such a model, and may unpickle it.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.frameworks.base import datatype_of, taken
from qinfer.backends.python_host.messages import DeclaredTensor, LoadFramework
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed
from qinfer.tensors import numpy_dtype

UNNAMED_INPUT, UNNAMED_OUTPUT = "input__0", "output__0"
_COLUMNS = {
    "boolean": "BOOL", "integer": "INT32", "long": "INT64", "float": "FP32", "double": "FP64", "string": "BYTES",
    "binary": "BYTES",
}  # fmt: skip


def load(asked: LoadFramework) -> "PyfuncModel":
    """Loads a version's model."""
    return load_uri(str(Path(asked.path).parent))


def load_uri(uri: str) -> "PyfuncModel":
    """Loads the flavour `python_function` of a directory, or of a URI that MLflow resolves."""
    import mlflow.pyfunc

    try:
        model = mlflow.pyfunc.load_model(uri)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the model's own code
        raise ModelLoadFailed(f"MLflow can't load the model: {type(error).__name__}: {error}") from error
    signature = model.metadata.signature
    if signature is None or signature.inputs is None or signature.outputs is None:
        raise ModelLoadFailed("the MLmodel has no signature of inputs and outputs; save the model with signature=…")
    return PyfuncModel(model, signature)


class PyfuncModel:
    """A model with its signature."""

    def __init__(self, model: Any, signature: Any) -> None:
        self._model = model
        self._is_tensors = signature.inputs.is_tensor_spec()
        self._text = {each.name for each in signature.inputs.inputs if _column(each) == "string"}
        self._is_unnamed = self._is_tensors and not signature.inputs.has_input_names()
        self.inputs: Sequence[DeclaredTensor] = [_declared(each, UNNAMED_INPUT) for each in signature.inputs.inputs]
        outputs = signature.outputs.inputs
        self.outputs: Sequence[DeclaredTensor] = [
            _declared(each, UNNAMED_OUTPUT if len(outputs) == 1 else f"output__{n}") for n, each in enumerate(outputs)
        ]

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Predicts a batch of rows."""
        given = {port.name: taken(inputs, port.name) for port in self.inputs}
        try:
            predicted = self._model.predict(self._asked(given))
        except Exception as error:  # the model's own code
            raise InferenceFailed(f"{type(error).__name__}: {error}") from error
        columns = self._columns(predicted)
        return {port.name: _shaped(columns[port.name], port) for port in self.outputs if port.name in wanted}

    def _asked(self, given: Mapping[str, Array]) -> Any:
        if self._is_tensors:
            return given[UNNAMED_INPUT] if self._is_unnamed else dict(given)
        import pandas as pd

        return pd.DataFrame({name: self._column_of(name, array.reshape(-1)) for name, array in given.items()})

    def _column_of(self, name: str, column: Array) -> Any:
        if name not in self._text:
            return column
        try:
            return [each.decode() for each in column]
        except UnicodeDecodeError:
            raise InferenceFailed(f"column '{name}' holds bytes that are not UTF-8") from None

    def _columns(self, predicted: Any) -> Mapping[str, Array]:
        """Returns the outputs by name, from any of the types that `predict` may return."""
        names = [port.name for port in self.outputs]
        if isinstance(predicted, dict) or (hasattr(predicted, "columns") and len(names) > 1):
            if missing := [name for name in names if name not in predicted]:
                raise InferenceFailed(f"the model returned no output '{missing[0]}'")
            return {name: np.asarray(predicted[name]) for name in names}
        array = np.asarray(predicted)
        if len(names) == 1:
            return {names[0]: array}
        if array.ndim != 2 or array.shape[1] != len(names):
            raise InferenceFailed(f"the model returned shape {list(array.shape)} for the outputs {', '.join(names)}")
        return {name: array[:, position] for position, name in enumerate(names)}


def _column(spec: Any) -> str:
    kind = getattr(spec, "type", None)
    return str(getattr(kind, "name", kind)) if not hasattr(spec, "shape") else ""


def _declared(spec: Any, unnamed: str) -> DeclaredTensor:
    name = spec.name if spec.name is not None else unnamed
    if hasattr(spec, "shape"):
        return DeclaredTensor(str(name), datatype_of(str(name), spec.type), tuple(int(d) for d in spec.shape))
    if _column(spec) not in _COLUMNS:
        raise ModelLoadFailed(f"column '{name}' has the type {spec.type}, which no tensor can carry")
    return DeclaredTensor(str(name), _COLUMNS[_column(spec)], (-1, 1))


def _shaped(array: Array, port: DeclaredTensor) -> Array:
    made: Array = array.astype(numpy_dtype(port.datatype), copy=False)
    return made.reshape(-1, 1) if port.dims == (-1, 1) else made
