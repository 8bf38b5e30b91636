from collections.abc import Mapping

TRANSPORT_ALIASES: Mapping[str, str]
