"""The sink of a coroutine: what waits for the one response that there may be."""

import asyncio

from qinfer.errors import ErrorCode
from qinfer.messages import Failure, Response
from qinfer_api.http.infer import DECOUPLED


class FutureSink:
    """A sink that is waited for; a second response of a decoupled model is an error instead."""

    frontend = "HTTP"

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def deliver(self, response: Response) -> None:
        """Completes the future, unless its waiter has left."""
        if self.response.done():
            return
        if not response.final:
            failure = Failure(ErrorCode.UNSUPPORTED_FEATURE, DECOUPLED)
            response = Response(request_id=response.request_id, failure=failure)
        self.response.set_result(response)
