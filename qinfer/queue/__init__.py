"""The queue on Redis, and the wire it uses."""

MINIMUM_VERSION = (6, 2)
"""The oldest Redis that has the commands of the queue."""
