"""The bindings to CUDA's runtime, against the real library on a machine without a GPU."""

import os
from pathlib import Path

import pytest

from qinfer.backends import cuda as adapter
from qinfer.backends.cuda import Cuda, CudaError
from qinfer.errors import BackendUnavailable


@pytest.fixture
def cuda() -> Cuda:
    """CUDA's runtime, from wherever this machine has it."""
    here = [*Path("/usr/local").glob("cuda*/lib*/libcudart.so.1?"), *Path(".venv/tools").rglob("libcudart.so.1?")]
    try:
        found = Cuda(here[0].resolve()) if here else Cuda()
    except BackendUnavailable:
        pytest.skip("CUDA's runtime library is not installed")
    if found.device_count():
        pytest.skip("this machine has a GPU: tests/gpu covers it")
    return found


def test_no_gpu_is_none(cuda: Cuda) -> None:
    """Without a driver there are 0 GPUs, which is not an error."""
    assert cuda.device_count() == 0


def test_what_cuda_refuses_says_why(cuda: Cuda) -> None:
    """Every call raises with the function's name and CUDA's own words."""
    for call in (lambda: cuda.set_device(0), lambda: cuda.allocate(16), lambda: cuda.allocate_pinned(16), cuda.stream):
        with pytest.raises(CudaError, match=r"^cuda\w+: .+ \(CUDA error \d+\)$"):
            call()


def test_every_function_exists(cuda: Cuda) -> None:
    """The names that are looked up at their first use are in the library."""
    names = (
        "cudaMalloc cudaFree cudaHostAlloc cudaFreeHost cudaStreamCreateWithPriority cudaStreamDestroy cudaMemcpyAsync "
        "cudaStreamSynchronize cudaStreamBeginCapture cudaStreamEndCapture cudaGraphInstantiateWithFlags "
        "cudaGraphDestroy cudaGraphLaunch cudaGraphExecDestroy cudaDeviceGetAttribute cudaGetDeviceProperties"
    )
    for name in names.split():
        assert getattr(cuda._library, name)


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (2, 0), (700, 1), (710, 1), (719, 1), (900, 0)])
def test_a_process_that_cuda_is_lost_to_ends(status: int, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion on the GPU is for ever; a lack of memory, or a graph that is being recorded, is not."""

    class Fake:
        def set_device(self, device: int) -> None:
            if status:
                error = CudaError("cudaSetDevice: refused")
                error.status = status
                raise error

        def stream(self, *, urgent: bool = False) -> int:
            return 1

        def destroy_stream(self, stream: int) -> None:
            assert stream == 1

    sent: list[int] = []
    monkeypatch.setattr(adapter, "Cuda", Fake)
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(pid))
    adapter.end_if_lost(0)
    assert sent == [os.getpid()] * ends
