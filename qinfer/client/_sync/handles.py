# Made by scripts/generate_client.py from qinfer/client/_async/handles.py; `make docs` writes it anew.
"""Handles of what lasts longer than a call: a bulk job, and a sequence.

A sequence is consecutive requests (steps) to a stateful model:

with client.sequence("counter") as sequence:
sequence.infer({"x": x})             START, step 1
sequence.infer({"x": x})             step 2
sequence.infer({"x": x}, end=True)   step 3, END
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qinfer.client import flows, job_flows, model_flows, values
from qinfer.client.flows import StepFlags
from qinfer.client.job_flows import JobStatus, OnStatus, completed, progress_observer
from qinfer.client.model_flows import Inputs
from qinfer.client.results import InferResult
from qinfer.client.steps import FlowRunner, Policy
from qinfer.core.messages import Scalar
from qinfer.wire.bodies import JobLogLine, JobPreview

if TYPE_CHECKING:
    import pandas
    import pyarrow


class Job:
    """A bulk job on a gateway; made by `Client.submit_job` and `Client.job`.

    Every method raises `JobNotFound` if the job was deleted or ended too long ago, and otherwise as
    `Client.infer`.

    Attributes:
        id: The job's id.
    """

    def __init__(self, run: FlowRunner, policy: Policy, job_id: str) -> None:
        self._run, self._policy = run, policy
        self.id = job_id

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def status(self) -> JobStatus:
        """Returns the state and the progress of the job."""
        return self._run(job_flows.job(self._policy, self.id))

    def wait(
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
            status = self._run(job_flows.wait_for_job(self._policy, self.id, timeout_s, observe))
        return completed(status) if raise_on_failure else status

    def cancel(self) -> JobStatus:
        """Cancels the job unless it has ended; its output so far is kept, and the job can be resumed."""
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
        """Deletes the record of the job; its output is kept.

        Raises:
            Conflict: The job has not ended.
        """
        self._run(job_flows.delete_job(self._policy, self.id))

    def log(self) -> list[JobLogLine]:
        """Returns the events of the job, the oldest first."""
        return self._run(job_flows.job_log(self._policy, self.id))

    def preview(self, of: str = "output", rows: int = 20) -> JobPreview:
        """Returns the first rows of the job's files as text, which the gateway reads; this machine needs no store.

        Args:
            of: `output` = the parts written so far, `input`, or `failed` = the rows that failed, with their errors.
            rows: How many at most, up to 100.

        Raises:
            InvalidRequest: `of` or `rows` can't be, or the files can't be read.
        """
        return self._run(job_flows.job_preview(self._policy, self.id, of, rows))

    def to_arrow(
        self,
        *,
        columns: Items[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pyarrow.Table":
        """Reads the output of a completed job from its store, which this machine has to reach; rows keep their order.

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

        return read_output(self.status(), columns, storage_options, partial=partial)

    def to_pandas(
        self,
        *,
        columns: Items[str] | None = None,
        partial: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Reads the output as a data frame; otherwise as `to_arrow`."""
        from qinfer.client.job_output import as_pandas

        table = self.to_arrow(columns=columns, partial=partial, storage_options=storage_options)
        return as_pandas(table)


class ModelFunction:
    """A model, called as a function; made by `Client.model`."""

    def __init__(self, run: FlowRunner, policy: Policy, name: str, version: int | None) -> None:
        self._run, self._policy = run, policy
        self._name, self._version = name, version
        self._config: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<ModelFunction {self._name}>"

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """Runs the model: `embed(text=["hi"])` gives `{"embedding": array([[…]])}`.

        The first call reads the model's configuration, which later calls use.

        Args:
            **inputs: Each a list or an array of items, or each one item; `None` leaves an optional input out.

        Returns:
            The outputs by name: texts as `str`, others as arrays; of one item, without the dimension of the batch.

        Raises:
            InvalidRequest: An input is unknown, or does not fit the model.
            QinferError: As `Client.infer`.
        """
        if self._config is None:
            self._config = self._run(model_flows.config(self._policy, self._name, self._version))
        tensors, is_one = values.to_tensors(self._config, inputs)
        ask = flows.Ask(self._name, tensors, self._version)
        result = self._run(flows.infer(self._policy, ask))
        return values.from_tensors(self._config, result.tensors, is_one=is_one)


class Sequence:
    """A sequence of requests to a stateful model; made by `Client.sequence`.

    The first step is sent with START. Without a step with `end=True`, the sequence ends after its model's idle time.
    """

    def __init__(self, run: FlowRunner, steps: StepFlags) -> None:
        self._run, self._steps = run, steps
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Sequence {self.correlation_id}>"

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Sends nothing: only a step can carry END."""

    @property
    def correlation_id(self) -> int | str:
        """The id by which the server knows the sequence."""
        return self._steps.correlation_id

    def infer(
        self,
        inputs: Inputs,
        *,
        end: bool = False,
        outputs: Items[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> InferResult:
        """Sends the next step and waits for its answer; concurrent steps are sent one after the other.

        The call is repeated like `Client.infer`. If it still fails without an answer (`Unreachable`,
        `Overloaded`), repeat it with the same inputs: the server executes the step once. After `InferenceFailed` the
        sequence continues from the state before that step.

        Args:
            inputs: As in `Client.infer`, with a batch dimension of 1 if the model has one.
            end: Whether it is the last step.
            outputs: As in `Client.infer`.
            parameters: As in `Client.infer`.

        Raises:
            SequenceLost: The state is lost with its worker, or with Redis; begin another sequence.
            SequenceEnded: The sequence has ended, by an error at an earlier step, or by its idle time.
            InvalidRequest: Also: the last step was sent, or an unanswered step was not repeated.
            QinferError: As `Client.infer`.
        """
        with self._lock:
            return self._run(self._steps.infer(inputs, outputs, parameters, end=end))
