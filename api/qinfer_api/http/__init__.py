"""The HTTP fast path below ASGI."""
