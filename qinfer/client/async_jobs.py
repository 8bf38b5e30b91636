"""Bulk jobs of `qinfer.AsyncClient`. The calls are those of `qinfer.client.jobs`, which describes them."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from qinfer.client import job_flows
from qinfer.client.job_flows import JobLogLine, JobOptions, JobStatus, Location, OnStatus, job_body
from qinfer.client.job_progress import progress_observer
from qinfer.client.steps import Flow, Policy

if TYPE_CHECKING:
    import pandas
    import pyarrow

T = TypeVar("T")


class AsyncRun(Protocol):
    """Carries flows out: what a client does."""

    async def __call__(self, flow: Flow[T]) -> T:
        """Returns what the flow returns."""
        ...


class AsyncJob:
    """A bulk job on a gateway: the calls of `Job` as coroutines.

    Args:
        run: Carries flows out.
        policy: How long calls may take.
        job_id: The job's id.

    Attributes:
        id: The job's id.
    """

    def __init__(self, run: AsyncRun, policy: Policy, job_id: str) -> None:
        self._run, self._policy = run, policy
        self.id = job_id

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"

    async def status(self) -> JobStatus:
        """Returns the state and the progress of the job; see `Job.status`."""
        return await self._run(job_flows.job(self._policy, self.id))

    async def wait(
        self, *, progress: bool = False, timeout_s: float = math.inf, on_status: OnStatus | None = None
    ) -> JobStatus:
        """Waits until the job has ended; see `Job.wait`."""
        with progress_observer(on_status, progress=progress) as observe:
            return await self._run(job_flows.wait_for_job(self._policy, self.id, timeout_s, observe))

    async def cancel(self) -> JobStatus:
        """Cancels the job unless it has ended; see `Job.cancel`."""
        return await self._run(job_flows.change_job(self._policy, self.id, "cancel"))

    async def resume(
        self,
        *,
        error_threshold: float | None = None,
        max_parallel: int | None = None,
        deadline_s: float | None = None,
    ) -> JobStatus:
        """Resumes the job; see `Job.resume`."""
        changes = {"error_threshold": error_threshold, "max_parallel": max_parallel, "deadline_s": deadline_s}
        return await self._run(job_flows.change_job(self._policy, self.id, "resume", **changes))

    async def delete(self) -> None:
        """Deletes the record of the job; see `Job.delete`."""
        await self._run(job_flows.delete_job(self._policy, self.id))

    async def log(self) -> list[JobLogLine]:
        """Returns the events of the job, the oldest first; see `Job.log`."""
        return await self._run(job_flows.job_log(self._policy, self.id))

    async def to_arrow(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pyarrow.Table":
        """Reads the output in a thread; see `Job.to_arrow`."""
        from qinfer.client.job_output import read_output

        return await asyncio.to_thread(read_output, await self.status(), columns, storage_options, partial=partial)

    async def to_pandas(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Reads the output as a data frame; see `Job.to_pandas`."""
        from qinfer.client.job_output import as_pandas

        table = await self.to_arrow(columns=columns, partial=partial, storage_options=storage_options)
        return await asyncio.to_thread(as_pandas, table)


class AsyncJobCalls:
    """The calls of `AsyncClient` about bulk jobs."""

    _policy: Policy

    async def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    async def submit_job(
        self, model: str, inputs: Location | Sequence[Location], output: Location, **options: Unpack[JobOptions]
    ) -> AsyncJob:
        """Submits a bulk job; see `Client.submit_job`."""
        body = job_body(model, inputs, output, options)
        return self.job((await self._run(job_flows.submit_job(self._policy, body))).id)

    def job(self, job_id: str) -> AsyncJob:
        """Returns the job of an id, without asking whether it exists; see `Client.job`."""
        return AsyncJob(self._run, self._policy, job_id)

    async def jobs(self, *, state: str = "", limit: int = 100) -> list[JobStatus]:
        """Returns the status of the newest jobs; see `Client.jobs`."""
        return await self._run(job_flows.newest_jobs(self._policy, state, limit))
