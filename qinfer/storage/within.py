"""Stores that are opened only for objects below certain prefixes, wherever links in a directory lead."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from qinfer.core.store_urls import Grant, is_below, not_allowed
from qinfer.storage.local import local_path
from qinfer.storage.open import store_for
from qinfer.storage.store import Store


def readable(grant: Grant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores of the objects that a tenant's requests may read."""
    return Within(grant.read, "read", grant.tenant, opener)


def writable(grant: Grant, opener: Callable[[str], Store] = store_for) -> "Within":
    """Returns the stores of the outputs that a tenant's requests may write, and read to go on with them."""
    return Within(grant.write, "write", grant.tenant, opener)


class Within:
    """Opens the store of an object, if that is below a prefix; called as `store_for` is.

    A `file://` URL is followed through all links, as far as it exists, and so are the prefixes: a link out of them is
    refused, whoever made it. A link that is made between this look and the use of the object is not noticed.

    Args:
        prefixes: The URL prefixes, each in its one spelling.
        use: What is done with the objects, in words, for the text of a refusal.
        tenant: The tenant whose prefixes they are; empty = they are everyone's.
        opener: Opens the store of a URL.
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
        """Returns the store of an object, or of a folder.

        Raises:
            Forbidden: It is below no prefix.
            InvalidRequest: Its store is of no kind that jobs can use.
            StoreError: Its store can't be opened.
        """
        self.check(url)
        return self._opener(url)

    def check(self, url: str) -> None:
        """Checks that an object or a folder is below a prefix.

        Raises:
            Forbidden: It is below none.
        """
        path = local_path(url)
        if path is None:
            is_allowed = any(is_below(url, prefix) for prefix in self._prefixes)
        elif "\0" in path.as_posix():  # no file has such a name
            is_allowed = False
        else:
            real = Path(os.path.realpath(path))
            is_allowed = any(real.is_relative_to(folder) for folder in self._folders)
        if not is_allowed:
            raise not_allowed(url, self._use, self._tenant)
