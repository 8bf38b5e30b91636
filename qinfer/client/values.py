"""Python values as the tensors of a model, by its configuration, and back: for `client.model("embed")(text=["hi"])`.

Each input is a batch, or all of them are one item; so are the outputs. Dimensions [1] are scalars. Pure.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qinfer.client.model_flows import as_array
from qinfer.errors import InvalidRequest
from qinfer.tensors import CONFIG_DATATYPES, Tensor, from_numpy, to_numpy

Config = Mapping[str, Any]
"""A configuration in Triton's JSON."""

BASE64 = "qinfer.base64"
"""The parameter that names the BYTES tensors that are no text."""


def to_tensors(config: Config, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """Returns the inputs, and whether they are one item; raises `InvalidRequest`, which names the input."""
    ports = {port["name"]: port for port in config["input"]}
    tensors: dict[str, Tensor] = {}
    ones: set[bool] = set()
    for name, value in values.items():
        if name not in ports:
            raise InvalidRequest(f"model '{config['name']}' has no input '{name}'; it has {', '.join(ports)}")
        if value is not None:
            tensors[name], is_one = _tensor(ports[name], value, is_batched=config["max_batch_size"] > 0)
            ones.add(is_one)
    if len(ones) > 1:
        raise InvalidRequest(f"some inputs of model '{config['name']}' are one item and others are lists of items")
    return tensors, ones == {True}


def from_tensors(config: Config, tensors: tuple[Tensor, ...], *, is_one: bool) -> dict[str, Any]:
    """Returns the outputs: arrays, and texts or bytes as nested lists."""
    scalars = {port["name"] for port in config["output"] if _dims(port) == ()}
    binary = config["parameters"].get(BASE64, {}).get("string_value", "").split(",")
    found: dict[str, Any] = {}
    for tensor in tensors:
        array: Any = to_numpy(tensor)
        if tensor.name in scalars and array.shape[-1:] == (1,):
            array = array[..., 0]
        if is_one and config["max_batch_size"] > 0:
            array = array[0]
        if tensor.datatype == "BYTES":
            array = _texts(
                array.tolist() if isinstance(array, np.ndarray) else array, is_text=tensor.name not in binary
            )
        found[tensor.name] = array.item() if isinstance(array, np.generic | np.ndarray) and not array.shape else array
    return found


def _tensor(port: Mapping[str, Any], value: Any, *, is_batched: bool) -> tuple[Tensor, bool]:
    name, datatype = port["name"], CONFIG_DATATYPES[port["data_type"]].name
    array = as_array(name, datatype, value)
    rank = len(_dims(port))
    is_one = array.ndim == rank
    if not is_one and not (is_batched and array.ndim == rank + 1):
        many = f", or {rank + 1} for a batch" if is_batched else ""
        raise InvalidRequest(f"input '{name}' has {array.ndim} dimensions; it has {rank} for one item{many}")
    array = array[None] if is_one and is_batched else array
    array = array[..., None] if rank == 0 else array
    return from_numpy(name, array, datatype), is_one


def _dims(port: Mapping[str, Any]) -> tuple[int, ...]:
    dims = tuple(map(int, port["dims"]))
    return () if dims == (1,) else dims


def _texts(value: Any, *, is_text: bool) -> Any:
    if isinstance(value, list):
        return [_texts(each, is_text=is_text) for each in value]
    return value.decode(errors="replace") if is_text else value
