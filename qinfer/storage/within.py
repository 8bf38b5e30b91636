"""Stores that are opened only for objects below certain prefixes, even through links in a directory."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from qinfer.core.store_urls import UrlGrant, is_below, not_allowed
from qinfer.storage.local import local_path
from qinfer.storage.open import store_for
from qinfer.storage.store import Store


def readable(grant: UrlGrant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores that a tenant may read."""
    return Within(grant.read, "read", grant.tenant, opener)


def writable(grant: UrlGrant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores for a tenant's outputs, also to read these back."""
    return Within(grant.write, "write", grant.tenant, opener)


class Within:
    """Opens the store of an object below a prefix, as `store_for`.

    All existing links in `file://` URLs and prefixes are resolved; one made after this check is not noticed. `use` is
    in the text of a refusal.
    """

    def __init__(
        self, prefixes: Sequence[str], use: str, tenant: str = "", opener: Callable[[str], Store] = store_for
    ) -> None:
        self._use = use
        self._tenant = tenant
        self._opener = opener
        paths = [path for prefix in prefixes if (path := local_path(prefix)) is not None]
        self._folders = [Path(os.path.realpath(path)) for path in paths]
        self._prefixes = [prefix for prefix in prefixes if local_path(prefix) is None]

    def __call__(self, url: str) -> Store:
        """Checks a URL, and returns its store."""
        self.check(url)
        return self._opener(url)

    def check(self, url: str) -> None:
        """Raises `Forbidden` outside of the prefixes."""
        path = local_path(url)
        if path is None:
            is_allowed = any(is_below(url, prefix) for prefix in self._prefixes)
        elif "\0" in path.as_posix():  # no file has this name
            is_allowed = False
        else:
            real = Path(os.path.realpath(path))
            is_allowed = any(real.is_relative_to(folder) for folder in self._folders)
        if not is_allowed:
            raise not_allowed(url, self._use, self._tenant)
