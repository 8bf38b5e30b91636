"""qinfer: a durable, queue-backed inference server that speaks NVIDIA Triton's protocol."""

__version__ = "0.1.0"
