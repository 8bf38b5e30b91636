"""Execution → responses: pairs each item with its answer, checks the outputs, charges the time."""

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from qinfer.batching.execution import Answer, Execution, Pending
from qinfer.batching.ports import Observer
from qinfer.errors import OutputMismatch, QinferError
from qinfer.messages import Failure, Response, Timing
from qinfer.observability.fence import Fence
from qinfer.observability.stats import StatsTally
from qinfer.repository.spec import ModelSpec
from qinfer.tensors import Tensor

_FENCE = Fence(logging.getLogger(__name__), "observer failed, requests are answered all the same")


class Responder:
    """Makes the responses of one model version.

    Args:
        spec: The model's configuration, against which outputs are checked.
        version: The version that answers.
        observer: Told of every execution; `None` = nobody is. What it raises is logged.
    """

    def __init__(self, spec: ModelSpec, version: int, observer: Observer | None = None) -> None:
        self._model = spec.name
        self._version = version
        self._observer = observer
        self._batched = spec.max_batch_size > 0
        self._max_rows = spec.max_batch_size
        self._count = len(spec.outputs)
        self._outputs = {o.name: (o.datatype, o.dims, -1 not in o.dims) for o in spec.outputs}

    def responses(
        self, execution: Execution, begin_s: float, tally: StatsTally
    ) -> tuple[list[Pending], list[Response]]:
        """Answers the items of an execution; those whose lease is lost and those that run again are left out.

        Args:
            execution: One that ended.
            begin_s: When it began, on the clock of the items' instants.
            tally: Where it is counted.

        Returns:
            The items, and their responses in order: one final each, after those that were not final.
        """
        timing = (execution.input_ns, execution.infer_ns, execution.output_ns, execution.batch.size)
        failures: Counter[str] = Counter()
        queue_ns: list[int] = []
        items: list[Pending] = []
        responses: list[Response] = []
        earlier = self._earlier(execution) if execution.earlier else {}
        rows_done = failed_ns = 0
        for position, (item, answer) in enumerate(zip(execution.items, execution.answers, strict=True)):
            if item.lost or answer is None:
                continue
            items.append(item)
            before = earlier.get(id(item), ())
            responses.extend(before)
            waited_ns = max(int((begin_s - item.enqueued_s) * 1e9) - execution.input_ns, 0)
            response = self._final(item, answer, len(before), Timing(waited_ns, *timing))
            if execution.parameters:
                response = msgspec.structs.replace(response, parameters=execution.parameters.get(position, {}))
            if response.failure is None:
                queue_ns.append(waited_ns)
                rows_done += item.rows
            else:
                failures[response.failure.code] += 1
                failed_ns += waited_ns + sum(timing[:3])
            responses.append(response)
        if queue_ns:
            tally.max_rows = self._max_rows
            tally.executed(rows_done, queue_ns, *timing[:3], begin_s)
        for reason, count in failures.items():
            tally.failed(reason, count)
        if failed_ns:
            tally.spent_failing(failed_ns)
        if self._observer is not None:
            with _FENCE:  # the answers are worth more than what is told of them
                self._observer.executed(execution, begin_s)
        return items, responses

    def failures(self, items: Sequence[Pending], error: QinferError, now_s: float, tally: StatsTally) -> list[Response]:
        """Answers items that were not executed.

        Args:
            items: The items.
            error: Why.
            now_s: Now, on the clock of the items' instants.
            tally: Where they are counted.
        """
        failure = Failure.of(error)
        tally.failed(failure.code, len(items))
        tally.spent_failing(int(sum(max(now_s - item.enqueued_s, 0.0) for item in items) * 1e9))
        if self._observer is not None:
            with _FENCE:  # as above
                self._observer.refused(items, error, now_s)
        return [
            Response(
                request_id=item.request.id,
                model=self._model,
                version=self._version,
                failure=failure,
                attempt=item.lease.deliveries,
            )
            for item in items
        ]

    def _final(self, item: Pending, answer: Answer, index: int, timing: Timing) -> Response:
        if isinstance(answer, tuple):
            problem = self.problem(answer, item.request.outputs, item.rows)
            if problem is None:
                return Response(
                    request_id=item.request.id,
                    model=self._model,
                    version=self._version,
                    outputs=answer,
                    attempt=item.lease.deliveries,
                    index=index,
                    timing=timing,
                )
            answer = OutputMismatch(problem)
        return Response(
            request_id=item.request.id,
            model=self._model,
            version=self._version,
            failure=Failure.of(answer),
            attempt=item.lease.deliveries,
            index=index,
            timing=timing,
        )

    def problem(self, outputs: Sequence[Tensor], wanted: Sequence[str], rows: int) -> str | None:
        """Compares outputs with the configuration; runs per request, so that the good case is a few comparisons.

        Args:
            outputs: What the model returned.
            wanted: The names that were asked for; empty = all.
            rows: The rows that went in.

        Returns:
            What is wrong with them; `None` = nothing.
        """
        if len(outputs) != (len(wanted) or self._count) and outputs:
            return f"the model returned {len(outputs)} outputs where {len(wanted) or self._count} are due"
        for tensor in outputs:
            expected = self._outputs.get(tensor.name)
            if expected is None:
                return f"the model returned an output '{tensor.name}' that its configuration does not have"
            datatype, dims, fixed = expected
            shape = tensor.shape
            if self._batched:
                if not shape or shape[0] != rows:
                    return _text(tensor, f"its first dimension must be {rows}")
                shape = shape[1:]
            if tensor.datatype != datatype:
                return _text(tensor, f"its configuration says {datatype}")
            if shape != dims and (fixed or not _fits(shape, dims)):
                return _text(
                    tensor, f"its configuration says {list(dims)}{' after the batch' if self._batched else ''}"
                )
        return None

    def _earlier(self, execution: Execution) -> dict[int, list[Response]]:
        """Makes the responses that were not final, by item identity."""
        made: dict[int, list[Response]] = {}
        for position, answer, parameters in execution.earlier:
            item = execution.items[position]
            mine = made.setdefault(id(item), [])
            mine.append(
                Response(
                    request_id=item.request.id,
                    model=self._model,
                    version=self._version,
                    outputs=answer if isinstance(answer, tuple) else (),
                    failure=Failure.of(answer) if isinstance(answer, QinferError) else None,
                    attempt=item.lease.deliveries,
                    index=len(mine),
                    final=False,
                    parameters=parameters,
                )
            )
        return made


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(d in (-1, s) for s, d in zip(shape, dims, strict=True))


def _text(tensor: Tensor, rule: str) -> str:
    return f"the model returned output '{tensor.name}' as {tensor.datatype}{list(tensor.shape)}; {rule}"
