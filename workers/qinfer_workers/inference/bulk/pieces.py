"""The pieces of an unfinished shard, in the folder `_resume`. All calls block.

Readers never mistake a piece for a part: they skip the folder, and its metadata names more rows than it has.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qinfer.errors import StoreError, StoreNotFound
from qinfer.jobs.parts import PartWriter
from qinfer.jobs.plan import url_of
from qinfer.jobs.resumption import KeptPiece, PieceFile
from qinfer.storage.store import Store

StoreFor = Callable[[str], Store]


class PieceLost(StoreError):
    """A piece is gone, or damaged."""


def store_piece(
    store_for: StoreFor, output_url: str, folder: str, writer: PartWriter, faults: Sequence[str]
) -> KeptPiece:
    """Stores a piece under new names."""
    name = secrets.token_hex(8)
    files = []
    for path, suffix in zip(writer.paths, ("", ".failed"), strict=False):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        file_name = f"{folder}/{name}{suffix}"
        url = url_of(output_url, file_name)
        store_for(url).commit_if_absent(path, url)
        files.append(PieceFile(file_name, digest))
    return KeptPiece(writer.rows, writer.errors, files[0], files[1] if len(files) > 1 else None, tuple(faults))


@contextmanager
def fetched(store_for: StoreFor, output_url: str, piece: KeptPiece, path: Path) -> Iterator[Sequence[Path]]:
    """Fetches and checks the files of a piece."""
    files = [piece.good] if piece.failed is None else [piece.good, piece.failed]
    paths = [path, path.with_name(f"{path.name}.failed")][: len(files)]
    try:
        for file, target in zip(files, paths, strict=True):
            url = url_of(output_url, file.name)
            try:
                store_for(url).fetch(url, target)
            except StoreNotFound:
                raise PieceLost(f"'{url}' is gone") from None
            with target.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                    raise PieceLost(f"'{url}' has other content than was written")
        yield paths
    finally:
        for target in paths:
            target.unlink(missing_ok=True)
