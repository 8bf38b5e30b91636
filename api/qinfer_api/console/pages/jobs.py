"""Bulk jobs of the user's tenant: progress by shard, first rows, failed rows, the log; cancel, resume and delete."""

from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, JobNotFound, QinferError
from qinfer.jobs.job import ENDED_EARLY, JobState
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.wire.bodies import JobPreview
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit
from qinfer_api.jobs.records import Changes, JobBody, JobFilter, shown_job
from qinfer_api.jobs.routes import PREVIEW_ROWS, preview_of

MOST_CELLS = 400
MOST_FAILURES = 50


class ShardCell(NamedTuple):
    """One or more neighbouring shards in the picture of a job: its state, and the shards."""

    state: str
    first: int
    last: int


def jobs_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    acts = {"cancel": (_cancel, Scope.INFER), "resume": (_resume, Scope.INFER), "delete": (_delete, Scope.INFER)}
    return [pages.route("/jobs", jobs, Scope.VIEWER), pages.route("/jobs/{job}", job, Scope.VIEWER, acts)]


async def jobs(visit: Visit) -> Response:
    """Lists jobs, newest first."""
    parts, state = visit.parts, visit.query("state")
    wanted = JobFilter(model=visit.query("model"))
    state = state if state in list(JobState) else ""
    page = await parts.jobs.jobs.list(visit.context.tenant, state or None, visit.query("after"), PAGE_ROWS, wanted.fits)
    now_s = parts.jobs.now_s()
    return visit.render(
        "jobs.html",
        "Jobs",
        "jobs",
        rows=[shown_job(record, now_s, reads=visit.context.reads) for record in page.records],
        following=page.after,
        wanted=state,
        states=list(JobState),
        model=visit.query("model"),
        is_enabled=parts.services.settings.bulk.enabled,
    )


async def job(visit: Visit) -> Response:
    """Shows one job."""
    parts, job_id = visit.parts, visit.name("job")
    try:
        record = await parts.jobs.get(visit.context, job_id)
    except JobNotFound:
        if not visit.done:
            raise
        return visit.render("gone.html", job_id, "jobs", back="jobs", what="Jobs")
    outcomes = await parts.jobs.jobs.outcomes(record.id)
    failures = sorted((one for one in outcomes.values() if one.error or one.failed_rows), key=lambda one: one.index)
    acts = visit.user.has(Scope.INFER)
    body: JobBody = shown_job(record, parts.jobs.now_s(), reads=visit.context.reads)
    return visit.render(
        "job.html",
        job_id,
        "jobs",
        job=body,
        cells=cells_of(record, outcomes),
        failures=failures[:MOST_FAILURES] if visit.context.reads else [],
        more_failures=max(len(failures) - MOST_FAILURES, 0),
        spec=msgspec.json.format(bytes(body.spec), indent=2).decode(),
        reads=visit.context.reads,
        preview=await _preview(visit, job_id),
        log=await parts.jobs.log(visit.context, job_id) if visit.context.reads else [],
        may_cancel=acts and not record.is_over and record.state != JobState.CANCELLING,
        may_resume=acts and record.state in ENDED_EARLY,
        may_delete=acts and record.is_over,
    )


async def _preview(visit: Visit, job_id: str) -> JobPreview | str:
    """Returns rows if the query asks for some, or why there are none; a page that is refreshed keeps its rows."""
    of = visit.query("rows")
    if not of or visit.request.headers.get("hx-target") == "rows" or not visit.context.reads:
        return ""
    try:
        return await visit.parts.jobs.preview(visit.context, job_id, preview_of(of), PREVIEW_ROWS)
    except QinferError as error:
        return error.message


def cells_of(record: JobRecord, outcomes: dict[int, ShardOutcome]) -> list[ShardCell]:
    """Returns a picture of a job's shards, at most `MOST_CELLS` cells: failed, partly failed, done, active, waiting."""
    if not record.shards:
        return []
    per_cell = -(-record.shards // MOST_CELLS)
    left_active = record.in_lane
    cells = []
    for first in range(0, record.shards, per_cell):
        last = min(first + per_cell, record.shards) - 1
        found = [outcomes.get(index) for index in range(first, last + 1)]
        known = [one for one in found if one is not None]
        if any(one.error for one in known):
            state = "failed"
        elif len(known) == len(found):
            state = "partly" if any(one.failed_rows for one in known) else "done"
        else:
            state = "active" if left_active > 0 else "waiting"
            left_active -= len(found) - len(known)
        cells.append(ShardCell(state, first, last))
    return cells


async def _cancel(visit: Visit) -> str:
    await visit.parts.jobs.cancel(visit.context, visit.name("job"))
    return "The job is cancelled; its finished parts stay, and it can be resumed."


async def _resume(visit: Visit) -> str:
    text = visit.value("error_threshold").strip()
    try:
        threshold = float(text) if text else None
        if threshold is not None and threshold == int(threshold) and abs(threshold) >= 1:
            threshold = int(threshold)
    except (ValueError, OverflowError):  # it may be infinite, or no number
        raise InvalidRequest(f"'{text[:40]}' is no number of rows, no share of them, and not -1") from None
    await visit.parts.jobs.resume(visit.context, visit.name("job"), Changes(error_threshold=threshold))
    return "The job goes on; finished work is kept."


async def _delete(visit: Visit) -> str:
    await visit.parts.jobs.delete(visit.context, visit.name("job"))
    return "The job's record is deleted; its output stays."
