"""The contract of model repositories, and one model as a repository has it.

Models are in Triton's layout: `<model>/config.pbtxt` and `<model>/<version>/model.onnx` (reference §3.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from qinfer.models.config.message import ModelConfig

_FORBIDDEN = frozenset("/\\{}\0")  # braces would break the hash tag of the model's keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryModel:
    """One model as the repositories have it.

    Attributes:
        name: The name of its directory.
        config: Its normalised configuration; `None` when there is an error. With `pending` it is not complete, nor
            checked, and of the defaults it has those of the instance groups only.
        versions: The versions that its version policy selects, ascending.
        content_hash: Changes with the configuration's text and with path, size or modification time of any file.
        error: Why it can't be loaded; empty when it can. Clients see it.
        labels: Output → the names of its classes (`label_filename`).
        pending: The backend whose runtime must complete the configuration; empty = it is complete.
        location: Where its files are within the overlay; empty = in the repositories.
    """

    name: str
    config: ModelConfig | None = None
    versions: tuple[int, ...] = ()
    content_hash: str = ""
    error: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pending: str = ""
    location: str = ""


class Repository(Protocol):
    """A source of models. Every method blocks, and may be called from several threads at once."""

    def names(self) -> list[str]:
        """Returns the names of all models, sorted, without reading any of them.

        Raises:
            SettingsError: A repository can't be read.
        """
        ...

    def scan(self) -> list[RepositoryModel]:
        """Reads every model, sorted by name; one that can't be used carries its error and hides no other.

        Raises:
            SettingsError: A repository can't be read.
        """
        ...

    def read(self, name: str, override: str = "", location: str = "") -> RepositoryModel:
        """Reads one model.

        Args:
            name: The model's name.
            override: A configuration in JSON that is used in place of the model's `config.pbtxt`; empty = none.
            location: A directory of the overlay, as `put_files` returned it, whose files are used in place of the
                repositories'; empty = none.

        Returns:
            The model; one that can't be used carries its error.

        Raises:
            ModelNotFound: No repository has the name, or the overlay has not the location.
            ModelLoadFailed: The repository can't be read now.
        """
        ...


def is_model_name(name: str) -> bool:
    """Tells whether a directory of this name can be a model."""
    return bool(name) and not name.startswith(".") and name.isprintable() and _FORBIDDEN.isdisjoint(name)
