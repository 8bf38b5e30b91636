"""The inputs of a job: lists files, and reads their footers.

Folders of Delta, Iceberg and Hudi tables are refused: only the log of a table says which files belong to it, and others
may have deleted or rewritten rows. A job may still name files one by one.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import BinaryIO, Literal, NamedTuple, TypeGuard

import pyarrow as pa

from qinfer.errors import (
    Forbidden,
    InputMissing,
    InvalidRequest,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
)
from qinfer.storage.local import local_path
from qinfer.storage.open import store_for
from qinfer.storage.store import Stat, patiently
from qinfer.tabular.footers import FOOTER_BYTES, arrow_schema, batch_rows, open_arrow, read_metadata
from qinfer.tabular.spec import Cut, InputFormat
from qinfer.tabular.text_rows import OnBlock, read_through, text_schema
from qinfer.tabular.text_streams import COMPRESSED_EXTENSIONS, NotText, TextFormat, check_text, open_stream
from qinfer.tabular.texts import NOTHING_WANTED, TextTypes

MAX_FILES = 1_000_000

FileFormat = Literal["parquet", "arrow", "csv", "jsonl"]

_EXTENSIONS: dict[str, FileFormat] = {
    "parquet": "parquet", "pq": "parquet", "parq": "parquet",
    "arrow": "arrow", "feather": "arrow", "ipc": "arrow",
    "csv": "csv",
    "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl",
}  # fmt: skip
TEXT_FORMATS = ("csv", "jsonl")
_THREADS = 16
_SMALL_BATCH_BYTES = 256 * 1024
_REASON_CHARACTERS = 200
_CHUNKS = 6  # a worker holds three at once, as rows and tensors
_TOO_MANY = f"the inputs are more than {MAX_FILES} files; make several jobs"
_HIDDEN = "(?![._])"  # as usual: `_SUCCESS`, `.part-0.crc`
_HIDDEN_BELOW = re.compile(r"/[._]")


class SourceBroken(InvalidRequest):
    """An input file is damaged, lacks planned columns, or takes too much memory."""


class ReadLimits(NamedTuple):
    """Memory limits: decoded rows, footer."""

    rows_bytes: int
    footer_bytes: int = FOOTER_BYTES

    @classmethod
    def from_read_bytes(cls, read_bytes: int, footer_bytes: int = FOOTER_BYTES) -> "ReadLimits":
        """Returns the limits for `bulk.max_read_bytes`."""
        return cls(read_bytes // _CHUNKS, footer_bytes)

    @property
    def process_bytes(self) -> int:
        """The memory of a process that reads, beyond its libraries."""
        return 4 * _CHUNKS * self.rows_bytes + 8 * max(0, self.footer_bytes - FOOTER_BYTES)


class Footer(NamedTuple):
    """Text has `cuts` instead of row `groups`."""

    schema: pa.Schema
    rows: int
    groups: tuple[int, ...] | None
    cuts: tuple[Cut, ...] = ()


CheckRead = Callable[[str], None]
"""Raises `Forbidden` for files or folders that may not be read; follows links."""


def find_files(
    inputs: Sequence[str],
    check_read: CheckRead = lambda _: None,
    *,
    enough: int = MAX_FILES + 1,
    within_s: float = math.inf,
    looks_above: bool = True,
) -> list[Stat]:
    """Lists the files of a job: inputs in their order, files of a pattern sorted, without repeats.

    `*` matches part of a name, `**` any folders, `[0-9]` one of some characters; only patterns that begin with `_` or
    `.` match such names. A file or folder with the pattern as its name takes precedence. A folder means all files below
    it.

    `check_read` is called before a file or folder is opened, and for each match. The listing stops after `enough`
    files, if each pattern has a match.
    """
    until_s = time.monotonic() + within_s
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="qinfer-list") as pool:
        # The listing of an object store shows whether an object has the name of a pattern; the listing of a directory
        # may stop earlier.
        literal = [url for url in inputs if "*" not in url or local_path(url)]
        for url in literal:
            check_read(url)
        stats = _stats(literal, pool)
        folders: dict[str, dict[str, re.Pattern[str]]] = {}
        for url in inputs:
            if stats.get(url) is None:
                folder = _folder(url)
                check_read(folder)
                if looks_above and folder not in folders:
                    check_above(folder, check_read)
                folders.setdefault(folder, {})[url] = _compiled(url[len(folder) :].lstrip("/") or "**")
        listings = pool.map(lambda folder: _listing(folder, folders[folder], enough, until_s), folders)
        try:
            matches = {url: files for listing in listings for url, files in listing.items()}
        except StoreNotFound as error:
            raise InputMissing(error.message) from None
    found: dict[str, Stat] = {}
    for url in inputs:
        stat = stats.get(url)
        for file in [stat] if stat is not None else matches.get(url) or _none(url):
            if file.url not in found:
                check_read(file.url)
                found[file.url] = file
    if len(found) > MAX_FILES:
        raise InvalidRequest(_TOO_MANY)
    return list(found.values())


def _stats(urls: Sequence[str], pool: ThreadPoolExecutor) -> dict[str, Stat | None]:
    found: dict[str, Stat | None] = {}
    schemes: dict[str, list[str]] = {}
    for url in urls:
        schemes.setdefault(url.partition("://")[0], []).append(url)
    for own in schemes.values():
        found |= patiently(partial(store_for(own[0]).listed, own))
    others = [url for url in urls if url not in found]
    stats = pool.map(lambda url: patiently(lambda: store_for(url).stat(url)), others)
    return found | dict(zip(others, stats, strict=True))


def format_of(url: str, input_format: InputFormat) -> FileFormat:
    """Returns the format of a file: that of the job, or else the format of the file's extension."""
    if input_format:
        return input_format
    *_, inner, extension = ("", *url.rpartition("/")[2].lower().split("."))
    if extension in COMPRESSED_EXTENSIONS and _EXTENSIONS.get(inner) in TEXT_FORMATS:
        extension = inner
    if extension not in _EXTENSIONS:
        raise InvalidRequest(
            f"the extension of '{url}' names no format; set 'input_format' to parquet, arrow, csv or jsonl"
        )
    return _EXTENSIONS[extension]


def is_text(format_: FileFormat) -> TypeGuard[TextFormat]:
    """Returns whether a format is CSV or JSON lines."""
    return format_ in TEXT_FORMATS


def read_footer(
    file: Stat,
    format_: FileFormat,
    types: TextTypes = NOTHING_WANTED,
    *,
    columns_only: bool = False,
    on_block: OnBlock = lambda *_: None,
    footer_bytes: int = FOOTER_BYTES,
) -> Footer:
    """Reads columns and row counts; reads text to its end.

    With `columns_only`, rows may be missing, and one block of text suffices.
    """
    if not file.size_bytes:  # some tools leave empty files
        return Footer(pa.schema([]), 0, None if is_text(format_) else ())
    try:
        with store_for(file.url).open_known(file, sequential=is_text(format_) and not columns_only) as content:
            if format_ == "parquet":
                metadata = read_metadata(content, footer_bytes)
                groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
                footer = Footer(arrow_schema(content, metadata), sum(groups), groups)
            elif format_ == "arrow":
                footer = _arrow(content, file, footer_bytes, columns_only=columns_only)
            else:
                text = open_stream(content, file.url, format_, types.form)
                check_text(text, format_)
                if columns_only:
                    footer = Footer(text_schema(text, format_, types), 0, None)
                else:
                    contents = read_through(text, format_, types, on_block)
                    footer = Footer(contents.schema, contents.rows, None, contents.cuts)
        _read_names(footer.schema)
    except NotText as error:
        raise SourceBroken(f"'{file.url}' can't be read as {format_}: {reason_of(error)}") from None
    except (pa.ArrowException, ValueError, OSError) as error:
        raise SourceBroken(
            f"'{file.url}' can't be read as {format_}; is it damaged or cut off? {reason_of(error)}"
        ) from None
    except StoreDenied:
        if local_path(file.url) is None:  # expired credentials are not one file's fault
            raise
        raise SourceBroken(f"'{file.url}' may not be read by this server; change its permissions") from None
    return footer


def reason_of(error: Exception) -> str:
    """Returns a reader's error for a message."""
    words = " ".join(str(error).split())[:_REASON_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in words)


def _read_names(schema: pa.Schema) -> None:
    """Raises `ValueError` for names that are not UTF-8, which pyarrow decodes late."""
    types = [pa.struct(list(schema))]
    while types:
        found = types.pop()
        if pa.types.is_dictionary(found):
            types.append(found.value_type)
        for number in range(found.num_fields):
            field = found.field(number)
            field.name  # noqa: B018  it raises
            types.append(field.type)


def _arrow(content: BinaryIO, file: Stat, footer_bytes: int, *, columns_only: bool) -> Footer:
    reader = open_arrow(content, footer_bytes)
    count = reader.num_record_batches
    if columns_only:
        return Footer(reader.schema, 0, ())
    if count and file.size_bytes // count < _SMALL_BATCH_BYTES:  # a request for each batch takes longer
        with store_for(file.url).open_known(file, sequential=True) as whole:
            groups = batch_rows(whole, footer_bytes)
    else:
        groups = batch_rows(content, footer_bytes)
    return Footer(reader.schema, sum(groups), groups)


def _listing(folder: str, patterns: dict[str, re.Pattern[str]], enough: int, until_s: float) -> dict[str, list[Stat]]:
    found: dict[str, list[Stat]] = {url: [] for url in patterns}
    named: dict[str, list[Stat]] = {}
    tables: set[tuple[str, str]] = set()
    kept = 0
    for file in store_for(folder).scan(folder):
        name = file.url[len(folder) :].lstrip("/")
        if table := table_of_log(name):
            tables.add(table)
        for url, pattern in patterns.items():
            is_named = url != folder and f"{file.url}/".startswith(f"{url}/")
            if is_named and not _HIDDEN_BELOW.search(file.url[len(url) :]):
                named.setdefault(url, []).append(file)
            elif pattern.fullmatch(name):
                found[url].append(file)
            else:
                continue
            kept += 1
        if kept > MAX_FILES * len(patterns):
            raise InvalidRequest(_TOO_MANY)
        if time.monotonic() > until_s:
            raise StoreUnavailable(
                f"listing all files below '{folder}' takes too long; name files or folders further down"
            )
        if kept >= enough and all(found[url] or url in named for url in patterns):
            break
    found |= named
    check_names(folder, tables, (file.url[len(folder) :].lstrip("/") for files in found.values() for file in files))
    return {url: sorted(files) for url, files in found.items()}


def _none(url: str) -> list[Stat]:
    if _is_pattern(url):
        raise InputMissing(
            f"no file matches the input '{url}'; '*' stands for parts of a name and '**' for folders, and names that "
            "begin with '_' or '.' are left out"
        )
    if next(iter(store_for(url).scan(url)), None) is not None:
        raise InputMissing(f"input '{url}' is a folder whose files' names begin with '_' or '.'; name them")
    if (path := local_path(url)) is not None and path.is_dir():
        raise InputMissing(f"input '{url}' is a folder without files")
    raise InputMissing(f"input '{url}' does not exist" + (", nor a file below it" if path is None else ""))


def _is_pattern(url: str) -> bool:
    return "*" in url or "[" in url


def _folder(url: str) -> str:
    is_shown = "*" in url and not local_path(url)
    if not _is_pattern(url) or (not is_shown and next(iter(store_for(url).scan(url)), None) is not None):
        return url
    scheme, separator, path = url.partition("://")
    folder = re.split(r"[*\[]", path, maxsplit=1)[0].rpartition("/")[0]
    return f"{scheme}{separator}{folder or '/'}"


def _compiled(pattern: str) -> re.Pattern[str]:
    """Returns a pattern's regular expression, which takes long for no name.

    Atomic groups (`(?>…)`) match the text after a `*` at its first place only.
    """
    *folders, last = pattern.split("/")
    groups = [""]
    for segment in folders:
        if segment == "**":
            groups.append(f"(?:{_HIDDEN}[^/]+/)*?")
        else:
            groups[-1] += f"{_segment_regex(segment)}/"
    groups[-1] += f"(?:{_HIDDEN}[^/]+/)*{_HIDDEN}[^/]+" if last == "**" else f"{_segment_regex(last)}\\Z"
    try:
        return re.compile("".join(f"(?>{group})" for group in groups))
    except re.error:
        raise InvalidRequest(
            f"'{pattern}' of the inputs is not a valid pattern; write a range such as [0-9], or *"
        ) from None


def _segment_regex(segment: str) -> str:
    hidden = "" if segment[0] in "._" else _HIDDEN
    pieces = [""]
    for token in re.findall(r"\*+|\[!?[^\]]+\]|.", segment):
        if token.startswith("*"):
            pieces.append("")
        elif len(token) > 1:
            negated = token[1] == "!"
            inside = re.escape(token[2 if negated else 1 : -1]).replace(r"\-", "-")
            pieces[-1] += f"[{'^/' if negated else ''}{inside}]"
        else:
            pieces[-1] += re.escape(token)
    first, *others = pieces
    if not others:
        return hidden + first
    between = "".join(f"(?>[^/]*?{piece})" for piece in others[:-1])
    return f"{hidden}{first}{between}[^/]*{others[-1]}"


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
