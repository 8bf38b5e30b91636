"""Arrays of requests as Python values, and the values of a function as arrays.

Scalars are `[items, 1]` in requests and responses; an array of a port is `[items, *shape]`.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InferenceFailed, InvalidRequest
from qinfer.functions.hints import TensorPort, ValueSpec
from qinfer.tensors import numpy_dtype

Array = npt.NDArray[Any]

MAX_PIXELS = 64 * 10**6
"""The most pixels of an image, counted before it is decoded."""

_IMAGES = ("JPEG", "PNG")
_USUAL = {"float": {float}, "bool": {bool}}


def decode(port: TensorPort, array: Array) -> Sequence[Any] | Array:
    """Returns the items of an input, or raises `InvalidRequest`; those of an array port are an array."""
    if port.kind == "array":
        return array if port.shape else array.reshape(-1)
    elements: list[Any] = array.reshape(-1).tolist()
    if port.kind == "str":
        return [_text(port.name, element) for element in elements]
    if port.kind == "image":
        return [_image(port.name, element) for element in elements]
    return elements


def to_array(port: TensorPort, items: Sequence[Any] | Array, what: str = "output") -> Array:
    """Returns the tensor of a port's items, or raises `InferenceFailed` for values that are not of the port."""
    if port.datatype == "BYTES" and port.kind != "array":
        found = np.empty((len(items), 1), dtype=object)
        found[:, 0] = [_bytes(port, item, what) for item in items]
        return found
    dtype = numpy_dtype(port.datatype)
    if not len(items):
        return np.zeros((0, *(max(size, 0) for size in port.dims)), dtype)
    if port.kind != "array" and {*map(type, items)} != _USUAL.get(port.kind):
        for item in items:
            if not _is_of(port, item):
                raise _unfit(port, what, f"{type(item).__name__} {item!r:.100}")
            if port.kind == "int" and not -(2**63) <= item < 2**63:
                raise _unfit(port, what, f"the number {hex(item):.100}, which is outside INT64")
    try:
        array = np.asarray(items)
        is_safe = not array.size or (np.can_cast(array.dtype, dtype, "same_kind") and _in_range(array, dtype))
        array = array.astype(dtype, copy=False) if is_safe else array
    except (ValueError, TypeError, OverflowError) as error:
        raise _unfit(port, what, f"a value that is no array: {error}") from None
    shape = array.shape[1:]
    fits = len(shape) == len(port.shape) and all(a in (b, -1) for a, b in zip(port.shape, shape, strict=True))
    if not is_safe or not fits:
        raise _unfit(port, what, f"{array.dtype} of shape {list(shape)}")
    return array if port.shape else array.reshape(-1, 1)


def make(value: ValueSpec, fields: Mapping[str, Any]) -> Any:
    """Returns an argument from the items of its ports; raises `InvalidRequest` if its class refuses them."""
    record: Any = value.record
    if record is None:
        return fields[value.name]
    try:
        if issubclass(record, msgspec.Struct):
            return msgspec.convert(dict(fields), record)
        return record(**fields)
    except (ValueError, TypeError) as error:  # those of pydantic and msgspec are ValueErrors
        raise InvalidRequest(f"'{value.name}' is not valid: {error}") from None


def parts(value: ValueSpec, result: Any) -> list[Any]:
    """Returns the value of each port of a result, or raises `InferenceFailed`."""
    if value.record is None:
        return [result]
    try:
        by_key = isinstance(result, Mapping) and not is_dataclass(value.record)
        return [result[port.name] if by_key else getattr(result, port.name) for port in value.ports]
    except (KeyError, AttributeError) as error:
        name = error.args[0] if isinstance(error, KeyError) else error.name
        raise InferenceFailed(f"the result has no '{name}', which its type {value.record.__name__} has") from None


def _in_range(array: Array, dtype: np.dtype[Any]) -> bool:
    if dtype.kind not in "iu" or array.dtype.kind not in "iu" or array.dtype == dtype:
        return True
    limits = np.iinfo(dtype)
    return bool(int(array.min()) >= limits.min and int(array.max()) <= limits.max)


def _is_of(port: TensorPort, item: Any) -> bool:
    if port.kind == "bool":
        return isinstance(item, bool | np.bool_)
    if isinstance(item, bool | np.bool_):
        return False
    return isinstance(item, int | np.integer) or (port.kind == "float" and isinstance(item, float | np.floating))


def _text(name: str, element: Any) -> str:
    try:
        return element if isinstance(element, str) else bytes(element).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{name}' has text that is not UTF-8 at byte {error.start}") from None


def _bytes(port: TensorPort, item: Any, what: str) -> bytes:
    if port.kind == "image":
        if not hasattr(item, "save"):
            raise _unfit(port, what, type(item).__name__)
        written = io.BytesIO()
        item.save(written, "PNG")
        return written.getvalue()
    if port.kind == "str" and isinstance(item, str):
        return item.encode(errors="replace")
    if port.kind == "bytes" and isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    raise _unfit(port, what, type(item).__name__)


def _image(name: str, content: bytes) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise InferenceFailed("images need Pillow; install it by: pip install 'qinfer-ml[images]'") from None
    try:
        image = Image.open(io.BytesIO(content), formats=_IMAGES)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InvalidRequest(f"input '{name}' has an image of {width}x{height} pixels; the most is {MAX_PIXELS}")
        image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise InvalidRequest(f"input '{name}' has an image that is no readable {' or '.join(_IMAGES)}") from None
    return image


def _unfit(port: TensorPort, what: str, got: str) -> InferenceFailed:
    kind = f"{port.datatype}{list(port.shape)}" if port.kind == "array" else port.kind
    return InferenceFailed(f"{what} '{port.name}' has items of {kind}, got {got}")
