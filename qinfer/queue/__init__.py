"""The queue: one port (`base`), its Redis and memory adapters, and the wire they use."""
