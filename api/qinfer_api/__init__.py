"""The gateway: accepts HTTP and gRPC requests, queues them, and returns the answers.

`app` builds and runs it; begin with `dispatcher`, which every protocol calls.
"""
