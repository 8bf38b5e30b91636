# Made by scripts/generate_client.py from qinfer/client/_async/client.py; `make docs` writes it anew.
"""`qinfer.Client`: the calls of a gateway, and the execution of their flows."""

import os
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from time import sleep
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from qinfer.client import flows, job_flows, model_flows, request_flows
from qinfer.client._sync import handles
from qinfer.client._sync.handles import Job
from qinfer.client.connection import DEFAULT_TIMEOUT_S, Pool, options
from qinfer.client.flows import Ask, Keys, StepFlags, SubmitArguments
from qinfer.client.hedging import HedgeAfter, HedgedThreads, Hedging
from qinfer.client.job_flows import JobFilters, JobOptions, JobStatus, Location, OnMissing, job_body
from qinfer.client.model_flows import Inputs, OnPage
from qinfer.client.request_flows import OnOperation, OperationStatus, RequestFilters
from qinfer.client.results import (
    EventReader,
    Follower,
    InferResult,
    ModelStatistics,
    RequestHandle,
    RequestStatus,
    StreamEvent,
    handle_of,
    object_of,
    result_of,
)
from qinfer.client.steps import Flow, Outcome, Pause, Send, problem_of_connection
from qinfer.client.streams import stream_in_threads
from qinfer.core.clock import Clock
from qinfer.core.messages import Scalar
from qinfer.core.retry import RETRY_SHARE
from qinfer.errors import QinferError
from qinfer.wire.bodies import JobEstimate, ModelIndexEntry, ModelMetadata, RecordedRequest

T = TypeVar("T")


class Client:
    """The client of a gateway, or of several that share a queue.

    If the server is overloaded (429, 503) or can't be reached, a call is repeated until its time is over, after
    `Retry-After` or a growing pause. All calls use one gateway until it can't be reached, then the next. Inference may
    be executed twice, as it may be in the server; `resend=False` keeps the client from causing that.

    Args:
        url: The gateway's URL, or several, the preferred one first.
        api_key: Sent as `Authorization: Bearer`; `None` = the value of `QINFER_API_KEY`, if any, and empty = no key.
        headers: Headers of every request.
        ca_file: A PEM file of certificate authorities for the gateway's certificate; `None` = those that the variables
            `SSL_CERT_FILE` and `SSL_CERT_DIR` name, or httpx's own.
        timeout_s: How long a call may take, including its repetitions.
        max_retries: The most repetitions of a call; `None` = as many as its time allows.
        resend: Repeat inference whose connection broke after it was sent; otherwise such a call fails with
            `Unreachable`. Calls with an idempotency key, an id or a step number are always repeated.
        retry_share: The budget of repetitions per call, over all calls, beside a reserve of 10 a second. When it is
            used up, repetitions come later; `None` = no limit.
        hedge_after: Seconds after which `submit`, `result` and `status` send an unanswered request a second time, to
            another gateway if there are several; the first answer counts. `p95` = the time in which 19 of 20 of them
            are answered; `None` = never. `infer` is never hedged, because it could be executed twice.
        transport: Replaces httpx's own: for other TLS settings, proxies, tests. By default the proxies of the
            environment are used.
        clock: Measures time; for tests.
        sleep: Waits for a number of seconds; for tests.

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
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = sleep,
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
        self._pool = Pool(lambda: httpx.Client(transport=transport, **http))
        hedging = None if hedge_after is None else Hedging(hedge_after, self._policy)
        self._hedged = None if hedging is None else HedgedThreads(hedging, self._pool, _transmit)
        self._sleep = sleep

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Closes the connections."""
        self.close()

    def close(self) -> None:
        """Closes the connections; the client can't be used any longer."""
        for http in self._pool.close():
            http.close()

    def infer(
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
        """Sends a request to a model and waits for its answer.

        Args:
            model: The model's name.
            inputs: The inputs by name, with the batch dimension if the model has one: numpy arrays of the model's
                datatypes; lists, for which the client reads the datatypes from the model's metadata; or
                `qinfer.tensors.Tensor`, for instance for BF16.
            version: The version; `None` = the highest ready one.
            outputs: The outputs to return; `None` = all.
            parameters: Custom parameters for the backend, and Triton's own, such as `timeout` in microseconds. A step
                of a sequence (`sequence_id`) is repeated only if it has a number, `qinfer_step`: see `sequence`.
            priority: The priority level, 1 the most urgent; 0 = the model's default.
            id: An id that the result echoes.
            timeout_s: How long the call may take; `None` = the client's `timeout_s`.
            headers: Headers of this request, besides the client's.

        Raises:
            InvalidRequest: The inputs do not fit the model.
            ModelNotFound: The model or version does not exist.
            Overloaded: The server still refused the request after the repetitions.
            DeadlineExceeded: No answer came within `timeout_s`.
            InferenceFailed: The model raised an error.
            Unreachable: No gateway answers.
            QinferError: Any other error of the server.
        """
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, timeout_s, headers)
        return self._run_flow(flows.infer(self._policy, ask))

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
    ) -> Iterator[InferResult]:
        """Sends a request to a model, and yields its responses as they come: any number of a decoupled model, else one.

        The request is sent when the iteration starts. The model waits while the caller does not read, and leaving the
        iteration cancels the request. The call is repeated like `infer`, but only before the first response. The
        arguments are those of `infer`, except that `timeout_s` limits the wait for each response.

        Raises:
            StreamBroken: The worker ended after some responses; a new request starts from the beginning.
            QinferError: As `infer`, before or after any response.
        """
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, timeout_s, headers)
        return self._results(flows.infer_stream(self._policy, ask), result_of, timeout_s)

    def generate(
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
        """Sends free-form JSON to a model and returns its answer's JSON, as in Triton's generate extension.

        Args:
            model: The model's name; it gives one response per request.
            inputs: The inputs by name, without the batch dimension: `{"text_input": "…"}`. Numbers, texts, lists and
                arrays; a name that is not an input is a parameter.
            version: The version; `None` = the highest ready one.
            parameters: Custom parameters for the backend.
            id: An id that the answer echoes.
            timeout_s: How long the call may take; `None` = the client's `timeout_s`.
            headers: Headers of this request, besides the client's.

        Returns:
            The outputs by name, with `model_name` and `model_version`.

        Raises:
            QinferError: As `infer`.
        """
        ask = Ask(model, inputs, version, None, parameters, 0, id, timeout_s, headers)
        return self._run_flow(flows.generate(self._policy, ask))

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
    ) -> Iterator[dict[str, Any]]:
        """Sends free-form JSON to a model, and yields the JSON of its responses as they come.

        Leaving the iteration cancels the request. The arguments are those of `generate`, except that `timeout_s` limits
        the wait for each response.

        Raises:
            QinferError: As `infer`, before or after any response.
        """
        ask = Ask(model, inputs, version, None, parameters, 0, id, timeout_s, headers)
        return self._results(flows.generate_stream(self._policy, ask), object_of, timeout_s)

    def submit(
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
        """Submits a request, to fetch its result later; on return the request is stored durably.

        Args:
            model: As in `infer`.
            inputs: As in `infer`.
            version: As in `infer`.
            outputs: As in `infer`.
            parameters: As in `infer`.
            priority: As in `infer`.
            id: As in `infer`.
            idempotency_key: Two submissions with the same key and content are one request. By default each call has a
                key of its own, which makes its repetitions safe.
            request_id: An id of your own for the request, unique within the model; by default the server makes one.
            timeout_s: Seconds until the request expires; `None` = the model's default.
            webhook: A URL to notify when the request ends; the server has to allow it.
            headers: As in `infer`.

        Raises:
            Conflict: The key or id belongs to another request.
            QinferError: As `infer`.
        """
        ask = Ask(model, inputs, version, outputs, parameters, priority, id, headers=headers)
        submission = SubmitArguments(idempotency_key, request_id, timeout_s, webhook)
        return self._run_flow(flows.submit(self._policy, ask, submission))

    def result(self, request: RequestHandle | str, *, wait_s: float = DEFAULT_TIMEOUT_S) -> InferResult:
        """Returns a request's result, which can be read repeatedly until its retention is over.

        Args:
            request: The request's handle, or the id that the server made.
            wait_s: How long to wait for the end; 0 = do not wait, `math.inf` = until the request ends.

        Raises:
            ResultNotFound: The request has not ended within `wait_s`.
            ResultExpired: The result is no longer kept.
            RequestNotFound: The request does not exist.
            DeadlineExceeded: The request expired before it was executed.
            Cancelled: The request was cancelled.
            InferenceFailed: The model raised an error.
            QinferError: As `infer`.
        """
        return self._run_flow(flows.result(self._policy, handle_of(request), wait_s))

    def responses(self, request: RequestHandle | str) -> Iterator[InferResult]:
        """Yields the responses of a stored request as they come, until it has ended: any number of a decoupled model.

        They can be read repeatedly until their retention is over. A broken connection is replaced, without repeating
        responses.

        Args:
            request: As in `result`.

        Raises:
            QinferError: As `result`; a failed request raises after its stored responses.
        """
        handle, follower, tries = handle_of(request), Follower(), 0
        while not follower.has_ended:
            flow = flows.follow(self._policy, handle, follower, tries)
            for result in self._results(flow, follower.result_of, resumes=True):
                yield result
            tries += 1

    def status(self, request: RequestHandle | str) -> RequestStatus:
        """Returns the state of a request.

        Raises:
            RequestNotFound: The request does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(flows.status(self._policy, handle_of(request)))

    def cancel(self, request: RequestHandle | str) -> str:
        """Cancels a request; an execution that has begun may still run to its end.

        The result of an ended request is removed.

        Returns:
            The request's state: `cancelled`, or its earlier end.

        Raises:
            RequestNotFound: The request does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(flows.cancel(self._policy, handle_of(request)))

    def requests(self, *, limit: int = 100, **filters: Unpack[RequestFilters]) -> list[RequestStatus]:
        """Returns stored requests, model by model: the unfinished ones first, then failed, expired and others.

        Synchronous requests, as of `infer`, are not stored.

        Args:
            limit: The most requests to return.
            filters: Which requests; see `RequestFilters`.

        Raises:
            Forbidden: The key does not see that tenant.
            QinferError: As `infer`.
        """
        return self._run_flow(request_flows.requests(self._policy, limit, filters))

    def timeline(self, request: RequestHandle | str) -> list[dict[str, Any]]:
        """Returns the steps of a stored request: the `event`, `at` which instant and `by` which worker it came.

        Raises:
            RequestNotFound: The request does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(request_flows.timeline(self._policy, handle_of(request)))

    def operate(
        self,
        action: str,
        *,
        dry_run: bool = False,
        wait_s: float = DEFAULT_TIMEOUT_S,
        on_status: OnOperation | None = None,
        **filters: Unpack[RequestFilters],
    ) -> OperationStatus:
        """Changes many stored requests, or dead letters, of a model, in the background of the gateways.

        Args:
            action: `cancel` unfinished requests, `purge` the results of ended ones, `replay` dead letters, or `discard`
                them.
            dry_run: Only count, and show a sample of ids.
            wait_s: How long to wait for the end; 0 = do not wait. The operation goes on in any case.
            on_status: Called with each status that is read.
            filters: Which requests; see `RequestFilters`. `model` is necessary; dead letters have no `state`.

        Raises:
            InvalidRequest: The filter names no model, or an unknown field.
            QinferError: As `infer`.
        """
        observe = on_status or (lambda _: None)
        flow = request_flows.operate(self._policy, action, filters, observe, dry_run=dry_run, wait_s=wait_s)
        return self._run_flow(flow)

    def operations(self, *, limit: int = 100) -> list[OperationStatus]:
        """Returns the newest operations of the last week."""
        return self._run_flow(request_flows.operations(self._policy, limit))

    def stop_operation(self, operation_id: str) -> OperationStatus:
        """Stops an operation; its changes stay.

        Raises:
            RequestNotFound: The operation does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(request_flows.stop_operation(self._policy, operation_id))

    def stream(
        self,
        model: str,
        inputs: Iterable[Inputs],
        *,
        concurrency: int = 64,
        ordered: bool = True,
        keys: Keys | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        priority: int = 0,
    ) -> Iterator[tuple[int, InferResult | QinferError]]:
        """Sends many requests to a model, several at a time, in constant memory.

        Inputs are read in the caller's thread, and only as answers are handed out. When the iteration is left early,
        outstanding answers are dropped.

        Args:
            model: The model's name.
            inputs: The inputs; may be endless.
            concurrency: The most requests at a time that are unanswered, or answered and not handed out.
            ordered: Hand the answers out in the inputs' order; otherwise as they arrive.
            keys: Makes an idempotency key for each input. The inputs are then submitted as asynchronous requests, and a
                later stream with the same keys reads their results instead of executing them again.
            version: As in `infer`.
            outputs: As in `infer`.
            parameters: As in `infer`.
            priority: As in `infer`.

        Yields:
            The index of an input, and its result or error.
        """

        def plan(index: int, item: Inputs) -> Flow[InferResult]:
            ask = Ask(model, item, version, outputs, parameters, priority)
            return flows.infer_or_resume(self._policy, ask, None if keys is None else keys(index, item))

        return stream_in_threads(inputs, plan, self._run_flow, concurrency=concurrency, ordered=ordered)

    def model(self, name: str, *, version: int | None = None) -> handles.ModelFunction:
        """Returns a model as a function of Python values: `client.model("embed")(text=["hi"])`.

        Args:
            name: The model's name.
            version: The version; `None` = the highest ready one.
        """
        return handles.ModelFunction(self._run_flow, self._policy, name, version)

    def sequence(
        self, model: str, *, correlation_id: int | str | None = None, version: int | None = None
    ) -> handles.Sequence:
        """Begins a sequence of requests to a stateful model, which share a state; the first request opens it.

        Args:
            model: The model's name.
            correlation_id: The sequence's id; an open one is begun anew. `None` = a random number.
            version: The version, on which the sequence stays; `None` = the highest ready one.

        Raises:
            InvalidRequest: The id is neither a positive integer below 2**64 nor a text.
        """
        return handles.Sequence(self._run_flow, StepFlags(self._policy, model, version, correlation_id))

    def submit_job(
        self,
        model: str,
        inputs: Location | Sequence[Location],
        output: Location,
        *,
        resume: bool = False,
        wait_for_inputs_s: float = 0.0,
        on_missing: OnMissing | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submits a bulk job, in which a model scores files; on return the gateway has checked that they fit the model.

        Args:
            model: The model's name.
            inputs: Files and patterns, as URLs such as `s3://bucket/in/*.parquet`, or as paths, which have to be the
                same for the gateway and the workers.
            output: The folder of the output; it must be empty, unless `overwrite` is set.
            resume: Resume the job of the same `id` if it has failed, has expired or was cancelled, with the
                `error_threshold`, `max_parallel` and `deadline_s` of this call; with `overwrite`, run a completed one
                anew. Any other job of that `id` is returned unchanged.
            wait_for_inputs_s: Seconds to wait until each input exists, and each pattern matches a file.
            on_missing: Called at each check that finds an input missing, with the reason and the seconds left.
            options: See `JobOptions`.

        Raises:
            InvalidRequest: The files do not fit the model, an option is wrong, or the output is not empty; the text
                names column or URL.
            InputMissing: An input does not exist, or a pattern matches no file, after `wait_for_inputs_s`.
            ModelNotFound: The model or version does not exist.
            Forbidden: The server does not allow that store.
            Conflict: The id belongs to another job, and the text has the fields that differ; or another job writes to
                the output to be overwritten.
            QinferError: As `infer`.
        """
        body = job_body(model, inputs, output, options)
        flow = job_flows.submit_job(self._policy, body, resume=resume, wait_s=wait_for_inputs_s, on_missing=on_missing)
        return self.job((self._run_flow(flow)).id)

    def validate_job(
        self, model: str, inputs: Location | Sequence[Location], output: Location, **options: Unpack[JobOptions]
    ) -> JobEstimate:
        """Checks and estimates a bulk job, including all its input files; creates nothing.

        The arguments are those of `submit_job`.

        Raises:
            QinferError: As `submit_job`.
        """
        return self._run_flow(job_flows.validate_job(self._policy, job_body(model, inputs, output, options)))

    def job(self, job_id: str) -> Job:
        """Returns the job of an id, without a check that it exists."""
        return Job(self._run_flow, self._policy, job_id)

    def jobs(self, *, limit: int = 100, **filters: Unpack[JobFilters]) -> list[JobStatus]:
        """Returns the status of the newest jobs.

        Args:
            limit: The most jobs to return.
            filters: Which jobs; see `JobFilters`.
        """
        return self._run_flow(job_flows.newest_jobs(self._policy, limit, filters))

    def metadata(self, model: str, version: int | None = None) -> ModelMetadata:
        """Returns a model's versions, inputs and outputs.

        Raises:
            ModelNotFound: The model or version does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.metadata(self._policy, model, version))

    def config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Returns a model's configuration in Triton's JSON.

        Raises:
            ModelNotFound: The model or version does not exist.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.config(self._policy, model, version))

    def index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Returns the models of the repositories: an entry per version that was ever loaded, or one for the model.

        Args:
            ready: Only versions that are ready.
        """
        return self._run_flow(model_flows.index(self._policy, ready=ready))

    def statistics(self, model: str | None = None, version: int | None = None) -> list[ModelStatistics]:
        """Returns the statistics of a model's versions, or those of all models.

        Args:
            model: The model's name; `None` = all models.
            version: The version; `None` = each.

        Raises:
            InvalidRequest: The model or version is not available.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.statistics(self._policy, model, version))

    def load(
        self,
        model: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Loads a model, or its changes, and waits until it is ready; needs the server's control mode explicit.

        Args:
            model: The model's name.
            config: A configuration in Triton's JSON, which replaces the model's `config.pbtxt`.
            files: Files that replace the model's files in the repository, by `version/name`; they need `config`.
            timeout_s: How long it may take; `None` = the client's `timeout_s`.

        Raises:
            ControlDisabled: The server's control mode is none or poll.
            QinferError: The model can't be loaded; as `infer`.
        """
        self._run_flow(model_flows.load(self._policy.within(timeout_s), model, config, files))

    def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unloads a model: new requests are refused, waiting ones are answered.

        Args:
            model: The model's name.
            unload_dependents: Unload the models of an ensemble, too.

        Raises:
            ControlDisabled: The server's control mode is none or poll.
            QinferError: As `infer`.
        """
        self._run_flow(model_flows.unload(self._policy, model, unload_dependents=unload_dependents))

    def record(
        self,
        model: str,
        *,
        requests: int = 1000,
        max_bytes: int = 64 * 2**20,
        duration_s: float = 60.0,
        on_page: OnPage | None = None,
    ) -> Generator[RecordedRequest, None]:
        """Records the requests for a model that arrive at any gateway, and yields copies as they come.

        The recording ends after so many requests, bytes or seconds, or when the iteration is left. Copies have the
        inputs, parameters and time of arrival, but no header, key, tenant or id. It needs the scope `admin`.

        Args:
            model: The model's name; not an endpoint's.
            requests: The most requests, up to 100,000.
            max_bytes: The most bytes of all copies, up to 256 MiB.
            duration_s: The longest time, up to an hour.
            on_page: Called with each page that is read; it tells how many requests were dropped.

        Raises:
            ModelNotFound: The model does not exist.
            Conflict: The model is being recorded already.
            QinferError: As `infer`.
        """
        recording = self._run_flow(model_flows.begin_recording(self._policy, model, requests, max_bytes, duration_s))
        after, has_ended = "", False
        try:
            while not has_ended:
                page = self._run_flow(model_flows.recorded_page(self._policy, recording, after))
                after, has_ended = page.next, page.ended
                if on_page is not None:
                    on_page(page)
                for request in page.requests:
                    yield request
        finally:
            if not has_ended:
                self._run_flow(model_flows.stop_recording(self._policy, recording))

    def is_ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Returns whether a model can answer now; without a model, whether all models of the server can.

        A model unknown to the server is not ready.

        Raises:
            Unreachable: No gateway answers.
            QinferError: As `infer`.
        """
        return self._run_flow(model_flows.is_ready(self._policy, model, version))

    def is_live(self) -> bool:
        """Returns whether a gateway answers."""
        return self._run_flow(model_flows.is_live(self._policy))

    def _results(
        self,
        flow: Flow[httpx.Response],
        take: Callable[[StreamEvent], T | None],
        timeout_s: float | None = None,
        *,
        resumes: bool = False,
    ) -> Iterator[T]:
        """Yields the results that `take` makes of a reply's events, over a connection of its own.

        If the caller `resumes` with another reply, a broken connection ends this one without an error.
        """
        http, reader = self._pool.take(), EventReader()
        try:
            with closing(self._run_flow(flow, http)) as reply:
                for piece in reply.iter_bytes():
                    for event in reader.feed(piece):
                        if (result := take(event)) is not None:
                            yield result
        except httpx.RequestError as error:
            if not resumes:
                policy = self._policy.within(timeout_s)
                raise problem_of_connection(error, policy.url, policy.timeout_s).error from None
        finally:
            self._pool.give(http)

    def _run_flow(self, flow: Flow[T], http: httpx.Client | None = None) -> T:
        """Executes a flow, over the connection of `http` if it is given."""
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Pause):
                self._sleep(step.seconds)
                outcome = None
            else:
                outcome = self._exchange(step) if http is None else _transmit(http, step)

    def _exchange(self, send: Send) -> Outcome:
        if self._hedged is not None:
            return self._hedged.exchange(send)
        with self._pool.borrow() as http:
            return _transmit(http, send)


def _transmit(http: httpx.Client, send: Send, extensions: Mapping[str, Any] | None = None) -> Outcome:
    """Sends a request; a successful reply of one that streams is left unread."""
    try:
        reply = http.send(send.build(http, extensions), stream=send.streams)
        if send.streams and not reply.is_success:
            reply.read()
    except httpx.RequestError as error:
        return error
    return reply
