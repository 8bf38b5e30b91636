"""Completes configurations with a backend's runtime, for the models that are stored as pending."""

from collections.abc import Callable
from pathlib import Path

from qinfer.errors import BackendUnavailable, QinferError
from qinfer.models.completion import Completion
from qinfer.models.config.config import from_json, normalise, to_json
from qinfer.models.config.message import ModelConfig
from qinfer.models.state import StoredModel

CompleteConfig = Callable[[ModelConfig, Path], ModelConfig]
"""What a backend offers: a configuration and the directory of a version → the configuration, completed; blocking."""


def complete(stored: StoredModel, directory: Path, run: CompleteConfig) -> Completion:
    """Completes a pending model's configuration; the model's own mistake is a result too. Blocking.

    Args:
        stored: The model.
        directory: Where the files of its highest version are.
        run: What completes configurations of its backend.

    Raises:
        BackendUnavailable: The runtime is not installed here; another worker may have it.
    """
    try:
        config = run(from_json(stored.config), directory)
        names = [path.name for path in directory.iterdir()]
        return Completion(config=to_json(normalise(config, stored.model, names)))
    except BackendUnavailable:
        raise
    except QinferError as error:
        return Completion(error=error.message)
