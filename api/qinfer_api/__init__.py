"""The gateway: accepts HTTP and gRPC requests, queues them, and returns the answers."""
