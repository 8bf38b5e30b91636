"""The bindings to CUDA's runtime, against the real library on a machine without a GPU."""

from pathlib import Path

import pytest

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
    for call in (lambda: cuda.use(0), lambda: cuda.allocate(16), lambda: cuda.allocate_pinned(16), cuda.stream):
        with pytest.raises(CudaError, match=r"^cuda\w+: .+ \(CUDA error \d+\)$"):
            call()


def test_every_function_exists(cuda: Cuda) -> None:
    """The names that are looked up at their first use are in the library."""
    names = (
        "cudaMalloc cudaFree cudaHostAlloc cudaFreeHost cudaStreamCreateWithFlags cudaStreamDestroy cudaMemcpyAsync "
        "cudaStreamSynchronize cudaStreamBeginCapture cudaStreamEndCapture cudaGraphInstantiateWithFlags "
        "cudaGraphDestroy cudaGraphLaunch cudaGraphExecDestroy cudaDeviceGetAttribute cudaGetDeviceProperties"
    )
    for name in names.split():
        assert getattr(cuda._library, name)
