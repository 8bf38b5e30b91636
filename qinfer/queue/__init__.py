"""The queue on Redis. Its coroutines raise `BrokerUnavailable` when Redis can't be reached in time.

Begin with `lanes`, whose head lists the promises; the Lua scripts are in `lua/`.
"""

MINIMUM_VERSION = (6, 2)
