"""What `qinfer up` decides about bulk jobs: whether their worker can run here, and what jobs may read and write."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from qinfer.cli.overview import with_url
from qinfer.core.settings import Settings
from qinfer.core.store_urls import normalised
from qinfer.errors import SettingsError
from qinfer.jobs.tasks import broker_of

_NEEDED = ("celery", "pyarrow")


def allowed_stores(given: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Returns what jobs may read and write: the options of `up`, and the setting.

    Args:
        given: URLs such as s3://bucket/folder, and directories of this machine.
        settings: For `stores.allow`.

    Raises:
        SettingsError: One is neither.
    """
    urls = [place if "://" in place else f"file://{Path(place).resolve()}" for place in given]
    try:
        return tuple(dict.fromkeys([*map(normalised, urls), *settings.stores.allow]))
    except SettingsError as error:
        raise SettingsError(f"--allow-store: {error.message}") from None


def why_no_bulk_worker(settings: Settings, redis_url: str) -> str:
    """Says why there is no bulk worker, or what to do for one; empty = one can run.

    Args:
        settings: From the environment.
        redis_url: The Redis that is used.
    """
    if not settings.bulk.enabled:
        return "QINFER_BULK__ENABLED is false"
    if not settings.stores.allow:
        return "give what they may read and write: --allow-store ./data"
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed: pip install 'qinfer-ml[bulk]'"
    try:
        broker_of(settings.model_copy(update={"redis": with_url(settings.redis, redis_url)}))
    except SettingsError as error:
        return error.message
    return ""


def jobs_line(settings: Settings, no_worker: str) -> str:
    """Returns what the summary says about bulk jobs.

    Args:
        settings: With what jobs may read and write.
        no_worker: Why there is no bulk worker; empty = there is one.
    """
    return f"off; {no_worker}" if no_worker else f"within {', '.join(settings.stores.allow)}"
