"""Files beside the parts of a complete output. Pure.

`_manifest.json` lists the parts and the inputs of their rows. `_SUCCESS`, written last, has the manifest's hash.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from qinfer.errors import CorruptEntry
from qinfer.jobs.job import FailedRows
from qinfer.jobs.plan import BadFile, JobPlan, PartInfo, SourceFile, read_stored

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


_manifests = msgspec.json.Decoder(Manifest)
_successes = msgspec.json.Decoder(Success)


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
    manifest = read_stored(_manifests, data, f"the output's {MANIFEST_NAME}")
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
    success = read_stored(_successes, data, f"the output's {SUCCESS_NAME}")
    if success.manifest_sha256 != hashlib.sha256(manifest).hexdigest():
        raise CorruptEntry(f"the output's {SUCCESS_NAME} is of another {MANIFEST_NAME}")
    return success


def _part(name: str, info: PartInfo) -> Part:
    return Part(name, info.rows, info.rows - info.errors, info.errors, info.size_bytes, info.etag, info.failed)
