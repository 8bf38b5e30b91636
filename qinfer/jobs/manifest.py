"""Files beside the parts of a complete output: `_manifest.json`, and `_SUCCESS`, which is written last. Pure.

`_SUCCESS` says that the output is complete and has the manifest's hash; the manifest lists the parts, and the inputs
that their rows are from.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from qinfer.errors import CorruptEntry
from qinfer.jobs.job import FailedRows
from qinfer.jobs.plan import BadFile, PartInfo, Plan, Source, read_stored

MANIFEST_NAME = "_manifest.json"
SUCCESS_NAME = "_SUCCESS"


class Part(msgspec.Struct, frozen=True):
    """A part of an output.

    Attributes:
        name: Its name in the output folder, with the folders of its partition (`output.partition_by`).
        rows: Its rows.
        ok: Those that have outputs.
        errors: Those that have an `error_code`.
        size_bytes: Its size.
        etag: What the store calls its content.
        failed: The name, in the output folder, of the file of its failed rows; empty = they are in it, or it has none.
    """

    name: str
    rows: int
    ok: int
    errors: int
    size_bytes: int
    etag: str
    failed: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a complete output, as in `_manifest.json`.

    Attributes:
        format: The version of this layout.
        job: The job's id.
        model: The model's name.
        version: The model's version.
        model_hash: What the model's files were.
        output_format: `parquet`, `arrow`, `csv` or `jsonl`.
        failed_rows: `inline` = failed rows are in the parts, `separate` = in files of their own.
        rows: The rows of all parts, as many as the inputs have.
        ok: Those that have outputs.
        errors: Those that have an `error_code`.
        schema: The parts' columns as text, one `name: type` a line.
        parts: The parts in the order of the inputs' rows.
        sources: The input files in order.
        skipped: The input files that were left out because they can't be read; their rows are in no part.
        created_at: When the manifest was made, in seconds since 1970.
        ended_at: Of an output that is not complete: the end of the job after which these parts were there, for the job
            may be resumed and end again; in seconds since 1970.
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
    sources: tuple[Source, ...]
    skipped: tuple[BadFile, ...] = ()
    created_at: float
    failed_rows: FailedRows = "inline"
    ended_at: float | msgspec.UnsetType = msgspec.UNSET


class Success(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `_SUCCESS`.

    Attributes:
        format: The version of this layout.
        job: The job's id.
        rows: The rows of the output.
        errors: Those that failed.
        parts: How many parts there are.
        manifest_sha256: The hash of the manifest's bytes.
    """

    format: Literal[1] = 1
    job: str
    rows: int
    errors: int
    parts: int
    manifest_sha256: str


_manifests = msgspec.json.Decoder(Manifest)
_successes = msgspec.json.Decoder(Success)


def make_manifest(plan: Plan, parts: Sequence[PartInfo], created_at: float) -> Manifest:
    """Puts the checked parts of a job together.

    Args:
        plan: The job's plan.
        parts: Its parts in the shards' order, as `validate_part` returns them.
        created_at: Now, in seconds since 1970.

    Raises:
        CorruptEntry: The parts are not the plan's shards, their rows do not add up, or their columns differ.
    """
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
    """Reads `_manifest.json`.

    Raises:
        CorruptEntry: It is none, or its numbers do not add up.
    """
    manifest = read_stored(_manifests, data, f"the output's {MANIFEST_NAME}")
    sums = [sum(getattr(part, name) for part in manifest.parts) for name in ("rows", "ok", "errors")]
    if sums != [manifest.rows, manifest.ok, manifest.errors] or manifest.ok + manifest.errors != manifest.rows:
        raise CorruptEntry(f"the numbers of the output's {MANIFEST_NAME} do not add up")
    return manifest


def encode_success(manifest: Manifest, data: bytes) -> bytes:
    """Returns the content of `_SUCCESS`.

    Args:
        manifest: The manifest.
        data: Its bytes, as they were stored.
    """
    success = Success(
        job=manifest.job,
        rows=manifest.rows,
        errors=manifest.errors,
        parts=len(manifest.parts),
        manifest_sha256=hashlib.sha256(data).hexdigest(),
    )
    return msgspec.json.encode(success)


def decode_success(data: bytes, manifest: bytes) -> Success:
    """Reads `_SUCCESS`, and compares it with the manifest's bytes.

    Raises:
        CorruptEntry: It is none, or of another manifest.
    """
    success = read_stored(_successes, data, f"the output's {SUCCESS_NAME}")
    if success.manifest_sha256 != hashlib.sha256(manifest).hexdigest():
        raise CorruptEntry(f"the output's {SUCCESS_NAME} is of another {MANIFEST_NAME}")
    return success


def _part(name: str, info: PartInfo) -> Part:
    return Part(name, info.rows, info.rows - info.errors, info.errors, info.size_bytes, info.etag, info.failed)
