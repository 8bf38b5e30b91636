"""The client's calls about models as flows (`qinfer.client.steps`), without I/O.

Lists and numbers become arrays of the datatype that the model's metadata names. Values that would change are refused,
except by the usual rounding of floats.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec
import numpy as np

from qinfer.client.results import Array, ModelStatistics, path_part
from qinfer.client.steps import JSON, Flow, Policy, Send, call, converted, encode_json, json_object
from qinfer.errors import InvalidRequest, RequestNotFound, Unreachable
from qinfer.tensors import Tensor, from_numpy, numpy_dtype
from qinfer.wire.bodies import ModelIndexEntry, ModelMetadata, RecordedPage, Recording

Inputs = Mapping[str, Array | Tensor | list[Any] | tuple[Any, ...] | float | str | bytes]
"""Inputs by name: arrays; lists and single values, with datatypes from the model's metadata; or a `Tensor`."""

LISTS = (list, tuple, bool, int, float, str, bytes)

LIVE_TIMEOUT_S = 1.0
"""A slower gateway counts as dead."""


def metadata(policy: Policy, model: str, version: int | None) -> Flow[ModelMetadata]:
    """Returns a model's versions, inputs and outputs."""
    reply = yield from call(policy, Send("GET", model_path(model, version), {}))
    return converted(policy, json_object(policy, reply), ModelMetadata, "model metadata")


def with_datatypes(policy: Policy, model: str, version: int | None, inputs: Inputs) -> Flow[Inputs]:
    """Returns the inputs with tensors in place of lists; caches the datatypes until one does not fit."""
    if not isinstance(inputs, Mapping) or not any(isinstance(value, LISTS) for value in inputs.values()):
        return inputs
    key = (model, version or 0)
    known = policy.datatypes.get(key)
    if known is None:
        described = yield from metadata(policy, model, version)
        known = policy.datatypes[key] = {one.name: one.datatype for one in described.inputs}
    try:
        return {
            name: _convert_input(model, name, value, known) if isinstance(value, LISTS) else value
            for name, value in inputs.items()
        }
    except InvalidRequest:
        forget_datatypes(policy, model, version)
        raise


def forget_datatypes(policy: Policy, model: str, version: int | None) -> None:
    """Forgets a model's datatypes, which a load may have changed."""
    policy.datatypes.pop((model, version or 0), None)


def is_ready(policy: Policy, model: str | None, version: int | None) -> Flow[bool]:
    """Returns whether a model, or the whole server, can answer; Triton's 404 also means no ready version."""
    path = "/v2/health/ready" if model is None else f"{model_path(model, version)}/ready"
    send = Send("GET", path, {}, timeout_s=policy.timeout_s)
    outcome = yield send._replace(base=policy.gateways.current.base)
    if isinstance(outcome, httpx.Response) and outcome.status_code in (200, 400, 404, 503):
        return outcome.status_code == 200
    yield from call(policy, send)
    return True


def is_live(policy: Policy) -> Flow[bool]:
    """Returns whether a gateway answers; leaves those that do not."""
    for _ in range(len(policy.gateways)):
        gateway = policy.gateways.current
        outcome = yield Send("GET", "/v2/health/live", {}, timeout_s=LIVE_TIMEOUT_S, base=gateway.base)
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            return True
        policy.gateways.fail_over(gateway)
    return False


def index(policy: Policy, *, ready: bool) -> Flow[list[ModelIndexEntry]]:
    """Returns the models of the repositories, with the versions that were ever loaded."""
    reply = yield from call(policy, _post("/v2/repository/index", {"ready": ready}))
    try:
        return msgspec.json.decode(reply.content, type=list[ModelIndexEntry])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unreachable(f"the server at {policy.url} sent no index of models; is it a gateway?") from None


def statistics(policy: Policy, model: str | None, version: int | None) -> Flow[list[ModelStatistics]]:
    """Returns the statistics of a model's versions, or of all models."""
    path = "/v2/models/stats" if model is None else f"{model_path(model, version)}/stats"
    fields = json_object(policy, (yield from call(policy, Send("GET", path, {}))))
    entries = converted(policy, fields.get("model_stats"), list[dict[str, Any]], "statistics")
    records = [{**entry, "fields": entry} for entry in entries]
    return converted(policy, records, list[ModelStatistics], "statistics", strict=False)


def config(policy: Policy, model: str, version: int | None) -> Flow[dict[str, Any]]:
    """Returns a model's configuration in Triton's JSON."""
    return json_object(policy, (yield from call(policy, Send("GET", f"{model_path(model, version)}/config", {}))))


def load(
    policy: Policy, model: str, override: str | Mapping[str, Any] | None, files: Mapping[str, bytes] | None
) -> Flow[None]:
    """Loads a model, and returns when it is ready."""
    parameters: dict[str, str] = {}
    if override is not None:
        parameters["config"] = override if isinstance(override, str) else encode_json("config", override).decode()
    for name, data in (files or {}).items():
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidRequest(f"file '{name}' is of type {type(data).__name__}; make it bytes")
        parameters[f"file:{name}"] = b64encode(data).decode()
    yield from call(policy, _post(f"{_control_path(model)}/load", {"parameters": parameters}))
    policy.datatypes.clear()


def unload(policy: Policy, model: str, *, unload_dependents: bool) -> Flow[None]:
    """Unloads a model."""
    body = {"parameters": {"unload_dependents": True}} if unload_dependents else {}
    yield from call(policy, _post(f"{_control_path(model)}/unload", body))


OnPage = Callable[[RecordedPage], object]


def begin_recording(policy: Policy, model: str, requests: int, max_bytes: int, duration_s: float) -> Flow[Recording]:
    """Begins to record a model's requests."""
    bounds = {"requests": requests, "bytes": max_bytes, "seconds": duration_s}
    path = f"{model_path(model, None, 'v1')}/recordings"
    send = Send("POST", path, JSON, encode_json("the recording", bounds), repeats=False)
    return converted(policy, json_object(policy, (yield from call(policy, send))), Recording, "recording")


def recorded_page(policy: Policy, recording: Recording, after: str) -> Flow[RecordedPage]:
    """Returns the copies behind a place; the gateway waits a moment for the first."""
    path = f"/v1/recordings/{path_part('the recording', recording.id)}" + (f"?after={after}" if after else "")
    reply = yield from call(policy, Send("GET", path, {}), not_found=RequestNotFound)
    try:
        return msgspec.json.decode(reply.content, type=RecordedPage)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreachable(f"the server at {policy.url} sent no recording ({error}); is it a gateway?") from None


def stop_recording(policy: Policy, recording: Recording) -> Flow[None]:
    """Ends a recording."""
    path = f"/v1/recordings/{path_part('the recording', recording.id)}"
    yield from call(policy, Send("DELETE", path, {}), not_found=RequestNotFound)


def model_path(model: str, version: int | None = None, api: str = "v2") -> str:
    """Returns the path of a model, or of one version; no version, or 0, is the highest ready one."""
    path = f"/{api}/models/{path_part('the model', model)}"
    return f"{path}/versions/{version}" if version else path


def _control_path(model: str) -> str:
    return f"/v2/repository/models/{path_part('the model', model)}"


def _post(path: str, body: Mapping[str, Any]) -> Send:
    return Send("POST", path, JSON, encode_json("the request", body))


def _convert_input(model: str, name: str, value: object, known: Mapping[str, str]) -> Tensor:
    wire = known.get(name)
    if wire is None:
        raise InvalidRequest(f"model '{model}' has no input '{name}'; its inputs are: {', '.join(known)}")
    return from_numpy(name, as_array(name, wire, value), wire)


def as_array(name: str, wire: str, value: object) -> Array:
    """Converts nested lists, or an array, to a wire datatype; refuses ragged lists and elements that do not fit."""
    try:
        if wire == "BYTES":
            elements: Array = np.vectorize(_to_bytes, otypes=[object])(np.array(value, dtype=object))
            return elements
        return _numbers(numpy_dtype(wire), value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input '{name}' can't be read as {wire}: {error}") from None


def _numbers(wanted: np.dtype[Any], value: object) -> Array:
    # numpy would convert [1, 2**63] to floats
    if wanted.kind in "iu" and not isinstance(value, np.ndarray):
        integers: Array = np.vectorize(_to_int, otypes=[object])(np.array(value, dtype=object))
        return integers.astype(wanted)
    natural = np.asarray(value)
    if natural.dtype.kind not in "biuf":
        raise ValueError("its elements are not numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        array = natural.astype(wanted)
        if wanted.kind == "f":
            fits = np.isinf(array) <= np.isinf(natural.astype(np.float64))
        elif wanted.kind in "iu" and natural.dtype.kind == "f":
            fits = (array == natural) & (natural < float(np.iinfo(wanted).max) + 1)
        else:
            fits = array == natural
    if not np.all(fits):
        raise ValueError(f"{natural[~fits].flat[0]} does not fit")
    return array


def _to_int(element: object) -> int:
    if isinstance(element, int | np.integer) or (isinstance(element, float) and element.is_integer()):
        return int(element)
    raise ValueError(f"{_describe(element)} instead of an integer")


def _to_bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str | int | float) and not isinstance(element, bool):
        return str(element).encode()
    raise ValueError(f"{_describe(element)} instead of a text")


def _describe(element: object) -> str:
    return "lists of different lengths" if isinstance(element, list) else json.dumps(element)
