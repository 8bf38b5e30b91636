"""The operator that scores files by a bulk job, and resumes it when Airflow repeats the task."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseOperator

from qinfer.client import JobStatus
from qinfer.client.job_flows import JobOptions, completed
from qinfer.errors import JobFailed, JobNotFound
from qinfer.integrations.airflow.hook import DEFAULT_CONNECTION, QinferHook
from qinfer.integrations.airflow.trigger import QinferBulkJobTrigger

POLL_S = 10.0

_READABLE = 80
"""The most characters before the digest; a job's id has at most 128."""


class QinferBulkJobOperator(BaseOperator):
    """Submits a bulk job and waits for its end; its result is the job's id, output and counts of rows.

    The job's id is made from the DAG, the task and its run: a retry, or a cleared task, finds the job of the last
    attempt, resumes it if it ended early, and waits for it if it still runs. A killed task cancels its job. A task that
    is cleared after its job was completed ends at once; with the option `overwrite`, the job runs again and replaces
    its output.

    Args:
        model: The model's name.
        inputs: Files and patterns: URLs, or paths that the gateway and the workers can read, too.
        output_url: The folder of the output.
        options: The job's other options; see `qinfer.client.job_flows.JobOptions`.
        job_id: An id of your own; it has to differ between runs.
        qinfer_conn_id: The id of the connection; see `QinferHook`.
        deferrable: Wait in the triggerer, not in a worker slot; default: the setting
            `operators.default_deferrable`.
        poll_s: Seconds between two checks of the job by the triggerer.
        wait_for_inputs_s: Seconds to wait in the worker slot until all inputs exist; for long waits use a
            sensor.
        arguments: The arguments of every operator.

    Raises:
        JobFailed: From the task: the job has failed, has expired or was cancelled.
        QinferError: From the task: the gateway refuses the job, or can't be reached.
    """

    template_fields: Sequence[str] = ("model", "inputs", "output_url", "options", "job_id", "qinfer_conn_id")
    template_fields_renderers = {"options": "json"}  # noqa: RUF012  as in the base
    ui_color = "#d7e8f7"

    def __init__(
        self,
        *,
        model: str,
        inputs: str | Sequence[str],
        output_url: str,
        options: JobOptions | None = None,
        job_id: str = "",
        qinfer_conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poll_s: float = POLL_S,
        wait_for_inputs_s: float = 0.0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.model, self.inputs, self.output_url = model, inputs, output_url
        self.options, self.job_id, self.qinfer_conn_id = options, job_id, qinfer_conn_id
        self.deferrable, self.poll_s, self.wait_for_inputs_s = deferrable, poll_s, wait_for_inputs_s

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Submits or resumes the job, and waits for its end here or in the triggerer."""
        self.job_id = self.job_id or job_id_of(context)
        options: JobOptions = {**(self.options or {}), "id": self.job_id}
        wait_s = self.wait_for_inputs_s
        with QinferHook(self.qinfer_conn_id).get_conn() as client:
            job = client.submit_job(
                self.model, self.inputs, self.output_url, resume=True, wait_for_inputs_s=wait_s, **options
            )
            self.log.info("job '%s' is submitted", job.id)
            if not self.deferrable or (status := job.status()).has_ended:
                return _result(job.wait(raise_on_failure=True))
        self.log.info("job '%s' is %s; the triggerer waits for its end", status.id, status.state)
        return self.defer(
            trigger=QinferBulkJobTrigger(self.job_id, self.qinfer_conn_id, self.poll_s),
            method_name="execute_complete",
            timeout=self.execution_timeout,
        )

    def execute_complete(self, context: Mapping[str, Any], event: Mapping[str, str]) -> dict[str, Any]:
        """Ends the task after the trigger's event."""
        job_id = event["job_id"]
        if not event["state"]:
            raise JobFailed(f"job '{job_id}' can't be waited for: {event['error']}", "unknown")
        with QinferHook(self.qinfer_conn_id).get_conn() as client:
            return _result(completed(client.job(job_id).status()))

    def on_kill(self) -> None:
        """Cancels the job of a killed task."""
        if not self.job_id:
            return
        with QinferHook(self.qinfer_conn_id).get_conn() as client:
            try:
                client.job(self.job_id).cancel()
            except JobNotFound:
                self.log.info("job '%s' was not created", self.job_id)


def job_id_of(context: Mapping[str, Any]) -> str:
    """Returns the id of a task's job, which all attempts of a task instance share."""
    instance = context["ti"]
    whole = [instance.dag_id, instance.task_id, instance.run_id, str(instance.map_index)]
    digest = hashlib.sha256("\0".join(whole).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._~-]", "-", f"{instance.dag_id}.{instance.task_id}")[:_READABLE]
    return f"{readable}.{digest}"


def _result(status: JobStatus) -> dict[str, Any]:
    return {
        "job_id": status.id,
        "output_url": status.output_url,
        "rows": status.rows,
        "rows_failed": status.rows_failed,
    }
