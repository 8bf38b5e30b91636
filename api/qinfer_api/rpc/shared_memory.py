"""The calls of the shared memory extensions: system memory where it is on; CUDA's is never taken (reference §1.15)."""

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from qinfer_api.rpc.calls import Guard, Handler
from qinfer_api.shared_memory import SharedMemory

_GROUP = "shared-memory"


def shared_memory_calls(guard: Guard, memory: SharedMemory) -> dict[str, Handler]:
    """Returns the handlers: name → handler."""

    async def status(request: Any) -> Any:
        regions = {
            region.name: pb.SystemSharedMemoryStatusResponse.RegionStatus(
                name=region.name, key=region.key, offset=region.offset, byte_size=region.byte_size
            )
            for region in memory.status(request.name)
        }
        return pb.SystemSharedMemoryStatusResponse(regions=regions)

    async def register(request: Any) -> Any:
        memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(request: Any) -> Any:
        if request.name:
            memory.unregister(request.name)
        else:
            memory.unregister_all()
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(request: Any) -> Any:
        memory.check_cuda(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(_: Any) -> Any:
        memory.register_cuda()

    async def cuda_unregister(_: Any) -> Any:
        memory.check_cuda()
        return pb.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": guard.unary(pb.SystemSharedMemoryStatusRequest, status, _GROUP),
        "SystemSharedMemoryRegister": guard.unary(pb.SystemSharedMemoryRegisterRequest, register, _GROUP),
        "SystemSharedMemoryUnregister": guard.unary(pb.SystemSharedMemoryUnregisterRequest, unregister, _GROUP),
        "CudaSharedMemoryStatus": guard.unary(pb.CudaSharedMemoryStatusRequest, cuda_status, _GROUP),
        "CudaSharedMemoryRegister": guard.unary(pb.CudaSharedMemoryRegisterRequest, cuda_register, _GROUP),
        "CudaSharedMemoryUnregister": guard.unary(pb.CudaSharedMemoryUnregisterRequest, cuda_unregister, _GROUP),
    }
