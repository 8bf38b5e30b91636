"""The queue on Redis. Its coroutines raise `BrokerUnavailable` when Redis can't be reached in time."""

MINIMUM_VERSION = (6, 2)
"""The oldest supported Redis."""
