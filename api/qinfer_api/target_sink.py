"""Counts the end of a request to an endpoint, by its target."""

import math
import time
from collections.abc import Sequence

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import ErrorCode
from qinfer.submission.pending import ResponseSink
from qinfer.traffic.tally import TargetTally, key_of, witness_of
from qinfer_api.shadows import Shadow


class TargetSink:
    """Wraps a sink; `shadows` get the answer after the caller.

    `given_s` is the caller's timeout, infinite if the model's configuration set it.
    """

    __slots__ = (
        *("_began_s", "_given_s", "_key", "_shadows", "_tally", "_version", "_witness"),
        *("frontend", "inner", "no_stream"),
    )

    def __init__(
        self,
        tally: TargetTally,
        inner: ResponseSink,
        request: OutgoingRequest,
        shadows: Sequence[Shadow] = (),
        given_s: float = math.inf,
    ) -> None:
        self._tally = tally
        self._shadows = shadows
        self._key = key_of(request)
        self._version = request.version
        self._witness = witness_of(request)
        self._given_s = given_s
        self._began_s = time.monotonic()
        self.inner = inner
        self.no_stream = inner.no_stream
        self.frontend: str = getattr(inner, "frontend", "")

    def deliver(self, response: Response) -> None:
        """Passes responses on; counts the last."""
        if response.final:
            if response.version not in (self._version, 0):
                answered_by = self._key[0], f"{response.model}:{response.version}"
                self._tally.moved(answered_by, time.monotonic() - self._began_s, response)
            elif response.failure is None:
                self._tally.count_answered(self._key, time.monotonic() - self._began_s, response, self._witness)
            else:
                self._tally.failed(self._key, response.failure.code, self._witness, self._given_s)
        self.inner.deliver(response)
        if response.final:
            for shadow in self._shadows:
                shadow.stable_answered(response)

    def left(self, *_: object) -> None:
        """Counts a caller that went away."""
        self._tally.failed(self._key, ErrorCode.CANCELLED, self._witness)
        for shadow in self._shadows:
            shadow.left()
