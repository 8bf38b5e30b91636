"""Bulk jobs of `qinfer.Client`: submitted, looked at, waited for, their output read."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from qinfer.client import job_flows
from qinfer.client.job_flows import JobLogLine, JobOptions, JobStatus, Location, Told, job_body
from qinfer.client.job_progress import shown_progress
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
        """Returns where it is."""
        return self._run(job_flows.job(self._policy, self.id))

    def wait(self, *, progress: bool = False, timeout_s: float = math.inf, on_status: Told | None = None) -> JobStatus:
        """Waits until it has ended, however it does; look at the state, or read the output.

        Args:
            progress: Show how far it is on stderr: a bar on a terminal, lines elsewhere.
            timeout_s: Wait no longer.
            on_status: Called with each status that is seen.

        Raises:
            DeadlineExceeded: It has not ended within `timeout_s`; it goes on.
        """
        with shown_progress() if progress else nullcontext(on_status or _unheard) as told:
            return self._run(job_flows.wait_for_job(self._policy, self.id, timeout_s, told))

    def cancel(self) -> JobStatus:
        """Stops it, unless it has ended; what it has written stays, and it can be resumed."""
        return self._run(job_flows.change_job(self._policy, self.id, "cancel"))

    def resume(
        self,
        *,
        error_threshold: float | None = None,
        max_parallel: int | None = None,
        deadline_s: float | None = None,
    ) -> JobStatus:
        """Has it go on after it failed, expired or was cancelled; what is there is not done again.

        Args:
            error_threshold: From now on; see `JobOptions`, and so the rest. `None` = as it was.
            max_parallel: See there.
            deadline_s: Seconds from now.

        Raises:
            Conflict: It is completed, or is being cancelled still.
        """
        changes = {"error_threshold": error_threshold, "max_parallel": max_parallel, "deadline_s": deadline_s}
        return self._run(job_flows.change_job(self._policy, self.id, "resume", **changes))

    def delete(self) -> None:
        """Has the gateway forget it; its output stays.

        Raises:
            Conflict: It has not ended.
        """
        self._run(job_flows.delete_job(self._policy, self.id))

    def log(self) -> list[JobLogLine]:
        """Returns what happened to it, the oldest first."""
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
        """Does the same, and returns a data frame."""
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
        """Has a model score files, and its outputs written to files; when this returns, they were found to fit.

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
        """Returns a job by its id; whether there is one is not asked yet."""
        return Job(self._run, self._policy, job_id)

    def jobs(self, *, state: str = "", limit: int = 100) -> list[JobStatus]:
        """Returns where the newest jobs are.

        Args:
            state: Only those in this state, such as `running`.
            limit: How many at most.
        """
        return self._run(job_flows.newest_jobs(self._policy, state, limit))


def _unheard(status: JobStatus) -> None:
    """Is told, and does nothing."""
