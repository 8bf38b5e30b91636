"""The gateway's gRPC server: Triton's service, health and reflection on one port."""
