"""qinfer: a durable, queue-backed inference server that speaks NVIDIA Triton's protocol.

`qinfer.Client` and `qinfer.AsyncClient` ask a running server; they are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from qinfer.client import AsyncClient, Client
else:

    def __getattr__(name: str) -> Any:
        if name in ("AsyncClient", "Client"):
            from qinfer import client

            return getattr(client, name)
        raise AttributeError(f"module 'qinfer' has no attribute '{name}'")
