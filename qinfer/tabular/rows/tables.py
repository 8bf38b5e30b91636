"""Refuses folders of Delta, Iceberg and Hudi tables: only the log of a table says which files belong to it.

Other files in the folder may have deleted or rewritten rows. A job may still name files one by one.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from qinfer.errors import Forbidden, InvalidRequest, StoreError
from qinfer.storage.open import store_for

_MARKS = {
    "Delta": ("_delta_log", re.compile(r"[^/]+\.(?:json|parquet|crc)|_last_checkpoint")),
    "Iceberg": ("metadata", re.compile(r"[^/]+\.metadata\.json(?:\.gz)?|[^/]*\.gz\.metadata\.json|version-hint\.text")),
    "Hudi": (".hoodie", re.compile(r"hoodie\.properties|[^/]+\.(?:commit|deltacommit|inflight|requested)")),
}
"""Kind of table → the folder of its log, and the names of files in it."""
_FOLDERS = "|".join(re.escape(folder) for folder, _ in _MARKS.values())
_OF_LOG = re.compile(rf"(?P<root>.*?)(?:^|/)(?P<folder>{_FOLDERS})/(?P<name>[^/]+)")
_OF_HUDI = re.compile(r"(?:.*/)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-\d+_\d+-\d+-\d+_\d{14,17}\.(?:parquet|orc)")
_MOST_NAMES = 1000


def table_of_log(name: str) -> tuple[str, str] | None:
    """Returns folder and kind of the table that a log file belongs to."""
    found = _OF_LOG.fullmatch(name)
    if found is None:
        return None
    return next(
        (
            (found["root"], kind)
            for kind, (folder, files) in _MARKS.items()
            if folder == found["folder"] and files.fullmatch(found["name"])
        ),
        None,
    )


def check_names(folder: str, tables: Iterable[tuple[str, str]], names: Iterable[str]) -> None:
    """Raises `InvalidRequest` if a file belongs to a table below a folder."""
    known = list(tables)
    for name in names:
        for root, kind in known:
            if name.startswith(f"{root}/" if root else ""):
                raise InvalidRequest(_refusal_text(f"{folder}/{root}".rstrip("/"), kind))
        if _OF_HUDI.fullmatch(name):
            raise InvalidRequest(_refusal_text(f"{folder}/{name}".rpartition("/")[0], "Hudi"))


def check_above(folder: str, check_read: Callable[[str], None]) -> None:
    """Raises `InvalidRequest` if a readable parent is a table."""
    for above in _above(folder):
        with suppress(StoreError, Forbidden):
            check_read(above)
            there = store_for(above).possible_folders(above, [name for name, _ in _MARKS.values()])
            for kind, (name, files) in _MARKS.items():
                if name in there and _is_log(f"{above}/{name}", files):
                    raise InvalidRequest(_refusal_text(above, kind))


def _is_log(folder: str, files: re.Pattern[str]) -> bool:
    names = (file.url.removeprefix(folder).lstrip("/") for file in store_for(folder).scan(folder))
    return any(files.fullmatch(name) for name in islice(names, _MOST_NAMES))


def _above(folder: str) -> Iterator[str]:
    scheme, separator, path = folder.partition("://")
    parts = path.rstrip("/").split("/")
    is_local = not separator or scheme == "file"
    least = 2 if is_local else 1  # beneath the root, or a bucket
    for end in range(len(parts) - (not is_local), least - 1, -1):  # hidden folders are not listed
        yield f"{scheme}{separator}{'/'.join(parts[:end])}"


def _refusal_text(url: str, kind: str) -> str:
    return (
        f"'{url}' is a table of {kind}, whose folder also has files with deleted rows; tables are not read yet: write "
        "the table's rows to files of their own, or name each file that is to be read"
    )
