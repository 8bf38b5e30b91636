"""Models of frameworks in one line: `iris = qinfer.from_sklearn(estimator)` is a class with `@qinfer.model`.

The framework says the names, types and shapes of inputs and outputs, which become the hints of `predict`. An app is
imported again in each process of a model, so that the model is the object that the app makes there; nothing is pickled.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict, Unpack

import numpy as np

from qinfer.errors import ModelLoadFailed
from qinfer.functions.declare import model
from qinfer.functions.hints import HintError
from qinfer.functions.values import Array
from qinfer.models.spec import Device
from qinfer.tensors import NUMPY_DATATYPES

Values = Mapping[str, Any]
"""Name of an input or output → its batch: an array, or a list of texts or images."""

Port = tuple[str, Sequence[int]]
"""Datatype, or `IMAGE`, and dimensions; the first is the batch, and -1 is variable."""

_TYPED_DICT: Any = TypedDict
_argument = partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
_INSTEAD = "write a function with @qinfer.model that calls it"


class FrameworkOptions(TypedDict, total=False):
    """The options of `@qinfer.model`; a model without a `name` has that of its variable in the app."""

    name: str
    max_batch_size: int
    max_delay_ms: float
    timeout_s: float
    instances: int


class FrameworkModel:
    """A model of a framework's object; the signature of `predict` shows its inputs and outputs."""

    is_named: ClassVar[bool] = False
    predict: ClassVar[Callable[..., dict[str, Any]]]


def from_sklearn(
    estimator: Any, *, example: Any = None, method: str | Sequence[str] = "", **options: Unpack[FrameworkOptions]
) -> type[FrameworkModel]:
    """Makes a model of a fitted estimator of scikit-learn, or of a library with the same methods.

    Each output has the name of its method, and the type of its result for the example.

    Args:
        estimator: The estimator. If it was fitted with an array, its input is `x`: `float64[batch, features]`, or as
            the example.
        example: Some rows as the estimator takes them. A table is needed if it was fitted with one; then each column is
            an input. A list of texts makes the input `text`.
        method: One method or several, such as `predict_proba`; by default `predict`, or `transform` without it.
        **options: The options of `@qinfer.model`.

    Raises:
        HintError: The estimator is not fitted, lacks the method, does not run on the example, or needs one.
    """
    maker = _Maker("from_sklearn", type(estimator).__name__, options)
    default = "predict" if hasattr(estimator, "predict") else "transform"
    methods = [method or default] if isinstance(method, str) else list(method)
    for name in methods:
        if not callable(getattr(estimator, name, None)):
            raise maker.error(f"it has no method '{name}'; give method=…, the name of one")
    rows = _ones(maker, estimator) if example is None else example
    inputs, rows_of = _table(maker, rows)

    def results(table: Any) -> Values:
        return {name: getattr(estimator, name)(table) for name in methods}

    try:
        found = results(rows)
    except Exception as error:  # the estimator's own code
        raise maker.error(f"it does not run on the example; fit it, and give example=X[:2]: {error}") from error
    if lists := [name for name, result in found.items() if isinstance(result, list)]:
        raise maker.error(f"'{lists[0]}' returns a list of arrays, one for each target; {_INSTEAD}")
    outputs = {name: maker.port(name, each, len(rows)) for name, each in found.items()}
    return maker.made(inputs, outputs, lambda given: results(rows_of(given)))


def from_torch(
    module: Any, *examples: Any, output: str | Sequence[str] = "output", **options: Unpack[FrameworkOptions]
) -> type[FrameworkModel]:
    """Makes a model of a module of PyTorch, which gets whole batches, in evaluation mode and without gradients.

    The arguments of `forward` name the inputs; a dict or a named tuple names the outputs. On a GPU, the module is moved
    to that of the instance. BF16 is FP32 outside.

    Args:
        module: The module; the first dimension of its inputs and outputs is the batch.
        *examples: Arguments of the module for a batch, which fix datatypes and shapes: a tensor, a tuple of tensors, or
            a dict of them. A dimension in which two examples differ is variable.
        output: The name of the output, or of each part of a tuple.
        **options: The options of `@qinfer.model`.

    Raises:
        HintError: The module does not run on the examples, or its result has no names or is no batch of tensors.
    """
    import torch

    maker = _Maker("from_torch", type(module).__name__, options)
    if not examples:
        raise maker.error("it needs an example of its arguments for a batch, such as torch.zeros(1, 3, 224, 224)")
    calls = [_arguments(maker, module, example) for example in examples]
    dtypes = {name: tensor.dtype for name, tensor in calls[0].items()}
    place = next(iter(calls[0].values())).device
    module.eval()

    def computed(given: Values) -> Values:
        with torch.inference_mode():
            tensors = {
                name: torch.from_numpy(np.require(array, requirements=["C", "W"])).to(place, dtypes[name])
                for name, array in given.items()
            }
            result = _parts_by_name(maker, module(**tensors), output)
        for part in result.values():
            if not isinstance(part, torch.Tensor):
                what = f"its result has a {type(part).__name__} where a named tensor must be"
                raise maker.error(f"{what}; return a dict of tensors, or name a tuple's by output=('a', 'b')")
        return {name: _from_tensor(tensor) for name, tensor in result.items()}

    def setup(device: Device) -> None:
        nonlocal place
        if device.kind == "gpu":
            place = torch.device("cuda", device.number)
            module.to(place)

    batches = [{name: _from_tensor(torch.cat([each, each])) for name, each in call.items()} for call in calls]
    try:
        results = [computed(batch) for batch in batches]
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise maker.error(f"it does not run on an example repeated as a batch of two: {error}") from error
    return maker.made(maker.ports(batches, batches), maker.ports(results, batches), computed, setup)


def from_transformers(
    pipeline: Any, *, example: Sequence[Any] = (), **options: Unpack[FrameworkOptions]
) -> type[FrameworkModel]:
    """Makes a model of a pipeline of Hugging Face's Transformers that takes texts or images.

    The outputs are the members of its results, such as `label` and `score`, or `output` if it returns arrays.

    Args:
        pipeline: The pipeline, on the device that it is to use.
        example: Two or more texts or images, whose results show names and types; by default made up.
        **options: The options of `@qinfer.model`.

    Raises:
        HintError: The pipeline takes something else, or its results differ in shape from input to input.
    """
    maker = _Maker("from_transformers", str(pipeline.task), options)
    parts = [part for part in ("tokenizer", "image_processor", "feature_extractor") if getattr(pipeline, part, None)]
    if parts == ["tokenizer"]:
        name, port = "text", ("BYTES", (-1,))
        items: Sequence[Any] = example or ["a", "some more words"]
    elif parts and "tokenizer" not in parts:
        from PIL import Image

        name, port = "image", ("IMAGE", (-1,))
        items = example or [Image.new("RGB", (64, height)) for height in (64, 96)]
    else:
        raise maker.error(f"a pipeline of the task {pipeline.task} takes more than texts or images; {_INSTEAD}")

    def computed(given: Values) -> Values:
        batch = list(given[name])
        results = pipeline(batch, batch_size=len(batch))
        return _members([results] if len(batch) == 1 != len(results) else results)

    try:
        outputs = maker.ports([computed({name: [item]}) for item in items], [{name: [item]} for item in items])
    except Exception as error:  # the pipeline's own code
        raise maker.error(f"it does not run on the example; give example=[…], or {_INSTEAD}: {error}") from error
    if varied := [member for member, (_, dims) in outputs.items() if -1 in dims[1:]]:
        raise maker.error(f"'{varied[0]}' has another shape for each item; {_INSTEAD}")
    return maker.made({name: port}, outputs, computed)


def from_mlflow(uri: str | Path, **options: Unpack[FrameworkOptions]) -> type[FrameworkModel]:
    """Makes a model of an MLflow model with a signature, by its flavour `python_function`, which may unpickle it.

    Args:
        uri: `models:/name/version`, another URI that MLflow resolves, or the directory of `MLmodel`.
        **options: The options of `@qinfer.model`.

    Raises:
        HintError: MLflow is not installed, can't load the model, or finds no signature.
    """
    address = str(uri)
    title = address.removeprefix("models:/").split("/")[0] if address.startswith("models:/") else Path(address).name
    maker = _Maker("from_mlflow", title, options)
    maker.need("mlflow", "mlflow")
    from qinfer.backends.frameworks.mlflow import load_uri

    try:
        loaded = load_uri(address)
    except ModelLoadFailed as error:
        raise maker.error(error.message) from error

    def computed(given: Values) -> Values:
        arrays = {name: _as_bytes(array) if array.dtype == object else array for name, array in given.items()}
        return loaded.execute(arrays, [port.name for port in loaded.outputs])

    def ports(declared: Sequence[Any]) -> dict[str, Port]:
        return {port.name: (port.datatype, port.dims or ()) for port in declared}

    return maker.made(ports(loaded.inputs), ports(loaded.outputs), computed)


def from_onnx(path: str | Path, **options: Unpack[FrameworkOptions]) -> type[FrameworkModel]:
    """Makes a model of an ONNX file, which ONNX Runtime runs on the CPU, or on the GPU of the instance.

    Args:
        path: The file. The first dimension of each input and output is the batch, and variable.
        **options: The options of `@qinfer.model`.

    Raises:
        HintError: ONNX Runtime is not installed or can't load the file, or an input or output is no batch of tensors.
    """
    maker = _Maker("from_onnx", Path(path).stem, options)
    maker.need("onnxruntime", "onnx")
    import onnxruntime

    from qinfer.backends.onnx import ONNX_DATATYPES

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a dozen classes
        raise maker.error(f"ONNX Runtime can't load '{path}': {error}") from error

    def port(node: Any) -> Port:
        dims = [size if isinstance(size, int) else -1 for size in node.shape or ()]
        return ONNX_DATATYPES.get(node.type, node.type), dims

    def computed(given: Values) -> Values:
        return dict(zip(outputs, session.run([*outputs], given), strict=True))

    def setup(device: Device) -> None:
        nonlocal session
        if device.kind == "gpu":
            cuda = ("CUDAExecutionProvider", {"device_id": device.number})
            session = onnxruntime.InferenceSession(str(path), providers=[cuda, "CPUExecutionProvider"])

    outputs = {node.name: port(node) for node in session.get_outputs()}
    return maker.made({node.name: port(node) for node in session.get_inputs()}, outputs, computed, setup)


class _Maker:
    """Makes a model for the line of an app that calls a function of this module."""

    def __init__(self, of: str, title: str, options: FrameworkOptions) -> None:
        frame = sys._getframe(2)
        self._where = f"{frame.f_code.co_filename}:{frame.f_lineno}: {of}({title})"
        self._module = frame.f_globals.get("__name__", "")
        self._title, self._options = _identifier(title), options

    def error(self, text: str) -> HintError:
        return HintError(f"{self._where}: {text}")

    def need(self, package: str, extra: str) -> None:
        """Raises `HintError` unless a package is installed."""
        if find_spec(package) is None:
            raise self.error(f"it needs {package}; install it by: pip install 'qinfer-ml[{extra}]'")

    def port(self, name: str, sample: Any, count: int) -> Port:
        """Returns the datatype and dimensions of a batch of `count` items."""
        array = _array(sample)
        if not array.ndim or len(array) != count:
            shape = list(array.shape)
            raise self.error(f"'{name}' has shape {shape} for {count} items; the batch is its first dimension")
        datatype = "BYTES" if array.dtype.kind == "U" else NUMPY_DATATYPES.get(array.dtype)
        if datatype is None:
            raise self.error(f"'{name}' is an array of {array.dtype}, which no tensor can carry; convert it")
        return datatype, (-1, *array.shape[1:])

    def ports(self, samples: Sequence[Values], batches: Sequence[Values]) -> dict[str, Port]:
        """Returns the ports of samples as long as `batches`; dimensions in which they differ are variable."""
        counts = [len(next(iter(batch.values()))) for batch in batches]
        found: dict[str, Port] = {}
        for name in samples[0]:
            each = [self.port(name, sample[name], count) for sample, count in zip(samples, counts, strict=True)]
            if len({(datatype, len(dims)) for datatype, dims in each}) > 1:
                raise self.error(f"'{name}' has another type or rank in another example; make them equal")
            sizes = zip(*(dims for _, dims in each), strict=True)
            found[name] = each[0][0], [same[0] if len(set(same)) == 1 else -1 for same in sizes]
        return found

    def made(
        self,
        inputs: Mapping[str, Port],
        outputs: Mapping[str, Port],
        run: Callable[[Values], Values],
        setup: Callable[[Device], None] | None = None,
    ) -> type[FrameworkModel]:
        """Returns the model; inputs are named as arguments of Python, outputs as they are."""
        names = {_identifier(name): name for name in inputs}
        if len(names) < len(inputs):
            raise self.error(f"two of its inputs have one name as arguments: {', '.join(inputs)}; rename one")
        hints = {each: self._hint(name, *inputs[name]) for each, name in names.items()}
        result = _TYPED_DICT("Outputs", {name: self._hint(name, *port) for name, port in outputs.items()})
        parameters = [_argument(each, annotation=hint) for each, hint in hints.items()]
        signature = inspect.Signature([_argument("self"), *parameters], return_annotation=result)

        def predict(*args: Any, **named: Any) -> Values:
            """Returns the outputs of a batch by name."""
            given = signature.bind(*args, **named).arguments
            found = run({name: _taken(given[each], *inputs[name]) for each, name in names.items()})
            return {name: _given(found[name], dims) for name, (_, dims) in outputs.items()}

        predict.__annotations__ = {**hints, "return": result}
        predict.__signature__ = signature  # type: ignore[attr-defined]
        body: dict[str, Any] = {"__module__": self._module, "predict": predict, "is_named": "name" in self._options}
        if setup is not None:
            body["setup"] = lambda _, device: setup(device)
        found: type[FrameworkModel] = type(self._title, (FrameworkModel,), body)
        return model(**self._options)(found)

    def _hint(self, name: str, datatype: str, dims: Sequence[int]) -> Any:
        if not dims or dims[0] != -1:
            raise self.error(f"'{name}' has the shape {list(dims)}; make its first dimension variable, the batch")
        if datatype == "IMAGE":
            from PIL import Image

            return list[Image.Image]
        if datatype not in NUMPY_DATATYPES.values() and datatype != "BYTES":
            raise self.error(f"'{name}' is {datatype}, which numpy does not have; export it as another type")
        item = () if _is_scalar(dims) else dims[1:]
        return list[str] if datatype == "BYTES" and not item else Annotated[(np.ndarray, datatype, *item)]


def _ones(maker: _Maker, estimator: Any) -> Array:
    if (columns := getattr(estimator, "feature_names_in_", None)) is not None:
        raise maker.error(f"it was fitted with columns of unknown types, {', '.join(columns)}; give example=X[:2]")
    if (count := getattr(estimator, "n_features_in_", None)) is None:
        raise maker.error("it is not fitted, or does not say what features it takes; fit it, and give example=X[:2]")
    return np.ones((2, count))


def _table(maker: _Maker, rows: Any) -> tuple[dict[str, Port], Callable[[Values], Any]]:
    """Returns the inputs of an estimator by some of its rows, and the function that makes such rows of inputs."""
    if hasattr(rows, "columns"):  # a DataFrame of pandas
        kinds = rows.dtypes.to_dict()
        ports = {str(name): maker.port(str(name), rows[name], len(rows)) for name in kinds}
        return ports, lambda given: type(rows)({name: given[str(name)] for name in kinds}).astype(kinds)
    port = maker.port("x", rows, len(rows))
    if port == ("BYTES", (-1,)):
        return {"text": port}, lambda given: given["text"]
    if port[0] == "BYTES":
        raise maker.error("its example is an array of texts; give a table: pandas.DataFrame(X[:2], columns=[…])")
    return {"x": port}, lambda given: given["x"]


def _members(results: Sequence[Any]) -> Values:
    """Returns the members of a pipeline's results, each for the whole batch."""
    items = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in results]
    if all(isinstance(item, dict) for item in items):
        return {name: [item[name] for item in items] for name in items[0]}
    if all(isinstance(item, list) and item and isinstance(item[0], dict) for item in items):
        return {name: [[one[name] for one in item] for item in items] for name in items[0][0]}
    return {"output": items}


def _arguments(maker: _Maker, module: Any, example: Any) -> dict[str, Any]:
    """Returns the tensors of an example by the names of the arguments of `forward`."""
    found = example
    if not isinstance(example, Mapping):
        parts = example if isinstance(example, tuple | list) else (example,)
        parameters = inspect.signature(module.forward).parameters.values()
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        if len(names) < len(parts):
            raise maker.error("its forward names too few arguments; give the example as a dict of tensors by name")
        found = dict(zip(names, parts, strict=False))
    for name, tensor in found.items():
        if not hasattr(tensor, "dim") or not tensor.dim():
            raise maker.error(f"'{name}' of the example is no tensor with a batch dimension, such as torch.zeros(1, 3)")
    return dict(found)


def _parts_by_name(maker: _Maker, result: Any, output: str | Sequence[str]) -> Values:
    """Returns the parts of a module's result by their names."""
    if hasattr(result, "_asdict"):
        return result._asdict()  # type: ignore[no-any-return]
    if isinstance(result, Mapping):
        return result
    names = [output] if isinstance(output, str) else output
    parts = result if isinstance(result, tuple | list) and not isinstance(output, str) else [result]
    if len(parts) != len(names):
        raise maker.error(f"its result has {len(parts)} parts, and output={output!r} names {len(names)}")
    return dict(zip(names, parts, strict=True))


def _from_tensor(tensor: Any) -> Array:
    host = tensor.detach().cpu()
    return np.asarray(host.float() if "bfloat16" in str(host.dtype) else host)


def _array(values: Any) -> Array:
    """Returns an array, of type `str` if its elements are texts."""
    array = np.asarray(values.toarray() if hasattr(values, "toarray") else values)  # a sparse matrix
    array = np.array(array.tolist()) if array.dtype == object else array
    return np.strings.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _is_scalar(dims: Sequence[int]) -> bool:
    return set(dims[1:]) <= {1}


def _taken(values: Any, datatype: str, dims: Sequence[int]) -> Any:
    """Returns an input as the framework takes it: an array of these dimensions; texts are `str` in an object array."""
    if datatype == "IMAGE":
        return values
    array = np.array(values, object) if isinstance(values, list) else np.asarray(values)
    array = _array(array).astype(object) if array.dtype == object and array.ndim > 1 else array
    return array.reshape(len(array), *dims[1:]) if _is_scalar(dims) else array


def _given(values: Any, dims: Sequence[int]) -> Any:
    """Returns an output as its hint says: items of one element are scalars, and a batch of texts is a list."""
    array = _array(values)
    array = array.reshape(len(array)) if _is_scalar(dims) else array
    if array.dtype.kind != "U":
        return array
    return array.tolist() if array.ndim == 1 else array.astype(object)


def _as_bytes(texts: Array) -> Array:
    return np.array([str(each).encode() for each in texts.ravel()], object).reshape(texts.shape)


def _identifier(name: str) -> str:
    """Returns a name as one of Python: `sepal length (cm)` → `sepal_length_cm`."""
    found = re.sub(r"\W+", "_", name).strip("_") or "input"
    return f"_{found}" if found[0].isdigit() or iskeyword(found) or found == "self" else found
