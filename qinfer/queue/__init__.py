"""The queue on Redis, and the wire it uses."""

MINIMUM_VERSION = (6, 2)
"""The oldest Redis with all commands of the queue."""
