"""The plan of a job: which rows of which files are which shard, what its parts are; its JSON and its tickets. Pure."""

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
"""The name of a plan in an output folder."""

FAILED = "_failed"
"""The folder, in that of an output, of failed rows that have files of their own."""

RECORDS = "_commits"
"""The folder, in that of an output, of the records of parts that are text."""

NO_GROUPS = -1
"""The row group of formats that have none."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Group = Annotated[int, msgspec.Meta(ge=NO_GROUPS)]
_Below = Annotated[str, msgspec.Meta(pattern=r"(?s)^(?!.*(?:^|/)\.{0,2}(?:/|$))[^\0]*$")]
"""A name in a folder, or below it: no part of it is empty, `.` or `..`, and no file's name has the character 0."""

SHOWN_FILES = 20
"""So many files that can't be read are named in a job's record, log and error."""


class Cut(NamedTuple):
    """A place between two rows of CSV or JSON lines from which they can be read.

    Attributes:
        first_row: The number of the row that begins there.
        begin: Bytes of the text before it.
    """

    first_row: int
    begin: int


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one row group of one file.

    Attributes:
        url: The file.
        etag: What the store called its content when the job was planned.
        row_group: The row group (Parquet) or record batch (Arrow); -1 = the format has none (CSV, JSON lines).
        first_row: The number of the first row within the file.
        rows: How many rows.
        first_in_group: The number of the first row within the row group; of CSV and JSON lines after `begin`.
        begin: Bytes of the text before the cut point from which CSV and JSON lines are read.
        size_bytes: The file's size when the job was planned; 0 = unknown, in shards of an earlier qinfer.
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
        index: Its place among the job's shards.
        part: The name of its part in the output folder, perhaps with folders.
        rows: The rows of all its ranges.
        ranges: Its rows in order; the one shard of a job without rows has one range of 0 rows, of a file with columns.
    """

    index: _Count
    part: _Below
    rows: _Count
    ranges: tuple[Range, ...]


class Source(msgspec.Struct, frozen=True, array_like=True):
    """An input file.

    Attributes:
        url: Where it is.
        etag: What the store calls its content.
        size_bytes: Its size.
        rows: Its rows.
    """

    url: str
    etag: str
    size_bytes: int
    rows: int


class BadFile(msgspec.Struct, frozen=True):
    """An input file that can't be read.

    Attributes:
        url: Where it is.
        reason: What is wrong with it, in words that go on after the URL.
    """

    url: str
    reason: str

    def __str__(self) -> str:
        return f"'{self.url}' {self.reason}"


class ShardTicket(msgspec.Struct, frozen=True, array_like=True):
    """Entry of a bulk lane: a shard of a job.

    Attributes:
        job_id: The job; its record has the specification.
        shard: The shard.
    """

    job_id: str
    shard: Shard


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that the shards of a job are made by; written once, and never changed.

    Attributes:
        job_id: The job.
        spec: Its specification, with the model's version resolved.
        model_hash: What the model's files were when the job was planned; of an ensemble, also those of all its steps.
        schema: The inputs' columns, in the types that workers read them as (`schemas.decode_schema`).
        sources: The input files in order.
        shards: The shards in order.
        rows: The rows of all files.
        skipped: The files that were left out because they can't be read (`bad_files: skip`), in order.
        created_at: When the job was created, in seconds since 1970: it tells the job from an earlier one of its id; 0 =
            the plan of an earlier qinfer does not say.
        not_copied: Fields of JSON lines that `passthrough: ["*"]` leaves out, since their values are of several kinds:
            the first of them, in words.
        executes: What an ensemble executes: itself, then the models of its steps. Empty = the model is none.
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
    """An input file, with the rows of its groups, as planning needs it.

    Attributes:
        source: The file.
        groups: The rows of each of its row groups; `None` = its format has none.
        cuts: Where it can be read from, if it has no row groups.
    """

    source: Source
    groups: tuple[int, ...] | None
    cuts: tuple[Cut, ...] = ()


class Unplanned(NamedTuple):
    """A job that has no plan yet.

    Attributes:
        job_id: Its id.
        spec: What is asked for, its URLs checked (`planning.examine`) and the model's version resolved.
        model: The model's configuration.
        model_hash: What the model's files are.
        grant: The URL prefixes that it may use.
        created_at: When it was created, in seconds since 1970.
        executes: As `Plan.executes`.
    """

    job_id: str
    spec: JobSpec
    model: ModelSpec
    model_hash: str
    grant: Grant
    created_at: float = 0.0
    executes: tuple[Executed, ...] = ()


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """The size of a job that can be taken.

    Attributes:
        files: Its input files.
        rows: Their rows, up to the job's limit.
        shards: The shards that it would have now.
    """

    files: int
    rows: int
    shards: int


class ExpectedParts(msgspec.Struct, frozen=True, array_like=True):
    """Parts that a plan says an output has.

    Attributes:
        job_id: The job.
        model_hash: What the model's files were when the job was planned.
        output_url: The folder.
        shards: The shards whose parts are meant.
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
        """Returns where the part of a shard is."""
        return url_of(self.output_url, shard.part)


class PartInfo(NamedTuple):
    """A part that is whole.

    Attributes:
        url: Where it is.
        rows: Its rows.
        errors: How many of them failed.
        size_bytes: Its size.
        etag: What the store calls its content.
        schema: Its columns as text, one `name: type` a line.
        failed: The name, in the output folder, of the file of its failed rows; empty = it has none.
    """

    url: str
    rows: int
    errors: int
    size_bytes: int
    etag: str
    schema: str
    failed: str = ""


def url_of(output_url: str, name: str) -> str:
    """Returns where something in an output is."""
    return f"{output_url.rstrip('/')}/{name}"


def read_stored(decoder: Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Reads what qinfer has stored, or put into the queue.

    Raises:
        CorruptEntry: It is something else, or damaged; the message begins with `what`.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"{what} can't be read: {error}") from None


def encode_ticket(ticket: ShardTicket) -> bytes:
    """Encodes a ticket for a lane."""
    return msgspec.msgpack.encode(ticket)


def frames_of(job_id: str, shards: Iterable[Shard]) -> list[tuple[int, bytes]]:
    """Returns shards as they are queued: the index and the ticket of each."""
    return [(shard.index, encode_ticket(ShardTicket(job_id, shard))) for shard in shards]


def decode_ticket(data: bytes | memoryview) -> ShardTicket:
    """Decodes a ticket of a lane.

    Raises:
        CorruptEntry: It is no ticket, or it contradicts itself.
    """
    ticket = read_stored(_tickets, data, "a shard's ticket")
    rows = sum(part.rows for part in ticket.shard.ranges)
    if ticket.shard.rows != rows:
        raise CorruptEntry(f"a shard's ticket says {ticket.shard.rows} rows, and its ranges have {rows}")
    return ticket


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A range in the plan's JSON: files are named once, in `sources`."""

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
    """The fields of a plan, of whatever version, that tell whose output it is and which parts that has.

    Attributes:
        job_id: The job.
        created_at: When it was created, in seconds since 1970; 0 = the plan does not say.
        shards: Its shards.
    """

    job_id: str
    shards: tuple[_NamedShard, ...]
    created_at: float = 0.0

    def parts(self) -> frozenset[str]:
        """Returns the names of its parts."""
        return frozenset(shard.part for shard in self.shards)


_tickets = msgspec.msgpack.Decoder(ShardTicket)
_plans = msgspec.json.Decoder(_PlanJson)
_plan_names = msgspec.json.Decoder(PlanNames)


def encode_plan(plan: Plan) -> bytes:
    """Returns a plan as JSON; equal plans are equal bytes."""
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
    """Reads a plan.

    Raises:
        CorruptEntry: It is none.
    """
    wire = read_stored(_plans, data, "the job's plan")
    try:
        shards = tuple(_shard(index, shard, wire.sources) for index, shard in enumerate(wire.shards))
    except IndexError as error:
        raise CorruptEntry(f"the job's plan can't be read: {error}") from None
    fields = {name: getattr(wire, name) for name in Plan.__struct_fields__}
    return Plan(**fields | {"shards": shards})


def decode_plan_names(data: bytes) -> PlanNames:
    """Reads whose plan it is, and the names of its parts.

    Raises:
        CorruptEntry: It is no plan.
    """
    return read_stored(_plan_names, data, "the job's plan")


class SkippedFiles(msgspec.Struct, frozen=True):
    """The input files that a job left out because they can't be read.

    Attributes:
        total: How many they are.
        first: The first of them; the manifest has all.
    """

    total: int = 0
    first: tuple[BadFile, ...] = ()


class PlanHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a plan: the part that is needed without the shards; kept with the job's record.

    Attributes:
        model_hash: What the model's files were when the job was planned.
        schema: The inputs' columns, in the types that workers read them as (`schemas.decode_schema`).
        skipped: The input files that were left out.
        executes: As `Plan.executes`.
        csv_escape: The escape character that CSV inputs have, as the first file shows it; empty = what the job says.
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
    """Reads the head of a plan.

    Raises:
        CorruptEntry: It is none.
    """
    return read_stored(_heads, data, "the head of the job's plan")


_heads = msgspec.json.Decoder(PlanHead)


def _shard(index: int, shard: _Shard, sources: Sequence[Source]) -> Shard:
    ranges = tuple(
        Range(s.url, s.etag, p.row_group, p.first_row, p.rows, p.first_in_group, p.begin, s.size_bytes)
        for p, s in ((piece, sources[piece.source]) for piece in shard.ranges)
    )
    return Shard(index, shard.part, sum(piece.rows for piece in ranges), ranges)
