"""Copies of remote model files on this machine, which all its workers share.

    <cache>/<repository>/<model>/<version>-<key>/<version>/model.onnx    a copy, complete if it has this name
    <cache>/<repository>/<model>/<version>-<key>/warmup/…                the files beside the version directories
    <cache>/<repository>/<model>/<version>-<key>/.files.json             the stamps of the copied files
    <cache>/<repository>/<model>/content/<content hash>-<version>        a link to the copy for that content

The key is the hash of the stamps. A copy is made under a lock and renamed when complete, so that a killed worker leaves
no broken copy.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from qinfer.core.shared_folders import hold, remove_unused, used_at
from qinfer.errors import ModelLoadFailed
from qinfer.models.repository.files import Files, Listing, Stamp

logger = logging.getLogger(__name__)

COPIES = 2

UNUSED_S = 7 * 86400.0

MANIFEST = ".files.json"
_PARTIAL = ".partial-"
_THREADS = 4
_LOG_EVERY_S = 10.0
_ATTEMPTS = 3


class FilesCache:
    """The copies that one process makes and uses."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._guard = Lock()
        self._held: dict[tuple[str, int], list[int]] = {}
        """Descriptors that hold shared locks on the latest copies."""

    def version_dir(self, files: Files, repository: str, directory: str, version: int, content_hash: str = "") -> Path:
        """Returns the version directory of a copy; reads no remote file if there is a copy for `content_hash`."""
        model = directory.partition("/")[0]
        home = self._root / hashlib.sha256(repository.encode()).hexdigest()[:16] / model
        alias = home / "content" / f"{content_hash}-{version}"
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            copy = alias.resolve() if content_hash else alias
            if not content_hash or not (copy / MANIFEST).exists() or not self._hold(model, version, copy):
                copy = self._made(files, home, directory, version)
                if content_hash:
                    _link(alias, copy)
            os.utime(copy)
        except OSError as error:
            raise ModelLoadFailed(f"the files of model '{model}' can't be copied: {error.strerror or error}") from None
        self._sweep(home, version)
        return copy / str(version)

    def _made(self, files: Files, home: Path, directory: str, version: int) -> Path:
        for _ in range(_ATTEMPTS):
            wanted = _wanted(files.listing(directory), home.name, version)
            copy = home / f"{version}-{Listing(wanted, ()).digest()[:24]}"
            with _locked(home / ".lock"):
                for partial in home.glob(f"{_PARTIAL}*"):
                    shutil.rmtree(partial, ignore_errors=True)
                if not (copy / MANIFEST).exists():
                    shutil.rmtree(copy, ignore_errors=True)  # the remains of a removal
                    if not _copy(files, directory, version, wanted, copy):
                        continue
                if self._hold(home.name, version, copy):
                    return copy
        raise ModelLoadFailed(
            f"the files of model '{home.name}' change while they are copied; load it when they are complete"
        )

    def _hold(self, model: str, version: int, copy: Path) -> bool:
        """Keeps a copy from being removed; returns false if it is gone already."""
        descriptor = hold(copy, MANIFEST)
        if descriptor is None:
            return False
        with self._guard:
            held = self._held.setdefault((model, version), [])
            held.append(descriptor)
            while len(held) > COPIES + 1:
                os.close(held.pop(0))
        return True

    def _sweep(self, home: Path, version: int) -> None:
        copies = sorted(home.glob(f"{version}-*"), key=used_at, reverse=True)
        now_s = time.time()
        for copy in copies[COPIES:] + [c for c in self._root.glob("*/*/*-*") if used_at(c) < now_s - UNUSED_S]:
            remove_unused(copy, MANIFEST)
        for link in home.glob("content/*"):
            if not link.exists():
                link.unlink(missing_ok=True)


def _copy(files: Files, directory: str, version: int, wanted: dict[str, Stamp], copy: Path) -> bool:
    home = copy.parent
    partial = home / f"{_PARTIAL}{secrets.token_hex(8)}"
    partial.mkdir()
    try:
        known = _known_files(home)
        missing = {}
        for path, stamp in wanted.items():
            target = partial / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if (path, *stamp) not in known or not _try_link(known[path, *stamp], target):
                missing[path] = stamp
        _fetch(files, directory, partial, missing)
        if _wanted(files.listing(directory), home.name, version) != wanted:
            return False
        (partial / MANIFEST).write_text(json.dumps(wanted))
        partial.rename(copy)
    except FileNotFoundError:
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _wanted(listing: Listing | None, model: str, version: int) -> dict[str, Stamp]:
    wanted = {}
    if listing is not None:
        others = {str(v) for v in listing.versions() if v != version}
        wanted = {path: stamp for path, stamp in listing.files.items() if path.partition("/")[0] not in others}
    if not any(path.startswith(f"{version}/") for path in wanted):
        raise ModelLoadFailed(f"version {version} of model '{model}' is not in the model repository")
    return wanted


def _fetch(files: Files, directory: str, target: Path, wanted: dict[str, Stamp]) -> None:
    total = sum(stamp.size for stamp in wanted.values())
    begin_s = logged_s = time.monotonic()
    done = 0
    extra = {"model": directory.partition("/")[0], "files": len(wanted), "bytes": total}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as threads:
        fetches = {path: threads.submit(files.fetch, f"{directory}/{path}", target / path) for path in wanted}
        try:
            for path, fetch in fetches.items():
                fetch.result()
                done += wanted[path].size
                if time.monotonic() - logged_s > _LOG_EVERY_S:
                    logged_s = time.monotonic()
                    logger.info("model files being fetched", extra={**extra, "done_bytes": done})
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    if wanted:
        logger.info("model files fetched", extra={**extra, "seconds": round(time.monotonic() - begin_s, 3)})


def _known_files(home: Path) -> dict[tuple[str, int, str], Path]:
    known = {}
    for manifest in home.glob(f"*/{MANIFEST}"):
        try:
            for path, (size, mark) in json.loads(manifest.read_text()).items():
                if mark:
                    known[path, size, mark] = manifest.parent / path
        except (OSError, ValueError):
            continue
    return known


def _try_link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _link(alias: Path, copy: Path) -> None:
    alias.parent.mkdir(exist_ok=True)
    partial = alias.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    partial.symlink_to(copy)
    partial.rename(alias)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
