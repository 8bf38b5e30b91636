"""The calls about the server, its models, its memory and its settings, through tritonclient and as messages."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import shared_memory

import qinfer
from qinfer.models.state import DesiredState, State, VersionState, WorkerRecord
from qinfer.observe import stats
from tests.support.rpc import ROW, Rpc, infer_request, rpc

ALL = sorted(method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods)


@pytest.fixture
async def client(server: Rpc) -> AsyncIterator[Any]:
    async with InferenceServerClient(server.running.grpc_target) as one:
        yield one


async def _refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details() or ""


async def test_every_call_of_the_service_is_there(server: Rpc) -> None:
    """None is UNIMPLEMENTED because nobody implemented it, and none fails on a message that is none."""
    assert len(ALL) == 20
    for method in ALL:
        path = f"/inference.GRPCInferenceService/{method}"
        if method == "ModelStreamInfer":
            call = server.channel.stream_stream(path)()
            await call.write(b"\xff")
            assert b"is not a message" in await call.read()
            call.cancel()
        else:
            code, text = await _refused(server.channel.unary_unary(path)(b"\xff"))
            assert (method, code, "is not a message" in text) == (method, "INVALID_ARGUMENT", True)


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady", "ModelReady"])
async def test_calls_that_need_no_key_have_no_large_messages(server: Rpc, method: str) -> None:
    """Strangers could reserve the memory of others' requests with them."""
    call = server.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")

    assert (await _refused(call(bytes(70_000))))[0] == "RESOURCE_EXHAUSTED"


async def test_server_metadata(client: Any) -> None:
    """What stock clients look at."""
    about = await client.get_server_metadata()

    assert (about.name, about.version) == ("triton", qinfer.__version__)
    assert "statistics" in about.extensions


async def test_model_metadata_and_configuration(client: Any) -> None:
    """The same that HTTP says."""
    about = await client.get_model_metadata("echo")
    config = (await client.get_model_config("echo", "2")).config

    assert (about.name, list(about.versions)) == ("echo", ["1", "2"])
    assert (about.inputs[0].name, about.inputs[0].datatype, list(about.inputs[0].shape)) == ("x", "FP32", [-1, 4])
    assert (config.name, config.max_batch_size, list(config.output[0].dims)) == ("echo", 8, [4])


async def test_readiness(server: Rpc, client: Any) -> None:
    """A model without a live worker is not ready; one that is unknown is an error."""
    assert await client.is_server_live()
    assert await client.is_model_ready("echo")
    assert await client.is_model_ready("echo", "2")
    assert not await client.is_model_ready("loading")

    code, text = await _refused(server.stub.ModelReady(pb.ModelReadyRequest(name="nothing")))
    assert (code, "'nothing' is not found" in text) == ("NOT_FOUND", True)


async def test_a_model_that_says_no_is_not_ready(server: Rpc, client: Any) -> None:
    """By its own `is_ready`, over HTTP as well; the server is ready, and the model answers."""
    said = VersionState(State.READY, 1, unready="its is_ready returned False")
    states = {"half": {1: said}, "pair": {1: VersionState(State.READY, 1)}}
    await server.running.store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=states), ttl_s=3600)
    await server.running.refresh()

    assert not await client.is_model_ready("half")
    assert not await client.is_model_ready("half", "1")
    assert (await server.stub.ModelReady(pb.ModelReadyRequest(name="half"))).ready is False
    assert await client.is_model_ready("pair")
    assert await client.is_server_ready()
    assert await client.is_server_live()


async def test_a_model_that_was_unloaded_is_not_ready(server: Rpc, client: Any) -> None:
    """As Triton's example for model control asks: no error, as long as the server knows the model."""
    await server.running.store.set_desired(DesiredState("pair", 1, load=False))
    await server.running.refresh()

    assert not await client.is_model_ready("pair")
    assert not await client.is_model_ready("pair", "1")


async def test_statistics(server: Rpc, client: Any) -> None:
    """What the workers added, for one version or all."""
    await server.running.store.add_stats("echo", 2, {stats.INFERENCE_COUNT: 5, stats.SUCCESS_COUNT: 3})

    (one,) = (await client.get_inference_statistics("echo", "2")).model_stats
    everything = (await client.get_inference_statistics()).model_stats

    assert (one.name, one.version, one.inference_count, one.inference_stats.success.count) == ("echo", "2", 5, 3)
    assert {("echo", "1"), ("echo", "2"), ("pair", "1")} <= {(s.name, s.version) for s in everything}
    code, text = await _refused(server.stub.ModelStatistics(pb.ModelStatisticsRequest(name="nothing")))
    assert (code, text) == ("INVALID_ARGUMENT", "requested model 'nothing' is not available")


async def test_the_repository_index(server: Rpc, client: Any) -> None:
    """Versions with their states; another repository can't be named."""
    index = (await client.get_model_repository_index()).models

    assert ("echo", "2", "READY") in {(m.name, m.version, m.state) for m in index}
    code, text = await _refused(server.stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="r")))
    assert (code, text) == ("UNIMPLEMENTED", "'repository_name' specification is not supported")


async def test_loading_needs_the_explicit_mode(server: Rpc) -> None:
    """As over HTTP."""
    text = "explicit model load / unload is not allowed if polling is enabled"

    assert await _refused(server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"))) == (
        "UNAVAILABLE",
        text,
    )
    assert await _refused(server.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"))) == (
        "UNAVAILABLE",
        text,
    )


async def test_load_parameters_arrive(server: Rpc, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration, the files, and whether dependents go too."""
    calls: list[Any] = []

    async def load(*arguments: Any) -> None:
        calls.append(arguments)

    async def unload(*arguments: Any, **options: Any) -> None:
        calls.append((*arguments, options))

    monkeypatch.setattr(server.running.gateway.models, "load", load)
    monkeypatch.setattr(server.running.gateway.models, "unload", unload)
    await client.load_model("m", config="{}", files={"file:1/model.onnx": b"\x00\xff"})
    await client.load_model("n")
    await client.unload_model("m", unload_dependents=True)

    assert calls == [("m", "{}", {"1/model.onnx": b"\x00\xff"}), ("n", None, {}), ("m", {"unload_dependents": True})]


@pytest.mark.parametrize(
    ("name", "parameter", "text"),
    [
        ("config", {"bool_param": True}, "invalid value type for load parameter 'config', expected string_param."),
        ("file:1/x", {"string_param": ""}, "invalid value type for load parameter 'file:1/x', expected bytes_param."),
        ("other", {"bool_param": True}, "unrecognized load parameter 'other'"),
    ],
)
async def test_wrong_load_parameters_are_named(server: Rpc, name: str, parameter: Any, text: str) -> None:
    """With the type that is expected."""
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters[name].CopyFrom(pb.ModelRepositoryParameter(**parameter))

    code, details = await _refused(server.stub.RepositoryModelLoad(request))

    assert (code, details.startswith(text)) == ("INVALID_ARGUMENT", True)


async def test_log_settings(server: Rpc, client: Any) -> None:
    """They can be read, and changed; the log file can't."""
    before = await client.get_log_settings(as_json=True)
    after = await client.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
    back = await client.update_log_settings({"log_info": True, "log_verbose_level": 0, "log_format": "default"})

    assert before["settings"]["log_info"] == {"bool_param": True}
    assert (after.settings["log_info"].bool_param, after.settings["log_verbose_level"].uint32_param) == (False, 1)
    assert after.settings["log_format"].string_param == "ISO8601"
    assert back.settings["log_info"].bool_param
    newer = pb.LogSettingsRequest(settings={"log_newer": pb.LogSettingsRequest.SettingValue(string_param="x")})
    assert "log_newer" not in (await server.stub.LogSettings(newer)).settings  # as over HTTP
    with pytest.raises(Exception, match="log file location can not be updated"):
        await client.update_log_settings({"log_file": "x"})
    wrong = pb.LogSettingsRequest(settings={"log_info": pb.LogSettingsRequest.SettingValue(uint32_param=1)})
    assert await _refused(server.stub.LogSettings(wrong)) == (
        "INVALID_ARGUMENT",
        "invalid value type for 'log_info' setting, expected bool_param.",
    )


async def test_trace_settings(client: Any) -> None:
    """A model has the server's until it has its own; no value clears."""
    await client.update_trace_settings(settings={"trace_rate": "5"})
    own = await client.update_trace_settings("echo", {"trace_level": ["OFF"], "trace_count": "7"})
    cleared = await client.update_trace_settings("echo", {"trace_count": None})

    assert list(own.settings["trace_level"].value) == ["OFF"]
    assert (list(own.settings["trace_rate"].value), list(own.settings["trace_count"].value)) == (["5"], ["7"])
    assert list(cleared.settings["trace_count"].value) == ["-1"]
    with pytest.raises(Exception, match="QINFER_TRACE__FILE"):
        await client.update_trace_settings("echo", {"trace_level": ["TIMESTAMPS"]})
    with pytest.raises(Exception, match="expect only 1 value for 'trace_rate'"):
        await client.update_trace_settings(settings={"trace_rate": ["1", "2"]})


async def test_restricted_calls_need_their_secret() -> None:
    """The metadata key has Triton's prefix; other groups stay open."""
    async with rpc({"restricted": ("inference,model-config:key=secret",)}) as server:
        right = (("triton-grpc-protocol-key", "secret"),)

        code, text = await _refused(server.stub.ModelInfer(infer_request()))
        assert (code, text) == (
            "UNAVAILABLE",
            "This protocol is restricted, expecting header 'triton-grpc-protocol-key'",
        )
        await server.stub.ModelInfer(infer_request(), metadata=right)
        await server.stub.ModelConfig(pb.ModelConfigRequest(name="echo"), metadata=right)
        await server.stub.ServerLive(pb.ServerLiveRequest())
        assert (await _refused(server.stub.ModelStreamInfer().read()))[0] == "UNAVAILABLE"


async def test_shared_memory_is_off(server: Rpc) -> None:
    """Unless the operator turns it on: Triton's default and text."""
    for call in (
        server.stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="r")),
        server.stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="r")),
    ):
        code, text = await _refused(call)
        assert (code, text.startswith("Client shared memory is disabled.")) == ("UNIMPLEMENTED", True)


async def test_cuda_memory_can_be_cleared(server_with_memory: Rpc) -> None:
    """perf_analyzer clears both kinds at its start; without a GPU there are no CUDA regions."""
    async with InferenceServerClient(server_with_memory.running.grpc_target) as client:
        await client.unregister_cuda_shared_memory()
        await client.unregister_cuda_shared_memory("r")
        assert not (await client.get_cuda_shared_memory_status()).regions
        with pytest.raises(Exception, match="'r', GPUs not supported"):
            await client.register_cuda_shared_memory("r", b"", 0, 8)


async def test_tensors_in_shared_memory(server_with_memory: Rpc) -> None:
    """Inputs are read there and outputs written, with the client's own helpers."""
    size = ROW.nbytes
    handle = shared_memory.create_shared_memory_region("both", "/qinfer_test_grpc", 2 * size)
    try:
        shared_memory.set_shared_memory_region(handle, [ROW])
        async with InferenceServerClient(server_with_memory.running.grpc_target) as client:
            await client.register_system_shared_memory("both", "/qinfer_test_grpc", 2 * size)
            regions = (await client.get_system_shared_memory_status()).regions
            x, y = InferInput("x", [1, 4], "FP32"), InferRequestedOutput("y")
            x.set_shared_memory("both", size)
            y.set_shared_memory("both", size, offset=size)
            result = await client.infer("echo", [x], outputs=[y])
            await client.unregister_system_shared_memory("both")
            left = (await client.get_system_shared_memory_status()).regions
        written = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], offset=size)
        assert np.array_equal(written, ROW)
    finally:
        shared_memory.destroy_shared_memory_region(handle)

    assert (regions["both"].key, regions["both"].byte_size, len(left)) == ("/qinfer_test_grpc", 2 * size, 0)
    assert list(result.get_response().raw_output_contents) == [b""]


@pytest.fixture
async def server_with_memory() -> AsyncIterator[Rpc]:
    async with rpc(allow_client_shm=True) as one:
        yield one
