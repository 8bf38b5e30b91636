"""The plan of a job, the tickets of its shards, and the files beside the parts of its complete output. Pure.

`_manifest.json` lists the parts and the inputs of their rows. `_SUCCESS`, written last, has the manifest's hash.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import CorruptEntry
from qinfer.jobs.job import FailedRows, JobSpec
from qinfer.models.readiness import ExecutedVersion
from qinfer.models.spec import ModelSpec
from qinfer.tabular.spec import Count, Cut, Group, Range

T = TypeVar("T")

PLAN_NAME = "_plan.json"

FAILED = "_failed"
"""Folder of files of failed rows."""

RECORDS = "_commits"
"""Folder of commit records (`qinfer.jobs.parts`)."""

_Below = Annotated[str, msgspec.Meta(pattern=r"(?s)^(?!.*(?:^|/)\.{0,2}(?:/|$))[^\0]*$")]
"""A relative path without `.`, `..`, empty components and NUL."""

SHOWN_FILES = 20
"""Unreadable files that record, log and error of a job name."""


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Rows that are scored together and become one part."""

    index: Count
    part: _Below
    rows: Count
    ranges: tuple[Range, ...]


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """An input file; `etag` is the store's id of its content."""

    url: str
    etag: str
    size_bytes: int
    rows: int


class BadFile(msgspec.Struct, frozen=True):
    """An input file that can't be read.

    Attributes:
        url: The location of the file.
        reason: The fault, as the end of a sentence that begins with the URL.
    """

    url: str
    reason: str

    def __str__(self) -> str:
        return f"'{self.url}' {self.reason}"


class ShardTicket(msgspec.Struct, frozen=True, array_like=True):
    """Entry of a bulk lane; the job's record has the specification."""

    job_id: str
    shard: Shard


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the shards of a job; written once.

    Attributes:
        model_hash: The hash of the model's files at planning, and of an ensemble's steps.
        schema: The inputs' columns, as workers read them (`schemas.decode_schema`).
        created_at: The job's creation, in seconds since 1970, which distinguishes jobs of the same id; 0 = unknown,
            because an earlier qinfer made the plan.
        executes: The versions that an ensemble executes: itself, then the models of its steps.
    """

    job_id: str
    spec: JobSpec
    model_hash: str
    schema: str
    sources: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]
    rows: int
    skipped: tuple[BadFile, ...] = ()
    created_at: float = 0.0
    executes: tuple[ExecutedVersion, ...] = ()


class InputFile(NamedTuple):
    """An input file with its row counts, or the cut points of its text."""

    source: SourceFile
    groups: tuple[int, ...] | None
    cuts: tuple[Cut, ...] = ()


class UnplannedJob(NamedTuple):
    """A job without a plan; `spec` has passed `planning.examine`."""

    job_id: str
    spec: JobSpec
    model: ModelSpec
    model_hash: str
    grant: UrlGrant
    created_at: float = 0.0
    executes: tuple[ExecutedVersion, ...] = ()


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """The size of a job that passed the checks."""

    files: int
    rows: int
    shards: int


class ExpectedParts(msgspec.Struct, frozen=True, array_like=True):
    """The planned parts of shards; `is_split` = failed rows have their own files."""

    job_id: str
    model_hash: str
    output_url: str
    shards: tuple[Shard, ...]
    grant: UrlGrant
    is_split: bool = False

    def url_of(self, shard: Shard) -> str:
        """Returns the URL of a shard's part."""
        return url_of(self.output_url, shard.part)


class PartInfo(NamedTuple):
    """A validated part; `errors` counts failed rows.

    `schema` has a `name: type` a line; `failed` is the path of its file of failed rows.
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


def read_stored(
    kind: type[T], data: bytes | memoryview, what: str, decode: Callable[..., Any] = msgspec.json.decode
) -> T:
    """Decodes stored data; the message of `CorruptEntry` begins with `what`."""
    try:
        found: T = decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"{what} can't be read: {error}") from None
    return found


def encode_ticket(ticket: ShardTicket) -> bytes:
    """Encodes a ticket for a lane."""
    return msgspec.msgpack.encode(ticket)


def frames_of(job_id: str, shards: Iterable[Shard]) -> list[tuple[int, bytes]]:
    """Returns the index and ticket of each shard."""
    return [(shard.index, encode_ticket(ShardTicket(job_id, shard))) for shard in shards]


def decode_ticket(data: bytes | memoryview) -> ShardTicket:
    """Decodes a ticket and checks its number of rows."""
    ticket = read_stored(ShardTicket, data, "a shard's ticket", msgspec.msgpack.decode)
    rows = sum(part.rows for part in ticket.shard.ranges)
    if ticket.shard.rows != rows:
        raise CorruptEntry(f"a shard's ticket says {ticket.shard.rows} rows, and its ranges have {rows}")
    return ticket


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    source: Count
    row_group: Group
    first_row: Count
    rows: Count
    first_in_group: Count
    begin: Count = 0


class _Shard(msgspec.Struct, frozen=True, array_like=True):
    part: _Below
    ranges: tuple[_Piece, ...]


class _PlanJson(JobPlan, frozen=True, kw_only=True):
    format: Literal[1] = 1
    shards: tuple[_Shard, ...]  # type: ignore[assignment]  # with sources as numbers


class _NamedShard(msgspec.Struct, frozen=True, array_like=True):
    part: str


class PlanNames(msgspec.Struct, frozen=True):
    """The fields of a plan of any version that identify job and parts."""

    job_id: str
    shards: tuple[_NamedShard, ...]
    created_at: float = 0.0

    def parts(self) -> frozenset[str]:
        """Returns the names of the parts."""
        return frozenset(shard.part for shard in self.shards)


def encode_plan(plan: JobPlan) -> bytes:
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


def decode_plan(data: bytes) -> JobPlan:
    """Decodes a plan."""
    wire = read_stored(_PlanJson, data, "the job's plan")
    try:
        shards = tuple(_shard(index, shard, wire.sources) for index, shard in enumerate(wire.shards))
    except IndexError as error:
        raise CorruptEntry(f"the job's plan can't be read: {error}") from None
    fields = {name: getattr(wire, name) for name in JobPlan.__struct_fields__}
    return JobPlan(**fields | {"shards": shards})


def decode_plan_names(data: bytes) -> PlanNames:
    """Decodes the `PlanNames` of a plan."""
    return read_stored(PlanNames, data, "the job's plan")


class SkippedFiles(msgspec.Struct, frozen=True):
    """The unreadable input files that a job skipped.

    Attributes:
        total: The number of files that were skipped.
        first: The first of these files; the manifest has all.
    """

    total: int = 0
    first: tuple[BadFile, ...] = ()


class PlanHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that the job's record has.

    `csv_escape` is detected from the first file; empty = as the job says.
    """

    model_hash: str
    schema: str
    skipped: SkippedFiles = SkippedFiles()
    executes: tuple[ExecutedVersion, ...] = ()
    csv_escape: str = ""


def encode_plan_head(plan: JobPlan) -> bytes:
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
    """Decodes the head of a plan."""
    return read_stored(PlanHead, data, "the head of the job's plan")


def _shard(index: int, shard: _Shard, sources: Sequence[SourceFile]) -> Shard:
    ranges = tuple(
        Range(s.url, s.etag, p.row_group, p.first_row, p.rows, p.first_in_group, p.begin, s.size_bytes)
        for p, s in ((piece, sources[piece.source]) for piece in shard.ranges)
    )
    return Shard(index, shard.part, sum(piece.rows for piece in ranges), ranges)


MANIFEST_NAME = "_manifest.json"
SUCCESS_NAME = "_SUCCESS"


class Part(msgspec.Struct, frozen=True):
    """A part of an output."""

    name: str
    rows: int
    ok: int
    errors: int
    size_bytes: int
    etag: str
    failed: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_manifest.json`.

    Attributes:
        parts: The parts, in the order of the inputs' rows.
        skipped: Unreadable input files; their rows are in no part.
        created_at: The time at which the manifest was made, in seconds since 1970.
        ended_at: The end of a job with an incomplete output, in seconds since 1970.
    """

    format: Literal[1] = 1
    job: str
    model: str
    version: int
    model_hash: str
    output_format: str
    rows: int
    ok: int
    errors: int
    schema: str
    parts: tuple[Part, ...]
    sources: tuple[SourceFile, ...]
    skipped: tuple[BadFile, ...] = ()
    created_at: float
    failed_rows: FailedRows = "inline"
    ended_at: float | msgspec.UnsetType = msgspec.UNSET


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `_SUCCESS`; `errors` counts failed rows."""

    format: Literal[1] = 1
    job: str
    rows: int
    errors: int
    parts: int
    manifest_sha256: str


def make_manifest(plan: JobPlan, parts: Sequence[PartInfo], created_at: float) -> Manifest:
    """Makes a job's manifest from its parts, in the order of the shards."""
    folder = plan.spec.output.url.rstrip("/")
    names = [info.url.removeprefix(f"{folder}/") for info in parts]
    if names != [shard.part for shard in plan.shards]:
        raise CorruptEntry(
            f"job '{plan.job_id}' has {len(plan.shards)} shards, and {len(names)} parts that are not theirs"
        )
    rows, errors = sum(info.rows for info in parts), sum(info.errors for info in parts)
    if rows != plan.rows:
        raise CorruptEntry(f"job '{plan.job_id}' has {plan.rows} rows, and its parts have {rows}")
    for info in parts:
        if info.schema != parts[0].schema:
            raise CorruptEntry(f"the columns of '{info.url}' are not those of '{parts[0].url}'")
    return Manifest(
        job=plan.job_id,
        model=plan.spec.model,
        version=plan.spec.version,
        model_hash=plan.model_hash,
        output_format=plan.spec.output.format,
        failed_rows=plan.spec.output.failed_rows,
        rows=rows,
        ok=rows - errors,
        errors=errors,
        schema=parts[0].schema if parts else "",
        parts=tuple(map(_part, names, parts)),
        sources=plan.sources,
        skipped=plan.skipped,
        created_at=created_at,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the content of `_manifest.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes) -> Manifest:
    """Decodes `_manifest.json` and checks its sums."""
    manifest = read_stored(Manifest, data, f"the output's {MANIFEST_NAME}")
    sums = [sum(getattr(part, name) for part in manifest.parts) for name in ("rows", "ok", "errors")]
    if sums != [manifest.rows, manifest.ok, manifest.errors] or manifest.ok + manifest.errors != manifest.rows:
        raise CorruptEntry(f"the numbers of the output's {MANIFEST_NAME} do not add up")
    return manifest


def encode_success(manifest: Manifest, data: bytes) -> bytes:
    """Returns the content of `_SUCCESS` for a stored manifest."""
    success = Success(
        job=manifest.job,
        rows=manifest.rows,
        errors=manifest.errors,
        parts=len(manifest.parts),
        manifest_sha256=hashlib.sha256(data).hexdigest(),
    )
    return msgspec.json.encode(success)


def decode_success(data: bytes, manifest: bytes) -> Success:
    """Decodes `_SUCCESS`, which must be of this manifest."""
    success = read_stored(Success, data, f"the output's {SUCCESS_NAME}")
    if success.manifest_sha256 != hashlib.sha256(manifest).hexdigest():
        raise CorruptEntry(f"the output's {SUCCESS_NAME} is of another {MANIFEST_NAME}")
    return success


def _part(name: str, info: PartInfo) -> Part:
    return Part(name, info.rows, info.rows - info.errors, info.errors, info.size_bytes, info.etag, info.failed)
