"""The gRPC side of the gateway: Triton's service, and the health service, on one port."""
