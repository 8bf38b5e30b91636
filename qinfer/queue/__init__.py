"""The queue on Redis, and the wire it uses."""
