"""Fields of a task → the input tensors of a model. Files are fetched by the caller, who knows from where it may."""

import base64
from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qinfer.errors import InvalidRequest
from qinfer.labeling.values import Task, field_of
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, datatype, from_numpy, pack_bytes

Kind = Literal["text", "bytes", "tensor", "file"]


def _without_dollar(value: object) -> object:
    return value.removeprefix("$") if isinstance(value, str) else value


class InputField(BaseModel):
    """The field of a task that an input is made of.

    Attributes:
        field: Its name in the task's data; dots lead into objects. A `$` before it is left out.
        kind: `text`: text for a BYTES input. `bytes`: base64, or a data: URI. `tensor`: a number, or lists of them.
            `file`: a URL or path, whose content is fetched. Content becomes an element of a BYTES input, or the
            vector of a UINT8 input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: Annotated[str, BeforeValidator(_without_dollar), Field(min_length=1)]
    kind: Kind = "text"


def file_references(inputs: Mapping[str, InputField], task: Task) -> tuple[str, ...]:
    """Returns the references of the files that a task's inputs are; each once.

    Raises:
        InvalidRequest: A field of kind `file` holds no text.
    """
    found = [_text(task, each.field) for each in inputs.values() if each.kind == "file" and _has(task, each.field)]
    return tuple(dict.fromkeys(found))


def make_request(
    inputs: Mapping[str, InputField], task: Task, spec: ModelSpec, files: Mapping[str, bytes]
) -> tuple[Tensor, ...]:
    """Makes a task's input tensors, in the model's order.

    Args:
        inputs: Input → its field.
        task: The task.
        spec: The model's configuration.
        files: Reference → content, of all that `file_references` returned.

    Raises:
        InvalidRequest: A field is missing, or does not fit its input; the message names both.
    """
    if unknown := next((name for name in inputs if all(name != each.name for each in spec.inputs)), ""):
        raise InvalidRequest(f"model '{spec.name}' has no input '{unknown}', which the mapping names")
    return tuple(
        _tensor(each, inputs[each.name], task, files, is_batched=spec.max_batch_size > 0)
        for each in spec.inputs
        if each.name in inputs and not (each.optional and not _has(task, inputs[each.name].field))
    )


def input_problems(inputs: Mapping[str, InputField], spec: ModelSpec) -> Iterator[str]:
    """Yields the reasons why inputs do not fit a model."""
    known = {each.name: each for each in spec.inputs}
    for name, each in inputs.items():
        if name not in known:
            yield f"model '{spec.name}' has no input '{name}'; it has {', '.join(known)}"
            continue
        kind = known[name].datatype
        if each.kind == "text" and kind != "BYTES":
            yield f"input '{name}' is {kind}: kind text needs BYTES"
        if each.kind in {"bytes", "file"} and kind not in {"BYTES", "UINT8"}:
            yield f"input '{name}' is {kind}: kind {each.kind} needs BYTES or UINT8"
    for name, spec_input in known.items():
        if name not in inputs and not spec_input.optional:
            yield f"input '{name}' of model '{spec.name}' has no field; name it in 'inputs'"


def _tensor(
    spec: TensorSpec, source: InputField, task: Task, files: Mapping[str, bytes], *, is_batched: bool
) -> Tensor:
    try:
        if source.kind == "tensor":
            return _array_tensor(spec, field_of(task, source.field), is_batched=is_batched)
        if source.kind == "text":
            value = field_of(task, source.field)
            texts = value if isinstance(value, list) else [value]
            elements = [_encoded(text) for text in texts]
        else:
            elements = [_content(source, task, files)]
    except InvalidRequest as error:
        raise InvalidRequest(f"input '{spec.name}': {error.message}") from None
    if spec.datatype == "BYTES":
        return Tensor(spec.name, "BYTES", _shape(spec, len(elements), is_batched=is_batched), pack_bytes(elements))
    if spec.datatype != "UINT8" or source.kind == "text":
        raise InvalidRequest(f"input '{spec.name}' is {spec.datatype}: kind {source.kind} can't make it")
    return Tensor(spec.name, "UINT8", _shape(spec, len(elements[0]), is_batched=is_batched), elements[0])


def _encoded(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="replace")  # a lone surrogate of JSON is no text
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value).encode()
    raise InvalidRequest(f"its field holds {_shown(value)}, not text")


def _content(source: InputField, task: Task, files: Mapping[str, bytes]) -> bytes:
    text = _text(task, source.field)
    if source.kind == "file":
        if text not in files:
            raise InvalidRequest(f"the file of field '{source.field}' was not fetched")
        return files[text]
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(f"field '{source.field}' is a data: URI that is not base64")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # it has other characters, or a length that can't be
        raise InvalidRequest(f"field '{source.field}' is no base64: {error}") from None


def _array_tensor(spec: TensorSpec, value: Any, *, is_batched: bool) -> Tensor:
    """Makes a tensor of numbers, or of texts, in lists."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if spec.datatype == "BYTES":
        flat = array.ravel().tolist() if array.dtype.kind in "U" else None
        if flat is None:
            raise InvalidRequest(f"its field holds {_shown(value)}, not text in even lists")
        shape = _array_shape(spec, array.shape, len(flat), is_batched=is_batched)
        return Tensor(spec.name, "BYTES", shape, pack_bytes(_encoded(text) for text in flat))
    if array.dtype.kind not in "biuf" or not array.size:
        raise InvalidRequest(f"its field holds {_shown(value)}, not numbers in even lists")
    target = np.dtype(datatype(spec.datatype).numpy or "<f4")
    with np.errstate(all="ignore"):
        cast = array.astype(target)
    fits = np.isfinite(cast) == np.isfinite(array) if target.kind == "f" else cast == array
    if not fits.all():
        raise InvalidRequest(f"its field holds {_shown(value)}, which {spec.datatype} can't")
    shape = _array_shape(spec, array.shape, array.size, is_batched=is_batched)
    return from_numpy(spec.name, cast.reshape(shape), "BF16" if spec.datatype == "BF16" else None)


def _array_shape(spec: TensorSpec, shape: tuple[int, ...], count: int, *, is_batched: bool) -> tuple[int, ...]:
    """Returns the shape of an array that has the input's own, or as many elements in other lists."""
    if len(shape) == len(spec.dims) and all(dim in (-1, size) for dim, size in zip(spec.dims, shape, strict=True)):
        return (1, *shape) if is_batched else shape
    return _shape(spec, count, is_batched=is_batched)


def _shape(spec: TensorSpec, count: int, *, is_batched: bool) -> tuple[int, ...]:
    """Returns the input's shape with so many elements: its last variable dimension takes them, others are 1."""
    dims = list(spec.dims)
    for i in range(len(dims)):
        if dims[i] == -1:
            dims[i] = 1 if -1 in dims[i + 1 :] else count // max(1, prod(abs(dim) for dim in dims))
    if prod(dims) != count:
        raise InvalidRequest(
            f"input '{spec.name}' of shape {list(spec.dims)} can't have the {count} elements of its field"
        )
    return (1, *dims) if is_batched else tuple(dims)


def _has(task: Task, field: str) -> bool:
    try:
        field_of(task, field)
    except InvalidRequest:
        return False
    return True


def _text(task: Task, field: str) -> str:
    value = field_of(task, field)
    if isinstance(value, str) and value:
        return value
    raise InvalidRequest(f"field '{field}' holds {_shown(value)}, not text")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
