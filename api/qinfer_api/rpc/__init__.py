"""The gateway's gRPC server: Triton's service, health and reflection on one port.

Begin with `infer`; `http2` and `protocol` carry the calls.
"""
