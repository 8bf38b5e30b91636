"""Execution → responses: pairs each item with its answer, checks the outputs, charges the time."""

import logging
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
        self._fine: dict[str, tuple[str, tuple[int, ...], int]] = {}
        """What was right last, by output: (datatype, shape, rows); mostly that of the next item is the same."""

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
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        size, earlier = execution.batch.size, self._earlier(execution) if execution.earlier else None
        queue_ns: list[int] = []
        items: list[Pending] = []
        responses: list[Response] = []
        rows_done = failed_ns = 0
        for position, item in enumerate(execution.items):
            answer = execution.answers[position]
            if item.lost or answer is None:
                continue
            items.append(item)
            index = 0
            if earlier and (before := earlier.get(position)):
                responses += before
                index = len(before)
            waited_ns = max(int((begin_s - item.enqueued_s) * 1e9) - input_ns, 0)
            response = self._final(item, answer, index, Timing(waited_ns, input_ns, infer_ns, output_ns, size))
            if execution.parameters:
                response = msgspec.structs.replace(response, parameters=execution.parameters.get(position, {}))
            responses.append(response)
            if response.failure is None:
                queue_ns.append(waited_ns)
                rows_done += item.rows
            else:
                tally.failed(response.failure.code)
                failed_ns += waited_ns + input_ns + infer_ns + output_ns
        if queue_ns:
            tally.max_rows = self._max_rows
            tally.executed(rows_done, queue_ns, input_ns, infer_ns, output_ns, begin_s)
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
        outputs: tuple[Tensor, ...] = ()
        failure: Failure | None = None
        if not isinstance(answer, tuple):
            failure = Failure.of(answer)
        elif problem := self.problem(answer, item.request.outputs, item.rows):
            failure = Failure.of(OutputMismatch(problem))
        else:
            outputs = answer
        return Response(
            request_id=item.request.id,
            model=self._model,
            version=self._version,
            outputs=outputs,
            failure=failure,
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
            if self._fine.get(tensor.name) == (tensor.datatype, tensor.shape, rows):
                continue
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
            self._fine[tensor.name] = (datatype, tensor.shape, rows)
        return None

    def _earlier(self, execution: Execution) -> dict[int, list[Response]]:
        """Makes the responses that were not final, by the item's position."""
        made: dict[int, list[Response]] = {}
        for position, answer, parameters in execution.earlier:
            item = execution.items[position]
            mine = made.setdefault(position, [])
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
