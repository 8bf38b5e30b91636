"""The wait for the end of a bulk job in Airflow's triggerer, where thousands of jobs share one process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from qinfer.errors import JobNotFound, QinferError
from qinfer.integrations.airflow.hook import QinferHook


class QinferBulkJobTrigger(BaseTrigger):
    """Waits until a bulk job has ended; its one event has the `job_id`, the job's `state` and its `error`.

    A restarted triggerer creates it again from its three arguments; the API key stays in the connection. It keeps
    asking while the gateway can't be reached.
    """

    def __init__(self, job_id: str, qinfer_conn_id: str, poll_s: float) -> None:
        super().__init__()
        self.job_id, self.qinfer_conn_id, self.poll_s = job_id, qinfer_conn_id, poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Returns the path of the class, and its arguments."""
        arguments = {"job_id": self.job_id, "qinfer_conn_id": self.qinfer_conn_id, "poll_s": self.poll_s}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields the event of the job's end, or of an error that is not retryable."""
        async with await QinferHook(self.qinfer_conn_id).get_async_conn() as client:
            while True:
                try:
                    status = await client.job(self.job_id).status()
                except QinferError as error:
                    if not error.retryable:
                        yield self._event("", error.message)
                        return
                    self.log.warning("job '%s' can't be looked at now: %s", self.job_id, error.message)
                else:
                    if status.has_ended:
                        yield self._event(status.state, status.error)
                        return
                await asyncio.sleep(self.poll_s)

    async def on_kill(self) -> None:
        """Cancels the job when a user marks or clears the deferred task (Airflow 3.3)."""
        async with await QinferHook(self.qinfer_conn_id).get_async_conn() as client:
            try:
                await client.job(self.job_id).cancel()
            except JobNotFound:
                self.log.info("job '%s' no longer exists", self.job_id)

    def _event(self, state: str, error: str) -> TriggerEvent:
        return TriggerEvent({"job_id": self.job_id, "state": state, "error": error})
