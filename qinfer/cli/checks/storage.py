"""Checks of the model repositories with every model's configuration, and of the object stores in the settings."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from qinfer.cli.checks.report import Finding, ok, problem, warning
from qinfer.core.settings import RepositorySettings, Settings
from qinfer.errors import QinferError, SettingsError
from qinfer.models.config.message import from_json
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import StoredModel

T = TypeVar("T")

_LIMIT_S = 30.0
_DEFAULT = "models"


def read_models(settings: RepositorySettings) -> tuple[list[Finding], Sequence[StoredModel]]:
    """Reads every model of the repositories; blocking.

    Returns:
        The findings, and the models.
    """
    subject = "model repository"
    is_default = settings.path == _DEFAULT
    if is_default and not Path(_DEFAULT).is_dir():
        text = f"the default directory '{_DEFAULT}' does not exist, and no other is set"
        return [warning(subject, text, "give --model-repository, or set QINFER_REPOSITORY__PATH")], ()
    try:
        models = _within(open_repositories(settings).scan)
    except (SettingsError, TimeoutError) as error:
        text = error.message if isinstance(error, SettingsError) else f"no answer within {_LIMIT_S:g} s"
        return [
            problem(subject, f"{_shown(settings.path)}: {text}", "correct QINFER_REPOSITORY__PATH, or its store")
        ], ()
    wrong = [model for model in models if model.error]
    findings = [
        problem(
            "model", f"{model.model}: {model.error}", "correct its files; docs/reference/model-config.md has the fields"
        )
        for model in wrong
    ]
    place = _shown(settings.path)
    if not models:
        findings.append(warning(subject, f"{place} has no model"))
    else:
        findings.append(ok(subject, f"{place}: {len(models) - len(wrong)} of {len(models)} models are valid"))
    return findings, models


def needed_backends(models: Sequence[StoredModel]) -> dict[str, str]:
    """Returns the backends in the models' configurations, each with the name of a model."""
    return {from_json(model.config).backend: model.model for model in reversed(models) if model.config}


def examine_stores(settings: Settings) -> Iterator[Finding]:
    """Yields a finding for each store of the settings; blocking."""
    if not settings.stores.allow:
        yield ok("stores", "none is allowed (QINFER_STORES__ALLOW), so bulk jobs are off")
    for url in settings.stores.allow:
        yield _store(f"store {_shown(url)}", url)
    if settings.limits.payload_url:
        yield _store("payload store", settings.limits.payload_url)


def _store(subject: str, url: str) -> Finding:
    remedy = "check the bucket, and the credentials and endpoint in the store's own variables"
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        path = Path(unquote(parts.path))
        if not path.is_dir():
            return problem(subject, f"{path} is not a directory on this machine", "create or mount it")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return warning(subject, f"{path} can't be written by this user", "required if jobs write there")
        return ok(subject, "readable and writable")
    try:
        from qinfer.storage.open import store_for

        _within(lambda: next(iter(store_for(url).scan(url)), None))
    except QinferError as error:
        return problem(subject, error.message, remedy)
    except TimeoutError:
        return problem(subject, f"no answer within {_LIMIT_S:g} s", remedy)
    return ok(subject, "readable")


def _within(work: Callable[[], T]) -> T:
    """Runs blocking work in a thread, which is abandoned when it takes too long.

    Raises:
        TimeoutError: The work took too long.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="doctor")
    try:
        return threads.submit(work).result(_LIMIT_S)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _shown(path: str) -> str:
    """Returns a repository's path or URL without user and password."""
    parts = urlsplit(path)
    return (
        path.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc and ":" in parts.netloc else path
    )
