"""What is done for a job that has ended before it was complete: the parts that are there are listed, to be read.

The list, `_manifest.partial.json`, says which end it is of, so that readers tell it from that of an earlier one. It may
be made by several processes at once, and again: after each time it is asked whether that end is the job's last still.
"""

import logging
from functools import partial

from qinfer.bulk.job import TERMINAL, JobState
from qinfer.bulk.parts import PartInfo
from qinfer.delivery.jobs import JobRecord
from qinfer.errors import InvalidRequest, QinferError
from qinfer_workers.bulk.documents import read_plan, spec_of, write_partial
from qinfer_workers.bulk.office import Office
from qinfer_workers.bulk.part_check import part_of

logger = logging.getLogger("qinfer_workers.bulk")

_EARLY = TERMINAL - {JobState.COMPLETED}


async def leave_partial(office: Office, job_id: str) -> None:
    """Lists the parts of a job that has ended early; does nothing for any other, or where it was never planned.

    Args:
        office: The ports.
        job_id: The job.

    Raises:
        QinferError: It did not work for now, and is to be tried again.
    """
    listed_at: float | None = None
    record = await office.jobs.get(job_id)
    while record is not None and record.shards and record.state in _EARLY and record.ended_at != listed_at:
        try:
            await _list_parts(office, record)
        except QinferError as error:
            if error.retryable and office.clock.now_s() - record.ended_at < office.settings.plan_timeout_s:
                raise
            logger.warning("no partial manifest", extra={"job": record.id, "reason": error.message})
        listed_at = record.ended_at
        record = await office.jobs.get(job_id)  # it may have been resumed meanwhile, and have ended again


async def _list_parts(office: Office, record: JobRecord) -> None:
    try:
        plan = await office.in_thread(read_plan, office.store_for, record.id, spec_of(record).output.url)
    except InvalidRequest:  # the output is another's: that is why the job failed
        return
    if plan is None:
        return
    parts = await office.each_in_thread(partial(part_of, office.store_for, plan), plan.shards)
    found = [(shard, part) for shard, part in zip(plan.shards, parts, strict=True) if isinstance(part, PartInfo)]
    now_s = office.clock.now_s()
    await office.in_thread(write_partial, office.store_for, plan, found, record.ended_at, now_s)
