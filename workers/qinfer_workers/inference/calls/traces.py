"""Traces of the calls and steps of traced requests, for the trace files of gateways.

A gateway marks traced requests (`InferRequest.calls`); notes return with the last response (`Response.called`).
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from qinfer.core.messages import CalledTensor, CallRecord, CallTraces, OutgoingRequest, Response
from qinfer.observe.logs import ErrorLogger
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import Tensor

_FENCE = ErrorLogger(logging.getLogger(__name__), "traces of calls lost, the calls continue")

MOST_TENSOR_BYTES = 16 * 1024

MOST_BYTES = 64 * 1024
"""Further tensors are left out."""


def traced(
    request: OutgoingRequest, sink: ResponseSink, now_s: Callable[[], float]
) -> tuple[OutgoingRequest, ResponseSink]:
    """Returns a call's request and sink, with a note if it serves a traced request."""
    if request.calls is None:
        return request, sink
    own = msgspec.structs.replace(request, calls=CallTraces(has_tensors=request.calls.has_tensors))
    return own, _NotingSink(sink, own, request.calls, now_s)


class _NotingSink:
    def __init__(
        self, sink: ResponseSink, request: OutgoingRequest, into: CallTraces, now_s: Callable[[], float]
    ) -> None:
        self.no_stream = sink.no_stream
        self._sink = sink
        self._request = request
        self._into = into
        self._now_s = now_s
        self._begin_s = now_s()
        self._tensors: list[CalledTensor] = []
        with _FENCE:
            self._note_tensors(request.inputs, is_output=False)

    def deliver(self, response: Response) -> None:
        with _FENCE:
            self._note_tensors(response.outputs, is_output=True)
            if response.final:
                self._into.add(self._called(response))
        self._sink.deliver(response)

    def _called(self, response: Response) -> CallRecord:
        request, tensors = self._request, tuple(self._tensors)
        model, version = response.model or request.model, response.version or request.version
        times = self._begin_s, self._now_s()
        return CallRecord(model, version, request.client_id, *times, response.timing, tensors, response.called)

    def _note_tensors(self, tensors: Sequence[Tensor], *, is_output: bool) -> None:
        if not self._into.has_tensors:
            return
        left = MOST_BYTES - sum([len(tensor.data) for tensor in self._tensors])
        for tensor in tensors:
            data = bytes(memoryview(tensor.data)[:MOST_TENSOR_BYTES])
            left -= len(data)
            if left >= 0:
                self._tensors.append(CalledTensor(is_output, tensor.name, tensor.datatype, tuple(tensor.shape), data))
