"""A bulk job: status, waiting, cancellation, resumption and output."""

import math
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qinfer.client import job_flows
from qinfer.client.job_flows import JobStatus, OnStatus, completed
from qinfer.client.job_progress import progress_observer
from qinfer.client.steps import AsyncFlowRunner, Policy
from qinfer.wire.bodies import JobLogLine

if TYPE_CHECKING:
    import pandas
    import pyarrow


class AsyncJob:
    """A bulk job on a gateway; made by `AsyncClient.submit_job` and `AsyncClient.job`.

    Every method raises `JobNotFound` if the job was deleted or ended too long ago, and otherwise as
    `AsyncClient.infer`.

    Attributes:
        id: The job's id.
    """

    def __init__(self, run: AsyncFlowRunner, policy: Policy, job_id: str) -> None:
        self._run, self._policy = run, policy
        self.id = job_id

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"

    async def status(self) -> JobStatus:
        """Returns the state and the progress of the job."""
        return await self._run(job_flows.job(self._policy, self.id))

    async def wait(
        self,
        *,
        progress: bool = False,
        timeout_s: float = math.inf,
        on_status: OnStatus | None = None,
        raise_on_failure: bool = False,
    ) -> JobStatus:
        """Waits until the job has ended in any state, and returns its last status.

        Args:
            progress: Show the progress on stderr: a bar on a terminal, lines elsewhere.
            timeout_s: The longest wait.
            on_status: Called with each status.
            raise_on_failure: Raise an error if the job ends in another state than `completed`.

        Raises:
            DeadlineExceeded: The job has not ended within `timeout_s`; it continues.
            JobFailed: With `raise_on_failure`: the job has failed, has expired or was cancelled.
        """
        with progress_observer(on_status, progress=progress) as observe:
            status = await self._run(job_flows.wait_for_job(self._policy, self.id, timeout_s, observe))
        return completed(status) if raise_on_failure else status

    async def cancel(self) -> JobStatus:
        """Cancels the job unless it has ended; its output so far is kept, and the job can be resumed."""
        return await self._run(job_flows.change_job(self._policy, self.id, "cancel"))

    async def resume(
        self,
        *,
        error_threshold: float | None = None,
        max_parallel: int | None = None,
        deadline_s: float | None = None,
    ) -> JobStatus:
        """Resumes a failed, expired or cancelled job; finished work is kept.

        Args:
            error_threshold: The new value; see `JobOptions`. `None` = unchanged, for all three.
            max_parallel: The new value.
            deadline_s: Seconds from now.

        Raises:
            Conflict: The job is completed, or its cancellation has not finished.
        """
        changes = {"error_threshold": error_threshold, "max_parallel": max_parallel, "deadline_s": deadline_s}
        return await self._run(job_flows.change_job(self._policy, self.id, "resume", **changes))

    async def delete(self) -> None:
        """Deletes the record of the job; its output is kept.

        Raises:
            Conflict: The job has not ended.
        """
        await self._run(job_flows.delete_job(self._policy, self.id))

    async def log(self) -> list[JobLogLine]:
        """Returns the events of the job, the oldest first."""
        return await self._run(job_flows.job_log(self._policy, self.id))

    async def to_arrow(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pyarrow.Table":
        """Reads the output of a completed job from its store, which this machine has to reach; rows keep their order.

        In an event loop, a thread reads the output.

        Args:
            columns: The columns to read; `None` = all.
            partial: Read the existing parts of a job that failed, expired or was cancelled; waits briefly for the list
                of parts, which is written after the end.
            storage_options: Options of fsspec for the store, besides those in the environment.

        Raises:
            InvalidRequest: `columns` is empty.
            ResultNotFound: The job is not completed, or its output does not exist, or is not listed yet.
            UnsupportedFeature: A library is missing; the text says how to install it.
            QinferError: The store can't be read.
        """
        from qinfer.client.job_output import read_output

        return await to_thread(read_output, await self.status(), columns, storage_options, partial=partial)

    async def to_pandas(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Reads the output as a data frame; otherwise as `to_arrow`."""
        from qinfer.client.job_output import as_pandas

        table = await self.to_arrow(columns=columns, partial=partial, storage_options=storage_options)
        return await to_thread(as_pandas, table)
