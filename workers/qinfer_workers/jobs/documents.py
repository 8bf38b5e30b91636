"""Documents beside a job's parts: `_plan.json` first, `_manifest.json` and `_SUCCESS` last.

All functions block. Documents are made by conditional creates; a second process or attempt accepts an existing document
of the same content. An incomplete output has `_manifest.partial.json` instead.

The files of an earlier job are removed before a job that overwrites them writes its plan, and only files that qinfer
wrote. `_SUCCESS` and the manifests go first, so that readers never take a mixture for complete. The earlier plan goes
last: after a crash, the next attempt finds it and continues.
"""

import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import msgspec

from qinfer.errors import CorruptEntry, InvalidRequest, StoreNotFound
from qinfer.jobs import plan as plans
from qinfer.jobs.columns import input_form
from qinfer.jobs.parts import part_of_failed
from qinfer.jobs.plan import MANIFEST_NAME, PLAN_NAME, SUCCESS_NAME, JobPlan, Manifest, PartInfo, PlanNames, Shard
from qinfer.jobs.queue.records import JobRecord, spec_of
from qinfer.jobs.resumption import CHECKPOINTS, pieces_folder
from qinfer.storage.store import BROKEN, CommitOutcome, Stat, Store, StoreFor
from qinfer.tabular.text_streams import KEPT_FOLDER

PARTIAL_NAME = "_manifest.partial.json"

MAX_BYTES = 2**30
"""a million files are about 200 MB"""

_TRIES = 5


def read_plan(store_for: StoreFor, record: JobRecord) -> JobPlan | None:
    """Reads a job's plan; none if the job will overwrite it."""
    spec = spec_of(record)
    url = plans.url_of(spec.output.url, PLAN_NAME)
    data = _read_document(store_for(url), url)
    if data is None:
        return None
    try:
        names = plans.decode_plan_names(data)
        if is_of(names, record):
            return plans.decode_plan(data)
    except CorruptEntry:
        raise InvalidRequest(f"'{url}' is no plan that can be read; make a new job with an empty output") from None
    if spec.overwrite and not record.head:
        return None
    raise InvalidRequest(
        f"output '{spec.output.url}' belongs to job '{names.job_id}'; make a new job with an empty output"
    )


def write_plan(store_for: StoreFor, record: JobRecord, data: bytes) -> JobPlan:
    """Writes a job's plan, unless it exists; returns the one that is there."""
    output_url = spec_of(record).output.url
    url = plans.url_of(output_url, PLAN_NAME)
    if len(data) > MAX_BYTES:  # readers would reject it
        raise InvalidRequest(f"the job's plan has {len(data)} bytes, {MAX_BYTES} are allowed; make several jobs of it")
    if store_for(url).put_if_absent(data, url) is CommitOutcome.CREATED:
        return plans.decode_plan(data)
    other = read_plan(store_for, record)
    if other is None:
        raise InvalidRequest(f"another job writes to output '{output_url}' meanwhile; name a folder for each job")
    return other


def is_of(names: PlanNames, record: JobRecord) -> bool:
    """Returns whether a plan belongs to this job, and not to an earlier job of the same id."""
    return names.job_id == record.id and (names.created_at == record.created_at or not spec_of(record).overwrite)


def write_manifest(store_for: StoreFor, plan: JobPlan, parts: Sequence[PartInfo], now_s: float) -> Manifest:
    """Writes `_manifest.json`, then `_SUCCESS`."""
    manifest = plans.make_manifest(plan, parts, now_s)
    data = plans.encode_manifest(manifest)
    manifest_url, success_url = (plans.url_of(plan.spec.output.url, name) for name in (MANIFEST_NAME, SUCCESS_NAME))
    store = store_for(manifest_url)
    if plan.spec.output.is_split:
        _set_aside_others(store, plan, parts)
    for _ in range(_TRIES):  # other processes may write them, too, and existing documents may be outdated
        if store.put_if_absent(data, manifest_url) is CommitOutcome.EXISTS:
            there = _read_document(store, manifest_url)
            if there is None or not _is_same(there, manifest):
                store.delete(success_url)
                store.delete(manifest_url)
                continue
            data = there
        if store.put_if_absent(plans.encode_success(manifest, data), success_url) is CommitOutcome.EXISTS:
            there = _read_document(store, success_url)
            if there is None or not _is_of(there, data):
                store.delete(success_url)
                continue
        store.delete(plans.url_of(plan.spec.output.url, PARTIAL_NAME))
        store.delete_folder(plans.url_of(plan.spec.output.url, pieces_folder(plan.job_id)))
        form = input_form(plan.spec)
        if plan.spec.overwrite or plan.skipped or any(form.is_decoded(source.url, "csv") for source in plan.sources):
            store.delete_folder(form.kept_url)
        return plans.decode_manifest(data)
    raise CorruptEntry(f"other programs write to output '{plan.spec.output.url}'; make a new job with an empty output")


def write_partial(
    store_for: StoreFor, plan: JobPlan, found: Sequence[tuple[Shard, PartInfo]], ended_at: float, now_s: float
) -> None:
    """Writes `_manifest.partial.json` for a job that ended early."""
    shards = tuple(shard for shard, _ in found)
    there = msgspec.structs.replace(plan, shards=shards, rows=sum(shard.rows for shard in shards))
    manifest = plans.make_manifest(there, [part for _, part in found], now_s)
    data = plans.encode_manifest(msgspec.structs.replace(manifest, ended_at=ended_at))
    url = plans.url_of(plan.spec.output.url, PARTIAL_NAME)
    store = store_for(url)
    store.delete(url)  # the file is from an earlier end
    store.delete_folder(plans.url_of(plan.spec.output.url, pieces_folder(plan.job_id)))
    store.put_if_absent(data, url)


def _set_aside_others(store: Store, plan: JobPlan, parts: Sequence[PartInfo]) -> None:
    own = {plans.url_of(plan.spec.output.url, part.failed) for part in parts}
    for found in list(store.scan(plans.url_of(plan.spec.output.url, plans.FAILED))):
        if found.url not in own and f"/{BROKEN}/" not in found.url:
            store.set_aside(found.url, found.etag)


def _read_document(store: Store, url: str) -> bytes | None:
    try:
        return store.read(url, MAX_BYTES)
    except StoreNotFound:
        return None


def _is_same(data: bytes, manifest: Manifest) -> bool:
    with suppress(CorruptEntry):
        return msgspec.structs.replace(plans.decode_manifest(data), created_at=manifest.created_at) == manifest
    return False


def _is_of(success: bytes, manifest: bytes) -> bool:
    with suppress(CorruptEntry):
        return bool(plans.decode_success(success, manifest))
    return False


_FIRST = (SUCCESS_NAME, MANIFEST_NAME, PARTIAL_NAME)
_SET_ASIDE = re.compile(rf"(?P<folder>(?:.*/)?){BROKEN}/(?P<name>[^/]+)-[0-9]+")


class EarlierOutput(NamedTuple):
    """The files of an earlier job."""

    job_id: str
    url: str
    files: tuple[Stat, ...]


def earlier_output(store_for: StoreFor, record: JobRecord) -> EarlierOutput | None:
    """Lists an earlier job's files in the output folder."""
    spec = spec_of(record)
    plan_url, form = plans.url_of(spec.output.url, PLAN_NAME), input_form(spec)
    store = store_for(plan_url)
    found = store.stat(plan_url)
    data = _read_document(store, plan_url) if found is not None else None
    if data is None:
        return None
    try:
        names = plans.decode_plan_names(data)
    except CorruptEntry:
        raise InvalidRequest(f"'{plan_url}' is no plan that can be read; empty the output, or name another") from None
    if is_of(names, record):
        return None
    parts, base = names.parts(), plans.url_of(spec.output.url, "")
    files = tuple(
        file
        for file in store.scan(spec.output.url)
        if _is_own(file.url.removeprefix(base), parts) and not file.url.startswith(f"{form.kept_url}/")
    )
    # Another process may have cleared the folder for this job: then the files belong to the new job.
    now = store.stat(plan_url)
    return EarlierOutput(names.job_id, spec.output.url, files) if now == found else None


def clear(store_for: StoreFor, earlier: EarlierOutput, threads: int) -> None:
    """Removes unchanged files; repeatable."""
    files = {file.url.removeprefix(plans.url_of(earlier.url, "")): file for file in earlier.files}
    first = [files.pop(name) for name in _FIRST if name in files]
    plan = files.pop(PLAN_NAME)

    def remove(file: Stat) -> None:
        store = store_for(file.url)
        if store.stat(file.url) == file:
            store.delete(file.url)

    for file in first:
        remove(file)
    with ThreadPoolExecutor(threads, thread_name_prefix="bulk-clear") as pool:
        list(pool.map(remove, files.values()))
    remove(plan)


def _is_own(name: str, parts: Collection[str]) -> bool:
    if aside := _SET_ASIDE.fullmatch(name):
        name = aside["folder"] + aside["name"]
    top, _, rest = name.partition("/")
    if top == plans.RECORDS:
        return rest.rpartition("/")[0] in parts
    if top == CHECKPOINTS:
        return rest.partition("/")[2].rpartition("/")[0] in parts
    if top == plans.FAILED:
        return part_of_failed(rest) in parts
    return name in parts or name in (*_FIRST, PLAN_NAME) or (top == KEPT_FOLDER and name.endswith(".zst"))
