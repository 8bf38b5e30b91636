"""Removes the files of an earlier job from an output folder, before a job that overwrites them writes its plan.

Only files that qinfer wrote are removed. `_SUCCESS` and the manifests go first, so that readers never take a mixture
for complete. The earlier plan goes last: after a crash, the next attempt finds it and continues. All functions block.
"""

import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from qinfer.errors import CorruptEntry, InvalidRequest, StoreNotFound
from qinfer.jobs.inputs import input_form
from qinfer.jobs.manifest import MANIFEST_NAME, SUCCESS_NAME
from qinfer.jobs.parts import part_of_failed
from qinfer.jobs.plan import FAILED, PLAN_NAME, RECORDS, decode_plan_names, url_of
from qinfer.jobs.queue.records import JobRecord, spec_of
from qinfer.jobs.resumption import CHECKPOINTS
from qinfer.storage.store import BROKEN, Stat
from qinfer.tabular.text_streams import KEPT_FOLDER
from qinfer_workers.jobs.documents import MAX_BYTES, PARTIAL_NAME, StoreFor, is_of

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
    plan_url, form = url_of(spec.output.url, PLAN_NAME), input_form(spec)
    store = store_for(plan_url)
    found = store.stat(plan_url)
    if found is None:
        return None
    try:
        names = decode_plan_names(store.read(plan_url, MAX_BYTES))
    except StoreNotFound:
        return None
    except CorruptEntry:
        raise InvalidRequest(f"'{plan_url}' is no plan that can be read; empty the output, or name another") from None
    if is_of(names, record):
        return None
    parts, base = names.parts(), url_of(spec.output.url, "")
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
    files = {file.url.removeprefix(url_of(earlier.url, "")): file for file in earlier.files}
    first = [files.pop(name) for name in _FIRST if name in files]
    plan = files.pop(PLAN_NAME)

    def remove(file: Stat) -> None:
        store = store_for(file.url)
        if store.stat(file.url) == file:
            store.delete(file.url)

    def remove_all(some: Iterable[Stat]) -> None:
        for file in some:
            remove(file)

    remove_all(first)
    with ThreadPoolExecutor(threads, thread_name_prefix="bulk-clear") as pool:
        list(pool.map(remove, files.values()))
    remove(plan)


def _is_own(name: str, parts: Collection[str]) -> bool:
    if aside := _SET_ASIDE.fullmatch(name):
        name = aside["folder"] + aside["name"]
    top, _, rest = name.partition("/")
    if top == RECORDS:
        return rest.rpartition("/")[0] in parts
    if top == CHECKPOINTS:
        return rest.partition("/")[2].rpartition("/")[0] in parts
    if top == FAILED:
        return part_of_failed(rest) in parts
    return name in parts or name in (*_FIRST, PLAN_NAME) or (top == KEPT_FOLDER and name.endswith(".zst"))
