"""Which worker places which model: by the globs of `WorkerSettings.models`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_placed(model: str, globs: Sequence[str]) -> bool:
    """Tells whether a worker with these globs should load the model; case matters."""
    return any(fnmatchcase(model, glob) for glob in globs)
