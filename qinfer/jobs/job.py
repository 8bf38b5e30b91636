"""A bulk job's specification, as users write it in JSON, and its states. No I/O."""

import codecs
import math
import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest
from qinfer.tabular.spec import Columns, Csv, InputCompression, InputFormat, SomeTexts, Text, Texts, shown

OutputFormat = Literal["parquet", "arrow", "csv", "jsonl"]
FailedRows = Literal["inline", "separate"]
BadFiles = Literal["fail", "skip"]
Partitioning = Literal["", "hive"]
Priority = Literal["high", "normal", "low"]
OnVersionChange = Literal["wait", "fail"]

PRIORITIES: Mapping[str, int] = {"high": 1, "normal": 2, "low": 3}
"""Priority → the number of its bulk lane; lane 1 goes first."""

COMPRESSIONS: Mapping[str, tuple[str, ...]] = {
    "parquet": ("snappy", "zstd", "lz4", "gzip", "brotli", "none"),
    "arrow": ("zstd", "lz4", "none"),
    "csv": ("none", "gzip", "zstd"),
    "jsonl": ("none", "gzip", "zstd"),
}

TEXT_FORMATS = frozenset({"csv", "jsonl"})

LEVELS: Mapping[str, int] = {"zstd": 19, "lz4": 12, "gzip": 9, "brotli": 11}
"""Compression → its highest level. High levels of zstd need hundreds of megabytes."""

MAX_INPUTS = 1000
MAX_COLUMNS = 10_000
MAX_METADATA = 64
MAX_METADATA_CHARACTERS = 1024
MAX_NULL_CHARACTERS = 1024
MAX_DEADLINE_S = 365 * 86400.0
MAX_PARALLEL = 10_000

NO_ESCAPE = "none"
"""`csv.escape` of files that escape a quote by doubling it."""

ENCODINGS = frozenset(
    codecs.lookup(name).name
    for name in (
        *("utf-8", "utf-8-sig", "ascii"),
        *(f"iso8859-{number}" for number in range(1, 17) if number != 12),
        *(f"cp125{number}" for number in range(9)),
        *("cp437", "cp850", "cp852", "cp866", "mac-roman", "koi8-r", "koi8-u"),
        *("shift_jis", "cp932", "euc_jp", "gbk", "gb18030", "big5", "euc_kr", "cp949"),
    )
)

COLUMN_TYPES = (
    *("string", "bool", "date32", "float32", "float64"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *(f"timestamp[{unit}{zone}]" for unit in ("s", "ms", "us", "ns") for zone in ("", ", tz=UTC")),
)
"""Arrow types for text columns; also `decimal128(P, S)`, of P digits with S after the point."""

_DECIMAL = re.compile(r"decimal128\(([1-9][0-9]?), ?([0-9]{1,2})\)")
_MOST_DIGITS = 38
_PATTERN = re.compile(r"/\*{1,2}(?:/|$|\.)")  # a folder may have an asterisk in its name

# Constraints of the JSON schema; `check_spec` has better messages.
_Size = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
Natural = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Seconds = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Threshold = Annotated[float, Meta(extra_json_schema={"minimum": -1})]
_Inputs = Annotated[Texts, Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_INPUTS})]
_Compression = Annotated[
    str, Meta(extra_json_schema={"enum": ["", *sorted({name for names in COMPRESSIONS.values() for name in names})]})
]


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location and format of the parts.

    Attributes:
        url: A folder's URL; the folder has to be empty, except for jobs that `overwrite`.
        format: The format of the parts.
        compression: parquet: snappy, zstd, lz4, gzip, brotli or none; arrow: zstd, lz4 or none; csv and jsonl: none,
            gzip or zstd. Empty = the first of the format, which costs the least processor time.
        compression_level: 1 = the least processor time, the highest = the smallest parts: zstd to 19 (no levels in csv
            and jsonl), lz4 to 12, gzip to 9, brotli to 11; 0 = the default.
        rows_per_part: The most rows of one part; 0 = the server decides.
        partition_by: Partition columns of the inputs (`partitioning`). Parts lack these columns and are in folders of
            their names and values, such as `country=de/`.
        tensors: The output tensors that the model computes and the job writes; empty = all.
        columns: Output tensor → the name of its column; default: the tensor's name.
        top_k: Output tensor → how many of its greatest elements are written instead of all. Their columns have the
            tensor's name with `_label` (if the model has labels), `_index` and `_score`; 1 = plain columns, more =
            lists, the greatest first.
        failed_rows: `inline` = failed rows stay in the parts, in their places, with an error; `separate` = they are in
            files in the folder `_failed`, with errors, files and row numbers.
    """

    url: str
    format: OutputFormat = "parquet"
    compression: _Compression = ""
    compression_level: Natural = 0
    rows_per_part: Natural = 0
    partition_by: Texts = ()
    tensors: Texts = ()
    columns: dict[str, str] = {}
    top_k: dict[str, _Size] = {}
    failed_rows: FailedRows = "inline"

    def __post_init__(self) -> None:
        if not self.compression:
            msgspec.structs.force_setattr(self, "compression", COMPRESSIONS[self.format][0])

    @property
    def is_split(self) -> bool:
        """Whether failed rows are in files of their own."""
        return self.failed_rows == "separate"

    @property
    def extension(self) -> str:
        """The extension of the parts' names, without the first dot."""
        if self.format not in TEXT_FORMATS:
            return self.format
        return self.format + {"gzip": ".gz", "zstd": ".zst"}.get(self.compression, "")


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bulk job as users ask for it.

    Attributes:
        model: The model's name.
        inputs: URLs of files and folders, and patterns such as `s3://bucket/in/*.parquet`; rows keep their order.
        output: Location and format of the parts.
        version: The model's version; 0 = the newest at creation.
        input_format: The format of the inputs; empty = by their extensions.
        input_compression: The compression of CSV and JSON lines inputs; empty = by their extensions.
        csv: The form of CSV inputs.
        columns: Input tensor → its column, a list of scalar columns that form a row, or `Columns`; default: the column
            of the tensor's name.
        key: A column that identifies rows, copied to the output; empty = rows have file, row group and row number.
        passthrough: Columns that are copied to the output; `*` = all.
        exclude: Columns that `passthrough: ["*"]` leaves out.
        types: Column of CSV, field of JSON lines, or partition column → the type of its values, such as `int64`;
            columns without a type are copied as text. A row with another value fails.
        partitioning: `hive` = folders such as `country=de` in the files' URLs are columns, too; empty = they are not.
        bad_files: `fail` = an unreadable input file fails the job; `skip` = the job skips and lists it.
        priority: Shards of a higher priority go first.
        on_version_change: If the planned model version is unavailable or changed, the job waits for it (`wait`) or
            fails (`fail`).
        error_threshold: The job fails when more rows than this fail: a number of rows, a fraction between 0 and 1, or
            -1 = never.
        max_parallel: The most shards that run at a time; 0 = the number of workers.
        deadline_s: Seconds after its creation at which the job expires; 0 = never.
        limit: The number of rows to score, from the first; 0 = all.
        overwrite: Whether planning removes the files of an ended job from the output folder; other files stay.
        merge_schema: Whether columns may be missing in some input files; they are null there.
        metadata: The user's own words, kept with the job.
        webhook: URL that is notified of the end by a signed POST.

    Example:
        {"model": "digits", "inputs": ["s3://bucket/in/*.parquet"], "columns": {"image": "pixels"}, "key": "id",
         "output": {"url": "s3://bucket/out", "format": "parquet"}}
    """

    model: str
    inputs: _Inputs
    output: Output
    version: Natural = 0
    input_format: InputFormat = ""
    columns: dict[str, Text | SomeTexts | Columns] = {}
    key: str = ""
    passthrough: Texts = ()
    exclude: Texts = ()
    partitioning: Partitioning = ""
    bad_files: BadFiles = "fail"
    priority: Priority = "normal"
    on_version_change: OnVersionChange = "wait"
    error_threshold: Threshold = 0.0
    max_parallel: Natural = 0
    deadline_s: Seconds = 0.0
    limit: Natural = 0
    metadata: dict[str, str] = {}
    webhook: str = ""
    # Not written while unset: the previous release can read such jobs.
    input_compression: InputCompression | msgspec.UnsetType = msgspec.UNSET
    csv: Csv | msgspec.UnsetType = msgspec.UNSET
    overwrite: bool | msgspec.UnsetType = msgspec.UNSET
    merge_schema: bool | msgspec.UnsetType = msgspec.UNSET
    types: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        plain = {"overwrite": False, "merge_schema": False, "types": {}, "input_compression": "", "csv": Csv()}
        for name, value in plain.items():
            if getattr(self, name) == value:
                msgspec.structs.force_setattr(self, name, msgspec.UNSET)

    @property
    def compression_of_inputs(self) -> InputCompression:
        """The compression of text inputs; empty = by extension."""
        return "" if self.input_compression is msgspec.UNSET else self.input_compression

    @property
    def column_types(self) -> Mapping[str, str]:
        """Column → the type that the job gives it."""
        return {} if self.types is msgspec.UNSET else self.types

    @property
    def csv_form(self) -> Csv:
        """The form of CSV inputs; the encoding has Python's name."""
        if self.csv is msgspec.UNSET:
            return Csv()
        escape = "" if self.csv.escape == NO_ESCAPE else self.csv.escape
        return msgspec.structs.replace(self.csv, encoding=codecs.lookup(self.csv.encoding).name, escape=escape)

    def with_escape(self, escape: str) -> "JobSpec":
        """Returns the job with an escape character, if one is given."""
        given = Csv() if self.csv is msgspec.UNSET else self.csv
        return msgspec.structs.replace(self, csv=msgspec.structs.replace(given, escape=escape)) if escape else self

    def columns_of(self, tensor: str) -> Columns:
        """Returns the columns of an input tensor; default: the column of its name."""
        given = self.columns.get(tensor, tensor)
        if isinstance(given, str):
            return Columns((given,))
        return given if isinstance(given, Columns) else Columns(given)

    def column_of(self, tensor: str) -> str:
        """Returns the column that an output tensor is written to."""
        return self.output.columns.get(tensor, tensor)

    def max_errors(self, rows: int) -> int:
        """Returns how many rows may fail; -1 = all."""
        if self.error_threshold < 0:
            return -1
        share = self.error_threshold < 1
        return math.floor(Fraction(str(self.error_threshold)) * rows) if share else int(self.error_threshold)


T = TypeVar("T", bound=JobSpec)


class JobState(StrEnum):
    """The states of a job."""

    VALIDATING = "validating"
    PLANNING = "planning"
    RUNNING = "running"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


ENDED_EARLY = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
"""States of a job that ended early and can be resumed."""

TERMINAL = ENDED_EARLY | {JobState.COMPLETED}


def decode_spec(body: bytes) -> JobSpec:
    """Decodes and checks a specification."""
    return decode_spec_as(body, JobSpec)


def decode_spec_as(body: bytes, kind: type[T]) -> T:
    """Decodes and checks a specification type with more fields."""
    try:
        spec = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explained(str(error), body, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the job is no JSON: {error}") from None
    check_spec(spec)
    return spec


def encode_spec(spec: JobSpec) -> bytes:
    """Returns a specification as JSON."""
    return msgspec.json.encode(spec)


def with_checked_urls(spec: JobSpec, grant: UrlGrant) -> JobSpec:
    """Returns the job with normalized, granted URLs."""
    inputs = tuple(map(grant.check_read, spec.inputs))
    output = msgspec.structs.replace(spec.output, url=grant.check_write(spec.output.url))
    return msgspec.structs.replace(spec, inputs=tuple(dict.fromkeys(inputs)), output=output)


def check_spec(spec: JobSpec) -> None:
    """Checks everything that needs neither the model nor the inputs."""
    if not spec.model:
        raise InvalidRequest("field 'model' is empty; name a model")
    if spec.version < 0:
        raise InvalidRequest(f"field 'version' is {spec.version}; name a version, or 0 for the newest")
    if not spec.inputs:
        raise InvalidRequest(
            "field 'inputs' is empty; name at least one file or pattern, such as s3://bucket/in/*.parquet"
        )
    if len(spec.inputs) > MAX_INPUTS:
        raise InvalidRequest(f"field 'inputs' has {len(spec.inputs)} entries; at most {MAX_INPUTS}: use patterns")
    _check_output(spec.output)
    if spec.csv is not msgspec.UNSET:
        _check_csv(spec.csv)
    _check_columns(spec)
    _check_types(spec.column_types)
    _check_limits(spec)


def _check_output(output: Output) -> None:
    if not output.url:
        raise InvalidRequest("field 'output.url' is empty; name a folder, such as s3://bucket/out")
    if _PATTERN.search(output.url):
        raise InvalidRequest("field 'output.url' is a pattern; name one folder, such as s3://bucket/out")
    known = COMPRESSIONS[output.format]
    if output.compression not in known:
        raise InvalidRequest(
            f"field 'output.compression' is '{shown(output.compression)}'; {output.format} has {', '.join(known)}"
        )
    is_stream = output.format in TEXT_FORMATS and output.compression == "zstd"
    highest = 0 if is_stream else LEVELS.get(output.compression, 0)
    if not 0 <= output.compression_level <= highest:
        raise InvalidRequest(
            f"field 'output.compression_level' is {output.compression_level}; {output.compression} of {output.format} "
            + (f"has 1 to {highest}, or 0 for the default" if highest else "has no levels: leave it out")
        )
    if not 0 <= output.rows_per_part < 2**31:
        raise InvalidRequest(
            f"field 'output.rows_per_part' is {output.rows_per_part}; 1 or more, or 0 to leave it to the server"
        )
    _check_names("output.tensors", output.tensors)
    _check_names("output.columns", tuple(output.columns.values()), repeats=True)
    for tensor, count in output.top_k.items():
        if not 0 < count < 2**31:
            raise InvalidRequest(f"field 'output.top_k.{shown(tensor)}' is {count}; 1 or more")


def _check_csv(csv: Csv) -> None:
    for name in ("delimiter", "quote", "escape", "decimal_point"):
        value = getattr(csv, name)
        if name == "escape" and value in ("", NO_ESCAPE):
            continue
        if not (name == "quote" and not value) and not (len(value) == 1 and value.isascii() and value not in "\r\n\0"):
            raise InvalidRequest(f"field 'csv.{name}' is '{shown(value)}'; one ASCII character that ends no line")
    _check_escape(csv)
    if len({csv.delimiter, csv.quote, csv.decimal_point}) < 3:
        raise InvalidRequest("fields 'csv.delimiter', 'csv.quote' and 'csv.decimal_point' have to differ")
    try:
        is_known = csv.encoding.isascii() and codecs.lookup(csv.encoding).name in ENCODINGS
    except (LookupError, ValueError):
        is_known = False
    if not is_known:
        known = ", ".join(sorted(ENCODINGS))
        raise InvalidRequest(
            f"field 'csv.encoding' is '{shown(csv.encoding)}', which can't be read; convert such files to UTF-8, as by "
            f"iconv, unless they are in one of {known}"
        )
    if csv.column_names and csv.header:
        raise InvalidRequest("field 'csv.column_names' is for \"header\": false only; a header names the columns")
    _check_names("csv.column_names", csv.column_names)


def _check_escape(csv: Csv) -> None:
    if csv.escape == csv.quote and csv.quote:
        raise InvalidRequest("field 'csv.escape' is the quote, and two quotes stand for one without it; leave it out")
    if csv.escape not in ("", NO_ESCAPE) and not csv.quote:
        raise InvalidRequest("field 'csv.escape' is for values in quotes, and 'csv.quote' is empty; leave one out")
    if csv.escape in (csv.delimiter, csv.decimal_point):
        raise InvalidRequest("field 'csv.escape' has to differ from 'csv.delimiter' and 'csv.decimal_point'")


def _check_columns(spec: JobSpec) -> None:
    for tensor in spec.columns:
        _check_names(f"columns.{shown(tensor)}", spec.columns_of(tensor).columns, repeats=True)
        shape = spec.columns_of(tensor).shape
        if any(size != -1 and not 0 < size < 2**31 for size in shape):
            raise InvalidRequest(
                f"field 'columns.{shown(tensor)}.shape' is {list(shape)}; its dimensions are 1 or more, or -1 where "
                "rows differ"
            )
        _check_null(f"columns.{shown(tensor)}.null", spec.columns_of(tensor))
    _check_names("passthrough", spec.passthrough)
    _check_names("exclude", spec.exclude)
    if "*" in spec.passthrough and len(spec.passthrough) > 1:
        raise InvalidRequest("field 'passthrough' has '*' and other columns; '*' is all of them")
    if spec.exclude and spec.passthrough != ("*",):
        raise InvalidRequest("field 'exclude' is for \"passthrough\": [\"*\"] only; name the columns in 'passthrough'")
    _check_names("output.partition_by", spec.output.partition_by)
    for name in spec.output.partition_by:
        if not spec.partitioning:
            raise InvalidRequest('field \'output.partition_by\' is for jobs with "partitioning": "hive"; add that')
        if name == spec.key or name in spec.passthrough:
            field = "key" if name == spec.key else "passthrough"
            raise InvalidRequest(
                f"field 'output.partition_by' names '{shown(name)}', which '{field}' copies into the parts; leave it "
                "out of one: the parts' folders have its name and values"
            )
    if spec.key and spec.key in spec.exclude:
        raise InvalidRequest(f"field 'exclude' names '{shown(spec.key)}', which is the job's key")


def _check_types(types: Mapping[str, str]) -> None:
    _check_names("types", tuple(types))
    for column, name in types.items():
        decimal = _DECIMAL.fullmatch(name)
        is_decimal = decimal is not None and int(decimal[2]) <= int(decimal[1]) <= _MOST_DIGITS
        if name not in COLUMN_TYPES and not is_decimal:
            raise InvalidRequest(
                f"field 'types.{shown(column)}' is '{shown(name)}', which is no type of a column; there are "
                f"{', '.join(COLUMN_TYPES)}, and decimal128(P, S) of P digits, at most {_MOST_DIGITS}, S of them a "
                "fraction"
            )


def _check_null(field: str, given: Columns) -> None:
    by_column = given.null if isinstance(given.null, dict) else {}
    if unknown := [name for name in by_column if name not in given.columns]:
        raise InvalidRequest(f"field '{field}' names '{shown(unknown[0])}', which is not one of the input's columns")
    for value in by_column.values() if isinstance(given.null, dict) else [given.null]:
        if isinstance(value, str) and len(value) > MAX_NULL_CHARACTERS:
            raise InvalidRequest(f"field '{field}' is too long; at most {MAX_NULL_CHARACTERS} characters")


def _check_names(field: str, names: tuple[str, ...], *, repeats: bool = False) -> None:
    if not names and field.startswith("columns."):
        raise InvalidRequest(f"field '{field}' is empty; name at least one column")
    if len(names) > MAX_COLUMNS:
        raise InvalidRequest(f"field '{field}' has {len(names)} entries; at most {MAX_COLUMNS}: use a list column")
    if not all(names):
        raise InvalidRequest(f"field '{field}' has an empty name; name a column")
    if not repeats and len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise InvalidRequest(f"field '{field}' names '{shown(twice)}' twice")


def _check_limits(spec: JobSpec) -> None:
    threshold = spec.error_threshold
    if not (math.isfinite(threshold) and (threshold == -1 or 0 <= threshold < 1 or threshold == int(threshold) > 0)):
        raise InvalidRequest(
            f"field 'error_threshold' is {threshold}; a whole number of rows, a fraction below 1, or -1 for no limit"
        )
    if not 0 <= spec.max_parallel <= MAX_PARALLEL:
        raise InvalidRequest(f"field 'max_parallel' is {spec.max_parallel}; 1 to {MAX_PARALLEL}, or 0 for all workers")
    if not 0 <= spec.deadline_s <= MAX_DEADLINE_S:
        raise InvalidRequest(
            f"field 'deadline_s' is {spec.deadline_s}; at most {MAX_DEADLINE_S:.0f} seconds, or 0 for none"
        )
    if not 0 <= spec.limit < 2**63:
        raise InvalidRequest(f"field 'limit' is {spec.limit}; a number of rows, or 0 for all")
    words = [*spec.metadata, *spec.metadata.values()]
    if len(spec.metadata) > MAX_METADATA or any(len(word) > MAX_METADATA_CHARACTERS for word in words):
        raise InvalidRequest(
            f"field 'metadata' is too large; at most {MAX_METADATA} entries of {MAX_METADATA_CHARACTERS} characters"
        )


_ColumnsGiven = Text | SomeTexts | Columns
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "input_format": get_args(InputFormat),
    "input_compression": get_args(InputCompression),
    "output.format": get_args(OutputFormat),
    "output.failed_rows": get_args(FailedRows),
    "bad_files": get_args(BadFiles),
    "partitioning": get_args(Partitioning),
    "priority": get_args(Priority),
    "on_version_change": get_args(OnVersionChange),
}
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at .*)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`(?: - at .*)?")


def _explained(text: str, body: bytes, kind: type[JobSpec]) -> str:
    at = _PATH.search(text)
    path = at["path"].replace("[...]", "") if at else ""
    if path.startswith("columns"):
        path = _column_path(path, body)
    inside = f"{path}." if path else ""
    if unknown := _UNKNOWN.fullmatch(text):
        kinds: Mapping[str, type[msgspec.Struct]] = {"": kind, "output": Output, "csv": Csv}
        fields = kinds.get(path, Columns).__struct_fields__
        near = get_close_matches(unknown["name"], fields, n=1)
        remedy = f"did you mean '{inside}{near[0]}'?" if near else f"there are {', '.join(fields)}"
        return f"a job has no field '{inside}{shown(unknown['name'])}'; {remedy}"
    if missing := _MISSING.fullmatch(text):
        return f"field '{inside}{missing['name']}' is missing"
    reason = _PATH.sub("", text).replace("`", "")
    if path in _CHOICES:
        reason += f"; expected {', '.join(choice or 'nothing' for choice in _CHOICES[path])}"
    return f"field '{path}': {reason}" if path else f"the job is no JSON object: {reason}"


def _column_path(path: str, body: bytes) -> str:
    """Adds the tensor's name to paths in `columns`, because msgspec leaves that name out."""
    try:
        given = msgspec.json.decode(body)["columns"]
    except msgspec.DecodeError:  # invalid JSON behind `columns`
        return path
    for tensor, value in given.items() if isinstance(given, dict) else ():
        try:
            msgspec.convert(value, _ColumnsGiven, strict=True)
        except msgspec.ValidationError:
            return f"columns.{shown(tensor)}{path.removeprefix('columns')}"
    return path
