"""Bulk jobs of `qinfer.Client`: submit, observe, wait, cancel, resume, read the output."""

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


class Run(Protocol):
    """Carries flows out: what a client does."""

    def __call__(self, flow: Flow[T]) -> T:
        """Returns what the flow returns."""
        ...


class Job:
    """A bulk job on a gateway; made by `Client.submit_job`, `job` and `jobs`.

    Every method raises `JobNotFound` when the job was deleted or has ended too long ago, and else as `Client.infer`.

    Args:
        run: Carries flows out.
        policy: How long calls may take.
        job_id: The job's id.

    Attributes:
        id: The job's id.
    """

    def __init__(self, run: Run, policy: Policy, job_id: str) -> None:
        self._run, self._policy = run, policy
        self.id = job_id

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def status(self) -> JobStatus:
        """Returns the state and the progress of the job."""
        return self._run(job_flows.job(self._policy, self.id))

    def wait(
        self, *, progress: bool = False, timeout_s: float = math.inf, on_status: OnStatus | None = None
    ) -> JobStatus:
        """Waits until the job has ended in any state, and returns its last status.

        Args:
            progress: Show the progress on stderr: a bar on a terminal, lines elsewhere.
            timeout_s: The longest wait.
            on_status: Called with each status that is seen.

        Raises:
            DeadlineExceeded: The job has not ended within `timeout_s`; it continues.
        """
        with progress_observer(on_status, progress=progress) as observe:
            return self._run(job_flows.wait_for_job(self._policy, self.id, timeout_s, observe))

    def cancel(self) -> JobStatus:
        """Cancels the job unless it has ended; the parts that are written stay, and the job can be resumed."""
        return self._run(job_flows.change_job(self._policy, self.id, "cancel"))

    def resume(
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
        return self._run(job_flows.change_job(self._policy, self.id, "resume", **changes))

    def delete(self) -> None:
        """Deletes the record of the job; its output stays.

        Raises:
            Conflict: The job has not ended.
        """
        self._run(job_flows.delete_job(self._policy, self.id))

    def log(self) -> list[JobLogLine]:
        """Returns the events of the job, the oldest first."""
        return self._run(job_flows.job_log(self._policy, self.id))

    def to_arrow(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pyarrow.Table":
        """Reads the output of a completed job from its store, which this machine has to reach; rows keep their order.

        Args:
            columns: Only these; `None` = all.
            partial: Of a job that failed, expired or was cancelled, read the parts that there are; their list, which
                is made after the end, is waited for, but not for long.
            storage_options: What fsspec needs to open the store, besides what is in the environment.

        Raises:
            InvalidRequest: `columns` is empty.
            ResultNotFound: The job is not completed, or its output is not there, or not listed yet.
            UnsupportedFeature: A library is missing; the text says how to install it.
            QinferError: The store can't be read.
        """
        from qinfer.client.job_output import read_output

        return read_output(self.status(), columns, storage_options, partial=partial)

    def to_pandas(
        self,
        *,
        columns: Sequence[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Reads the output as a data frame; otherwise as `to_arrow`."""
        from qinfer.client.job_output import as_pandas

        return as_pandas(self.to_arrow(columns=columns, partial=partial, storage_options=storage_options))


class JobCalls:
    """The calls of `Client` about bulk jobs."""

    _policy: Policy

    def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    def submit_job(
        self, model: str, inputs: Location | Sequence[Location], output: Location, **options: Unpack[JobOptions]
    ) -> Job:
        """Submits a bulk job, in which a model scores files; on return the gateway has checked that they fit the model.

        Args:
            model: The model's name.
            inputs: Files and patterns, as URLs such as `s3://bucket/in/*.parquet`, or as paths, which have to be the
                same for the gateway and the workers.
            output: The folder of the output, which is empty.
            options: See `JobOptions`.

        Raises:
            InvalidRequest: The files do not fit the model, an option is wrong, or the output is not empty; the text
                names column or URL.
            ModelNotFound: No such model or version.
            Forbidden: The server may not use that store.
            Conflict: The id belongs to another job.
            QinferError: As `infer`.
        """
        body = job_body(model, inputs, output, options)
        return self.job(self._run(job_flows.submit_job(self._policy, body)).id)

    def job(self, job_id: str) -> Job:
        """Returns the job of an id, without asking whether it exists."""
        return Job(self._run, self._policy, job_id)

    def jobs(self, *, state: str = "", limit: int = 100) -> list[JobStatus]:
        """Returns the status of the newest jobs.

        Args:
            state: Only those in this state, such as `running`.
            limit: How many at most.
        """
        return self._run(job_flows.newest_jobs(self._policy, state, limit))
