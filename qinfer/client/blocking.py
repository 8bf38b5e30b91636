"""`qinfer.Client`: the client for code without an event loop. One client may be used by many threads."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from types import TracebackType
from typing import Self, TypeVar

import httpx

from qinfer.client import flows
from qinfer.client.connection import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, Pool, options
from qinfer.client.flows import Ask, Inputs, Keys, Submission
from qinfer.client.jobs import JobCalls
from qinfer.client.results import InferResult, ModelMetadata, RequestHandle, RequestStatus, handle_of
from qinfer.client.steps import Flow, Outcome, Pause, Send
from qinfer.client.threads import stream_in_threads
from qinfer.core.clock import Clock
from qinfer.core.messages import Scalar
from qinfer.errors import Cancelled, QinferError

T = TypeVar("T")


class Client(JobCalls):
    """Asks a gateway.

    Each call is repeated when the server is overloaded (429, 503; after `Retry-After`, or else after a pause that
    grows), or can't be reached. Inference may therefore be executed twice, as it may be in the server.

    Args:
        url: The gateway's URL.
        api_key: Sent as `Authorization: Bearer`; `None` sends none.
        timeout_s: How long a call may take, its repetitions included.
        max_retries: How often a call is repeated.
        transport: Instead of httpx's own: for other TLS settings, proxies, tests. Without it the proxies of the
            environment are used.
        clock: Measures time; for tests.
        sleep: Waits so many seconds; for tests.

    Raises:
        InvalidRequest: An argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        http, self._policy = options(url, api_key, timeout_s, max_retries, clock)
        self._pool = Pool(lambda: httpx.Client(transport=transport, **http))
        self._sleep = sleep

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Closes the connections."""
        self.close()

    def close(self) -> None:
        """Closes the connections; the client can't be used afterwards."""
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
    ) -> InferResult:
        """Asks a model and waits for its answer.

        Args:
            model: The model's name.
            inputs: Its inputs by name: numpy arrays of the model's datatypes, with the batch dimension if it has one;
                or `qinfer.tensors.Tensor`, for instance for BF16.
            version: The version; `None` = the highest that is ready.
            outputs: The outputs wanted; `None` = all.
            parameters: Custom parameters for the backend, and Triton's own, such as `timeout` in microseconds.
            priority: The level, 1 the most urgent; 0 = the model's default.
            id: Comes back in the result.

        Raises:
            InvalidRequest: The inputs are not what the model takes.
            ModelNotFound: No such model or version.
            Overloaded: The server refused it, also after the repetitions.
            DeadlineExceeded: No answer within `timeout_s`.
            InferenceFailed: The model raised.
            Unreachable: No gateway answers.
            QinferError: Whatever else the server answered.
        """
        return self._run(
            flows.infer(
                self._policy,
                Ask(
                    model=model,
                    inputs=inputs,
                    version=version,
                    outputs=outputs,
                    parameters=parameters,
                    priority=priority,
                    id=id,
                ),
            )
        )

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
    ) -> RequestHandle:
        """Hands a request over, to fetch its result later; when this returns, it is not lost any more.

        Args:
            model: As in `infer`, and so the next six.
            inputs: See there.
            version: See there.
            outputs: See there.
            parameters: See there.
            priority: See there.
            id: See there.
            idempotency_key: Two submissions with the same key and content are one request. By default each call has a
                key of its own, which makes its repetitions safe.
            request_id: An id of your own for the request, unique within the model; by default the server makes one.
            timeout_s: How long the result is worth waiting for; `None` = the model's default.
            webhook: A URL to be told when the request has ended; the server has to allow it.

        Raises:
            Conflict: The key or id belongs to another request.
            QinferError: As `infer`.
        """
        ask = Ask(
            model=model,
            inputs=inputs,
            version=version,
            outputs=outputs,
            parameters=parameters,
            priority=priority,
            id=id,
        )
        submission = Submission(
            idempotency_key=idempotency_key, request_id=request_id, timeout_s=timeout_s, webhook=webhook
        )
        return self._run(flows.submit(self._policy, ask, submission))

    def result(self, request: RequestHandle | str, *, wait_s: float = DEFAULT_TIMEOUT_S) -> InferResult:
        """Returns a request's result; it can be read again until its time is over.

        Args:
            request: Its handle, or the id that the server made.
            wait_s: How long to wait for its end; 0 = only look, `math.inf` = until it ends, which every request does.

        Raises:
            ResultNotFound: It has not ended within `wait_s`.
            ResultExpired: It had a result, which is gone.
            RequestNotFound: There is no such request.
            DeadlineExceeded: It expired before it was executed.
            Cancelled: It was cancelled.
            InferenceFailed: The model raised.
            QinferError: As `infer`.
        """
        return self._run(flows.result(self._policy, handle_of(request), wait_s))

    def status(self, request: RequestHandle | str) -> RequestStatus:
        """Returns the state of a request.

        Raises:
            RequestNotFound: There is no such request.
            QinferError: As `infer`.
        """
        return self._run(flows.status(self._policy, handle_of(request)))

    def cancel(self, request: RequestHandle | str) -> str:
        """Cancels a request; one that is being executed may use its device time still.

        Returns:
            Its state: `cancelled`, or how it had ended before.

        Raises:
            RequestNotFound: There is no such request.
            QinferError: As `infer`.
        """
        return self._run(flows.cancel(self._policy, handle_of(request)))

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
        """Asks a model about many inputs, several at a time, in constant memory.

        Inputs are read in the caller's thread, as many as there are free places. When the iteration is left early,
        answers that are still to come are dropped.

        Args:
            model: The model's name.
            inputs: The inputs; may be endless.
            concurrency: The most requests that are unanswered, or answered and not handed out, at a time.
            ordered: Hand the answers out in the inputs' order; else as they come.
            keys: Makes an idempotency key for each input. The inputs are then submitted as asynchronous requests, and
                a later stream with the same keys picks their results up instead of executing them again.
            version: As in `infer`, and so the rest.
            outputs: See there.
            parameters: See there.
            priority: See there.

        Yields:
            The index of an input, and its result, or why there is none.
        """
        stop = Event()

        def ask_one(index: int, item: Inputs) -> InferResult:
            ask = Ask(
                model=model, inputs=item, version=version, outputs=outputs, parameters=parameters, priority=priority
            )
            key = None if keys is None else keys(index, item)
            return self._run(flows.infer_or_resume(self._policy, ask, key), stop)

        return stream_in_threads(inputs, ask_one, stop, concurrency=concurrency, ordered=ordered)

    def metadata(self, model: str, version: int | None = None) -> ModelMetadata:
        """Returns a model's versions, inputs and outputs.

        Raises:
            ModelNotFound: No such model or version.
            QinferError: As `infer`.
        """
        return self._run(flows.metadata(self._policy, model, version))

    def is_ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Tells whether a model can answer now; without a model: whether all of the server's can.

        A model that the server does not know is not ready.

        Raises:
            Unreachable: No gateway answers.
            QinferError: As `infer`.
        """
        return self._run(flows.is_ready(self._policy, model, version))

    def is_live(self) -> bool:
        """Tells whether a gateway answers."""
        return self._run(flows.is_live())

    def _run(self, flow: Flow[T], stop: Event | None = None) -> T:
        """Carries a flow out; `stop` ends it between two steps."""
        outcome: Outcome = None
        pause: Callable[[float], object] = self._sleep if stop is None else stop.wait
        while True:
            if stop is not None and stop.is_set():
                flow.close()
                raise Cancelled("the stream was left before this answer came")
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Pause):
                pause(step.seconds)
                outcome = None
            else:
                outcome = self._exchange(step)

    def _exchange(self, send: Send) -> Outcome:
        http = self._pool.take()
        try:
            return http.request(
                send.method, send.path, headers=send.headers, content=send.content, timeout=send.http_timeout
            )
        except httpx.RequestError as error:
            return error
        finally:
            self._pool.give(http)
