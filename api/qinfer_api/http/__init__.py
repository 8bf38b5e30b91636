"""The HTTP fast path below ASGI. Begin with `connection`, which parses requests; `fast` answers small requests."""
