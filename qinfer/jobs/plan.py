"""The plan of a job: its shards with their rows and parts, its JSON, and the tickets of shards. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from qinfer.core.store_urls import Grant
from qinfer.errors import CorruptEntry
from qinfer.jobs.job import JobSpec
from qinfer.models.pins import Executed
from qinfer.models.spec import ModelSpec

T = TypeVar("T")
Decoder = msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]

PLAN_NAME = "_plan.json"

FAILED = "_failed"
"""The folder, in the output folder, of files of failed rows."""

RECORDS = "_commits"
"""The folder, in the output folder, of commit records (`qinfer.jobs.parts`)."""

NO_GROUPS = -1
"""Stands for the row group in formats without row groups."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Group = Annotated[int, msgspec.Meta(ge=NO_GROUPS)]
_Below = Annotated[str, msgspec.Meta(pattern=r"(?s)^(?!.*(?:^|/)\.{0,2}(?:/|$))[^\0]*$")]
"""A relative path: no component is empty, `.` or `..`, and no character is NUL."""

SHOWN_FILES = 20
"""The most unreadable files that a job's record, log and error name."""


class Cut(NamedTuple):
    """A position in CSV or JSON lines from which rows can be read.

    Attributes:
        first_row: The number of the row that begins there.
        begin: Its offset in bytes of (decoded) text.
    """

    first_row: int
    begin: int


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one row group of one file.

    Attributes:
        etag: The store's id of the file's content at planning.
        row_group: The row group (Parquet) or record batch (Arrow); -1 = none (CSV, JSON lines).
        first_row: The number of the first row within the file.
        rows: The number of rows.
        first_in_group: The number of the first row within the row group; for CSV and JSON lines, after `begin`.
        begin: The offset of the cut point from which CSV and JSON lines are read.
        size_bytes: The file's size at planning; 0 = unknown, in shards of an earlier qinfer.
    """

    url: str
    etag: str
    row_group: _Group
    first_row: _Count
    rows: _Count
    first_in_group: _Count
    begin: _Count = 0
    size_bytes: _Count = 0


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The rows that one worker scores at a time, and that become one part.

    Attributes:
        index: Its position among the job's shards.
        part: The name of its part in the output folder, which may contain folders.
        rows: The rows of all its ranges.
        ranges: Its rows in order; the only shard of a job without rows has one empty range, of a file with columns.
    """

    index: _Count
    part: _Below
    rows: _Count
    ranges: tuple[Range, ...]


class Source(msgspec.Struct, frozen=True, array_like=True):
    """An input file; `etag` is the store's id of its content."""

    url: str
    etag: str
    size_bytes: int
    rows: int


class BadFile(msgspec.Struct, frozen=True):
    """An input file that can't be read; `reason` continues a sentence that begins with the URL."""

    url: str
    reason: str

    def __str__(self) -> str:
        return f"'{self.url}' {self.reason}"


class ShardTicket(msgspec.Struct, frozen=True, array_like=True):
    """Entry of a bulk lane: a shard of a job. The job's record has the specification."""

    job_id: str
    shard: Shard


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the shards of a job; written once, and never changed.

    Attributes:
        spec: The specification, with the model's version resolved.
        model_hash: The hash of the model's files at planning, and of an ensemble's steps.
        schema: The inputs' columns, in the types that workers read (`schemas.decode_schema`).
        sources: The input files in order.
        rows: The rows of all files.
        skipped: Unreadable files that the job skips (`bad_files: skip`), in order.
        created_at: When the job was created, in seconds since 1970; it distinguishes jobs of the same id. 0 = unknown,
            in a plan of an earlier qinfer.
        not_copied: Descriptions of the first fields of JSON lines that `passthrough: ["*"]` leaves out, since their
            values are of several kinds.
        executes: Of an ensemble: itself, then the models of its steps.
    """

    job_id: str
    spec: JobSpec
    model_hash: str
    schema: str
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]
    rows: int
    skipped: tuple[BadFile, ...] = ()
    created_at: float = 0.0
    not_copied: tuple[str, ...] = ()
    executes: tuple[Executed, ...] = ()


class InputFile(NamedTuple):
    """An input file for planning; `groups` has the rows of each row group, `cuts` replaces them in text formats."""

    source: Source
    groups: tuple[int, ...] | None
    cuts: tuple[Cut, ...] = ()


class Unplanned(NamedTuple):
    """A job without a plan; `spec` has passed `planning.examine` and names a model version.

    `model_hash` is the hash of the model's files, `created_at` is in seconds since 1970, `executes` as in `Plan`.
    """

    job_id: str
    spec: JobSpec
    model: ModelSpec
    model_hash: str
    grant: Grant
    created_at: float = 0.0
    executes: tuple[Executed, ...] = ()


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """The size of a job that passed the checks, up to its limit of rows."""

    files: int
    rows: int
    shards: int


class ExpectedParts(msgspec.Struct, frozen=True, array_like=True):
    """The planned parts of some shards.

    Attributes:
        model_hash: The hash of the model's files at planning.
        output_url: The output folder.
        grant: The URL prefixes that the job may use.
        is_split: Whether failed rows are in files of their own.
    """

    job_id: str
    model_hash: str
    output_url: str
    shards: tuple[Shard, ...]
    grant: Grant
    is_split: bool = False

    def url_of(self, shard: Shard) -> str:
        """Returns the URL of a shard's part."""
        return url_of(self.output_url, shard.part)


class PartInfo(NamedTuple):
    """A validated part.

    Attributes:
        errors: The number of failed rows.
        etag: The store's id of its content.
        schema: Its columns, one `name: type` a line.
        failed: The name of its file of failed rows, in the output folder; empty = it has no such file.
    """

    url: str
    rows: int
    errors: int
    size_bytes: int
    etag: str
    schema: str
    failed: str = ""


def url_of(output_url: str, name: str) -> str:
    """Returns the URL of a name in an output folder."""
    return f"{output_url.rstrip('/')}/{name}"


def read_stored(decoder: Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Decodes data that qinfer stored or queued; raises `CorruptEntry`, whose message begins with `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"{what} can't be read: {error}") from None


def encode_ticket(ticket: ShardTicket) -> bytes:
    """Encodes a ticket for a lane."""
    return msgspec.msgpack.encode(ticket)


def frames_of(job_id: str, shards: Iterable[Shard]) -> list[tuple[int, bytes]]:
    """Returns the index and ticket of each shard, for the queue."""
    return [(shard.index, encode_ticket(ShardTicket(job_id, shard))) for shard in shards]


def decode_ticket(data: bytes | memoryview) -> ShardTicket:
    """Decodes a ticket; raises `CorruptEntry` if it is malformed or its rows do not add up."""
    ticket = read_stored(_tickets, data, "a shard's ticket")
    rows = sum(part.rows for part in ticket.shard.ranges)
    if ticket.shard.rows != rows:
        raise CorruptEntry(f"a shard's ticket says {ticket.shard.rows} rows, and its ranges have {rows}")
    return ticket


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A range in the plan's JSON, where `sources` names each file once."""

    source: _Count
    row_group: _Group
    first_row: _Count
    rows: _Count
    first_in_group: _Count
    begin: _Count = 0


class _Shard(msgspec.Struct, frozen=True, array_like=True):
    part: _Below
    ranges: tuple[_Piece, ...]


class _PlanJson(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal[1] = 1
    job_id: str
    model_hash: str
    rows: int
    spec: JobSpec
    schema: str
    sources: tuple[Source, ...]
    shards: tuple[_Shard, ...]
    skipped: tuple[BadFile, ...] = ()
    created_at: float = 0.0
    not_copied: tuple[str, ...] = ()
    executes: tuple[Executed, ...] = ()


class _NamedShard(msgspec.Struct, frozen=True, array_like=True):
    part: str


class PlanNames(msgspec.Struct, frozen=True):
    """The fields of a plan, of any version, that identify its job and its parts.

    `created_at` is in seconds since 1970, 0 = unknown.
    """

    job_id: str
    shards: tuple[_NamedShard, ...]
    created_at: float = 0.0

    def parts(self) -> frozenset[str]:
        """Returns the names of the parts."""
        return frozenset(shard.part for shard in self.shards)


_tickets = msgspec.msgpack.Decoder(ShardTicket)
_plans = msgspec.json.Decoder(_PlanJson)
_plan_names = msgspec.json.Decoder(PlanNames)


def encode_plan(plan: Plan) -> bytes:
    """Returns a plan as JSON; equal plans give equal bytes."""
    numbers = {source.url: number for number, source in enumerate(plan.sources)}
    shards = tuple(
        _Shard(
            shard.part,
            tuple(
                _Piece(numbers[r.url], r.row_group, r.first_row, r.rows, r.first_in_group, r.begin)
                for r in shard.ranges
            ),
        )
        for shard in plan.shards
    )
    return msgspec.json.encode(_PlanJson(**msgspec.structs.asdict(plan) | {"shards": shards}))


def decode_plan(data: bytes) -> Plan:
    """Decodes a plan; raises `CorruptEntry` if it is malformed."""
    wire = read_stored(_plans, data, "the job's plan")
    try:
        shards = tuple(_shard(index, shard, wire.sources) for index, shard in enumerate(wire.shards))
    except IndexError as error:
        raise CorruptEntry(f"the job's plan can't be read: {error}") from None
    fields = {name: getattr(wire, name) for name in Plan.__struct_fields__}
    return Plan(**fields | {"shards": shards})


def decode_plan_names(data: bytes) -> PlanNames:
    """Decodes the `PlanNames` of a plan; raises `CorruptEntry` if it is malformed."""
    return read_stored(_plan_names, data, "the job's plan")


class SkippedFiles(msgspec.Struct, frozen=True):
    """Number of unreadable input files that a job skipped, and the first of them; the manifest has all."""

    total: int = 0
    first: tuple[BadFile, ...] = ()


class PlanHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that is needed without the shards; kept in the job's record.

    Attributes:
        model_hash: The hash of the model's files at planning.
        schema: The inputs' columns, in the types that workers read (`schemas.decode_schema`).
        executes: As `Plan.executes`.
        csv_escape: The escape character of CSV inputs that the first file shows; empty = as the job says.
    """

    model_hash: str
    schema: str
    skipped: SkippedFiles = SkippedFiles()
    executes: tuple[Executed, ...] = ()
    csv_escape: str = ""


def encode_plan_head(plan: Plan) -> bytes:
    """Returns the head of a plan as JSON."""
    skipped = SkippedFiles(len(plan.skipped), plan.skipped[:SHOWN_FILES])
    head = PlanHead(
        model_hash=plan.model_hash,
        schema=plan.schema,
        skipped=skipped,
        executes=plan.executes,
        csv_escape=plan.spec.csv_form.escape,
    )
    return msgspec.json.encode(head)


def decode_plan_head(data: bytes) -> PlanHead:
    """Decodes the head of a plan; raises `CorruptEntry` if it is malformed."""
    return read_stored(_heads, data, "the head of the job's plan")


_heads = msgspec.json.Decoder(PlanHead)


def _shard(index: int, shard: _Shard, sources: Sequence[Source]) -> Shard:
    ranges = tuple(
        Range(s.url, s.etag, p.row_group, p.first_row, p.rows, p.first_in_group, p.begin, s.size_bytes)
        for p, s in ((piece, sources[piece.source]) for piece in shard.ranges)
    )
    return Shard(index, shard.part, sum(piece.rows for piece in ranges), ranges)
