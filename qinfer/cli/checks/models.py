"""`qinfer models check`: reads the models of a repository or an app as a gateway and a worker do, without them."""

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import msgspec
from google.protobuf import text_format

from qinfer.backends import registry
from qinfer.backends.parameters import use_model_variables
from qinfer.cli.local.machine import LAYOUT, check_repository
from qinfer.core.processes import model_environment
from qinfer.core.settings import load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.functions.repository import write_repository
from qinfer.models.config.config import from_json, normalise
from qinfer.models.config.to_spec import to_spec
from qinfer.models.dependents import missing_uses
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.state import StoredModel


class CheckedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model with its completed configuration as text, or its error."""

    model: str
    version: int = 0
    config: str = ""
    error: str = ""


def check_place(place: str) -> list[CheckedModel]:
    """Returns the models of a repository or an app; raises `QinferError` if there are none, or it can't be read."""
    settings = load_settings()
    environment = model_environment(os.environ, settings.worker.model_env)
    use_model_variables(environment)
    with tempfile.TemporaryDirectory(prefix="qinfer-check-") as home:
        if place.partition(":")[0].endswith(".py") or (Path(place) / "__init__.py").is_file():
            write_repository([place], Path(home), environment)
            root = home
        else:
            check_repository(place)
            root = place
        repositories = open_repositories(settings.repository.model_copy(update={"path": root}))
        found = repositories.scan()
        if not found:
            raise SettingsError(f"{place} has no model; {LAYOUT}")
        return [_checked(model, repositories, {each.model for each in found}) for model in found]


def _checked(model: StoredModel, repositories: Repositories, known: Collection[str]) -> CheckedModel:
    error = model.error
    if not error and (missing := missing_uses([model], known)):
        error = f"it uses model '{missing[0]}', which is not in this repository"
    if error:
        return CheckedModel(model.model, error=error)
    try:
        config = from_json(model.config)
        if model.pending:
            files = repositories.version_dir(model.files, model.versions[-1])
            completed = registry.completer(model.pending)(config, files)
            config = normalise(completed, model.model, [path.name for path in files.iterdir()])
        to_spec(config)
    except QinferError as refused:
        return CheckedModel(model.model, error=refused.message)
    return CheckedModel(model.model, model.versions[-1], text_format.MessageToString(config))
