"""How fsspec's drivers are opened, wherever a URL of a store is: for models, large payloads, bulk jobs. Pure."""

from collections.abc import Mapping
from typing import Any

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60

_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"max_attempts": 2},
        }
    },
    "gcs": {"requests_timeout": READ_TIMEOUT_S},
    "azure": {"connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S},
}


def is_bucket(scheme: str) -> bool:
    """Tells whether a scheme is that of an object store which qinfer has an extra for."""
    return scheme in _EXTRAS


def options_of(scheme: str) -> dict[str, Any]:
    """Returns what the file system of a scheme is opened with: nothing is cached, nobody waits for long."""
    return {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(_EXTRAS.get(scheme, ""), {})}


def remedy(scheme: str) -> str:
    """Returns how the driver of a scheme is installed."""
    extra = _EXTRAS.get(scheme)
    return f"pip install 'qinfer-ml[{extra}]'" if extra else f"install fsspec's driver for {scheme}://"
