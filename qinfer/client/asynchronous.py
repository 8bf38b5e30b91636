"""`qinfer.AsyncClient`: the client for asyncio; `qinfer.Client` describes the calls."""

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from qinfer.client import flows, job_flows
from qinfer.client.budget import RETRY_SHARE
from qinfer.client.connection import DEFAULT_TIMEOUT_S, Pool, options
from qinfer.client.flows import Ask, Keys, SubmitArguments
from qinfer.client.hedging import HedgeAfter, HedgedTasks, Hedging
from qinfer.client.job_flows import JobEstimate, JobFilters, JobOptions, JobStatus, Location, OnMissing, job_body
from qinfer.client.jobs import AsyncJob
from qinfer.client.model_flows import Inputs
from qinfer.client.models import AsyncModelCalls
from qinfer.client.responses import EventReader, Follower, StreamEvent, object_of, result_of
from qinfer.client.results import InferResult, RequestHandle, RequestStatus, handle_of
from qinfer.client.sequences import AsyncSequence, StepFlags
from qinfer.client.steps import Flow, Outcome, Pause, Send, problem_of_connection
from qinfer.client.streams import stream_in_tasks
from qinfer.core.clock import Clock
from qinfer.core.messages import Scalar
from qinfer.errors import QinferError

T = TypeVar("T")


class AsyncClient(AsyncModelCalls):
    """The client of a gateway for one event loop; a cancelled `infer` cancels its request on the server.

    The arguments are those of `Client`; `transport` is an asynchronous one, and `sleep` a coroutine function.

    Raises:
        InvalidRequest: An argument is wrong.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        resend: bool = True,
        retry_share: float | None = RETRY_SHARE,
        hedge_after: HedgeAfter = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        http, self._policy = options(
            url,
            api_key=api_key,
            headers=headers,
            ca_file=ca_file,
            timeout_s=timeout_s,
            max_retries=max_retries,
            resend=resend,
            retry_share=retry_share,
            clock=clock,
        )
        self._hedged = None if hedge_after is None else HedgedTasks(Hedging(hedge_after, self._policy))
        self._pool = Pool(lambda: httpx.AsyncClient(transport=transport, **http))
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Closes the connections."""
        await self.close()

    async def close(self) -> None:
        """Closes the connections; see `Client.close`."""
        for http in self._pool.close():
            await http.aclose()

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        priority: int = 0,
        id: str | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> InferResult:
        """Sends a request to a model and waits for its answer; see `Client.infer`."""
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, timeout_s, headers)
        return await self._run_flow(flows.infer(self._policy, ask))

    def infer_stream(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        priority: int = 0,
        id: str | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InferResult]:
        """Sends a request to a model, and yields its responses as they come; see `Client.infer_stream`.

        After a `break`, close the iterator (`contextlib.aclosing`), which cancels the request.
        """
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, timeout_s, headers)
        return self._results(flows.infer_stream(self._policy, ask), result_of, timeout_s)

    async def generate(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Sends free-form JSON to a model and returns its answer's JSON; see `Client.generate`."""
        ask = Ask(model, inputs, version, None, parameters, 0, id, timeout_s, headers)
        return await self._run_flow(flows.generate(self._policy, ask))

    def generate_stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        id: str | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Sends free-form JSON to a model, and yields the JSON of its responses; see `Client.generate_stream`.

        After a `break`, close the iterator (`contextlib.aclosing`), which cancels the request.
        """
        ask = Ask(model, inputs, version, None, parameters, 0, id, timeout_s, headers)
        return self._results(flows.generate_stream(self._policy, ask), object_of, timeout_s)

    async def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        priority: int = 0,
        id: str | None = None,
        idempotency_key: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        webhook: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RequestHandle:
        """Submits a request, to fetch its result later; see `Client.submit`."""
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, headers=headers)
        submission = SubmitArguments(idempotency_key, request_id, timeout_s, webhook)
        return await self._run_flow(flows.submit(self._policy, ask, submission))

    async def result(self, request: RequestHandle | str, *, wait_s: float = DEFAULT_TIMEOUT_S) -> InferResult:
        """Returns a request's result; see `Client.result`."""
        return await self._run_flow(flows.result(self._policy, handle_of(request), wait_s))

    async def responses(self, request: RequestHandle | str) -> AsyncIterator[InferResult]:
        """Yields the responses of a stored request as they come; see `Client.responses`."""
        handle, follower, tries = handle_of(request), Follower(), 0
        while not follower.has_ended:
            flow = flows.follow(self._policy, handle, follower, tries)
            async for result in self._results(flow, follower.result_of, resumes=True):
                yield result
            tries += 1

    async def status(self, request: RequestHandle | str) -> RequestStatus:
        """Returns the state of a request; see `Client.status`."""
        return await self._run_flow(flows.status(self._policy, handle_of(request)))

    async def cancel(self, request: RequestHandle | str) -> str:
        """Cancels a request and returns its state; see `Client.cancel`."""
        return await self._run_flow(flows.cancel(self._policy, handle_of(request)))

    def stream(
        self,
        model: str,
        inputs: Iterable[Inputs] | AsyncIterable[Inputs],
        *,
        concurrency: int = 64,
        ordered: bool = True,
        keys: Keys | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[tuple[int, InferResult | QinferError]]:
        """Sends many requests to a model, several at a time, in constant memory; see `Client.stream`.

        When the iteration ends early, the running calls are cancelled. After a `break`, close the iterator
        (`contextlib.aclosing`); otherwise they run until Python collects it.
        """

        async def ask_one(index: int, item: Inputs) -> InferResult:
            ask = Ask(
                model=model, inputs=item, version=version, outputs=outputs, parameters=parameters, priority=priority
            )
            key = None if keys is None else keys(index, item)
            return await self._run_flow(flows.infer_or_resume(self._policy, ask, key))

        return stream_in_tasks(inputs, ask_one, concurrency=concurrency, ordered=ordered)

    def sequence(
        self, model: str, *, correlation_id: int | str | None = None, version: int | None = None
    ) -> AsyncSequence:
        """Begins a sequence of requests to a stateful model; see `Client.sequence`."""
        return AsyncSequence(self._run_flow, StepFlags(self._policy, model, version, correlation_id))

    async def submit_job(
        self,
        model: str,
        inputs: Location | Sequence[Location],
        output: Location,
        *,
        resume: bool = False,
        wait_for_inputs_s: float = 0.0,
        on_missing: OnMissing | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """Submits a bulk job; see `Client.submit_job`."""
        body = job_body(model, inputs, output, options)
        flow = job_flows.submit_job(self._policy, body, resume=resume, wait_s=wait_for_inputs_s, on_missing=on_missing)
        return self.job((await self._run_flow(flow)).id)

    async def validate_job(
        self, model: str, inputs: Location | Sequence[Location], output: Location, **options: Unpack[JobOptions]
    ) -> JobEstimate:
        """Checks and estimates a bulk job; see `Client.validate_job`."""
        return await self._run_flow(job_flows.validate_job(self._policy, job_body(model, inputs, output, options)))

    def job(self, job_id: str) -> AsyncJob:
        """Returns the job of an id, without a check that it exists; see `Client.job`."""
        return AsyncJob(self._run_flow, self._policy, job_id)

    async def jobs(self, *, limit: int = 100, **filters: Unpack[JobFilters]) -> list[JobStatus]:
        """Returns the status of the newest jobs; see `Client.jobs`."""
        return await self._run_flow(job_flows.newest_jobs(self._policy, limit, filters))

    async def _results(
        self,
        flow: Flow[httpx.Response],
        take: Callable[[StreamEvent], T | None],
        timeout_s: float | None = None,
        *,
        resumes: bool = False,
    ) -> AsyncIterator[T]:
        """Yields the results that `take` makes of a reply's events, over a connection of its own.

        If the caller `resumes` with another reply, a broken connection ends this one without an error.
        """
        http, reader = self._pool.take(), EventReader()
        try:
            async with aclosing(await self._run_flow(flow, partial(_open_stream, http))) as reply:
                async for piece in reply.aiter_bytes():
                    for event in reader.feed(piece):
                        if (result := take(event)) is not None:
                            yield result
        except httpx.RequestError as error:
            if not resumes:
                policy = self._policy.within(timeout_s)
                raise problem_of_connection(error, policy.url, policy.timeout_s).error from None
        finally:
            self._pool.give(http)

    async def _run_flow(self, flow: Flow[T], exchange: Callable[[Send], Awaitable[Outcome]] | None = None) -> T:
        """Executes a flow; `exchange` sends its requests."""
        exchange = exchange or self._exchange
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Pause):
                await self._sleep(step.seconds)
                outcome = None
            else:
                outcome = await exchange(step)

    async def _exchange(self, send: Send) -> Outcome:
        if self._hedged is not None:
            return await self._hedged.exchange(send, self._transmit)
        return await self._transmit(send)

    async def _transmit(self, send: Send) -> Outcome:
        http = self._pool.take()
        try:
            return await http.request(
                send.method, send.url, headers=send.headers, content=send.content, timeout=send.http_timeout
            )
        except httpx.RequestError as error:
            return error
        finally:
            self._pool.give(http)


async def _open_stream(http: httpx.AsyncClient, send: Send) -> Outcome:
    """Sends a request of a flow whose last reply is a stream."""
    request = http.build_request(
        send.method, send.url, headers=send.headers, content=send.content, timeout=send.http_timeout
    )
    try:
        reply = await http.send(request, stream=True)
        if not (send.streams and reply.is_success):
            await reply.aread()
    except httpx.RequestError as error:
        return error
    return reply
