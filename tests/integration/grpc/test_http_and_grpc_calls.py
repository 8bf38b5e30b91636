"""The same wrong call over HTTP and gRPC: one text, and the codes of one row of `status.STATUSES`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import hash_key
from tests.support.both_protocols import over_grpc, over_http, status_of
from tests.support.rpc import Rpc, rpc

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for all


class Other(NamedTuple):
    """Another call: how each protocol says it."""

    method: str
    url: str
    body: Any
    rpc: str
    message: Any


def _setting(kind: Any, **values: Any) -> dict[str, Any]:
    return {name: kind.SettingValue(**value) for name, value in values.items()}


def _log(name: str, **value: Any) -> Any:
    return pb.LogSettingsRequest(settings=_setting(pb.LogSettingsRequest, **{name: value}))


def _trace(name: str, *values: str, model: str = "") -> Any:
    setting = _setting(pb.TraceSettingRequest, **{name: {"value": list(values)}})
    return pb.TraceSettingRequest(settings=setting, model_name=model)


def _about(rpc_name: str, url: str, name: str, version: str = "") -> Other:
    path = f"/v2/models/{name}{f'/versions/{version}' if version else ''}{url}"
    message = getattr(pb, f"{rpc_name}Request")(name=name, version=version)
    return Other("GET", path, None, rpc_name, message)


def _load(name: str, **parameters: str) -> Other:
    message = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        message.parameters[key].string_param = value
    return Other(
        "POST", f"/v2/repository/models/{name}/load", {"parameters": parameters}, "RepositoryModelLoad", message
    )


OTHERS = {
    **{
        f"{rpc_name} of {what}": _about(rpc_name, url, *of)
        for rpc_name, url in (("ModelReady", "/ready"), ("ModelMetadata", ""), ("ModelConfig", "/config"))
        for what, of in {
            "an unknown model": ("nothing",),
            "an unknown version": ("echo", "9"),
            "a version that is none": ("echo", "one"),
        }.items()
    },
    "statistics of an unknown model": _about("ModelStatistics", "/stats", "nothing"),
    "statistics of an unknown version": _about("ModelStatistics", "/stats", "echo", "9"),
    "metadata of a version that is not ready": _about("ModelMetadata", "", "loading", "1"),
    "load where it is off": _load("echo"),
    "an unknown parameter of a load": _load("echo", other="x"),
    "load of another repository": Other(
        "POST",
        "/v2/repository/r/models/echo/load",
        {},
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(repository_name="r", model_name="echo"),
    ),
    "unload where it is off": Other(
        "POST",
        "/v2/repository/models/echo/unload",
        {},
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest(model_name="echo"),
    ),
    "log file": Other("POST", "/v2/logging", {"log_file": "x"}, "LogSettings", _log("log_file", string_param="x")),
    "log format": Other(
        "POST", "/v2/logging", {"log_format": "x"}, "LogSettings", _log("log_format", string_param="x")
    ),
    "trace file": Other("POST", "/v2/trace/setting", {"trace_file": "x"}, "TraceSetting", _trace("trace_file", "x")),
    "trace level": Other(
        "POST", "/v2/trace/setting", {"trace_level": ["x"]}, "TraceSetting", _trace("trace_level", "x")
    ),
    "trace rate": Other("POST", "/v2/trace/setting", {"trace_rate": "x"}, "TraceSetting", _trace("trace_rate", "x")),
    "trace of an unknown model": Other(
        "GET", "/v2/models/nothing/trace/setting", None, "TraceSetting", pb.TraceSettingRequest(model_name="nothing")
    ),
    "memory that is off": Other(
        "POST",
        "/v2/systemsharedmemory/unregister",
        None,
        "SystemSharedMemoryUnregister",
        pb.SystemSharedMemoryUnregisterRequest(),
    ),
    "CUDA's memory that is off": Other(
        "POST",
        "/v2/cudasharedmemory/unregister",
        None,
        "CudaSharedMemoryUnregister",
        pb.CudaSharedMemoryUnregisterRequest(),
    ),
}


async def _ask_both(server: Rpc, other: Other) -> tuple[tuple[int, str], tuple[str, str]]:
    body = b"" if other.body is None else json.dumps(other.body).encode()
    first = await over_http(server, other.method, other.url, body, {})
    return first, await over_grpc(getattr(server.stub, other.rpc)(other.message))


@pytest.mark.parametrize("name", OTHERS)
async def test_another_wrong_call(common_server: Rpc, name: str) -> None:
    """Both tell the same, and their codes are one."""
    (status, text), (code, details) = await _ask_both(common_server, OTHERS[name])

    assert details == text
    assert status == status_of(code)


def _register(name: str, key: str, **where: int) -> Other:
    return Other(
        "POST",
        f"/v2/systemsharedmemory/region/{name}/register" if name else "/v2/systemsharedmemory/register",
        {"key": key, **where},
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name=name, key=key, **where),
    )


MEMORY = {
    "no such object": _register("r", "/qinfer-none", byte_size=8),
    "a path": _register("r", "/../../etc/passwd", byte_size=8),
    "a reserved key": _register("r", "/triton_python_backend_shm_region_0", byte_size=8),
    "no name": _register("", "/qinfer-none", byte_size=8),
    "far beyond the end": _register("r", "/qinfer-none", offset=2**64 - 1, byte_size=2**64 - 1),
    "status of none": Other(
        "GET",
        "/v2/systemsharedmemory/region/r/status",
        None,
        "SystemSharedMemoryStatus",
        pb.SystemSharedMemoryStatusRequest(name="r"),
    ),
    "status of CUDA's": Other(
        "GET",
        "/v2/cudasharedmemory/region/r/status",
        None,
        "CudaSharedMemoryStatus",
        pb.CudaSharedMemoryStatusRequest(name="r"),
    ),
    "CUDA's": Other(
        "POST",
        "/v2/cudasharedmemory/region/r/register",
        {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 8},
        "CudaSharedMemoryRegister",
        pb.CudaSharedMemoryRegisterRequest(name="r", byte_size=8),
    ),
}


@pytest.mark.parametrize("name", MEMORY)
async def test_wrong_shared_memory(common_server_with_memory: Rpc, name: str) -> None:
    """Regions that can't be registered, and those that are not there."""
    (status, text), (code, details) = await _ask_both(common_server_with_memory, MEMORY[name])

    assert details == text
    assert status == status_of(code)


async def test_keys(tmp_path: Path) -> None:
    """None, a wrong one, and one that does not allow it."""
    path = tmp_path / "keys.json"
    entry = {"id": "k", "tenant": "t", "sha256": hash_key("infer-key"), "scopes": ["infer"]}
    path.write_text(json.dumps({"keys": [entry]}))
    load = _load("echo")
    async with rpc(auth={"mode": "keys", "keys_file": str(path)}) as server:
        for key in ("", "wrong", "infer-key"):
            headers = {"x-api-key": key} if key else {}
            status, text = await over_http(server, load.method, load.url, b"", headers)
            call = server.stub.RepositoryModelLoad(load.message, metadata=tuple(headers.items()))
            code, details = await over_grpc(call)

            assert details == text
            assert (status, code) == ((403, "PERMISSION_DENIED") if "infer" in key else (401, "UNAUTHENTICATED"))
