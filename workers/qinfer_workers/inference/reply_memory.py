"""Outputs in this worker's memory, for callers on its machine; their entries are finished when they are confirmed.

The caller, a gateway or a worker, copies the outputs, and confirms. Outputs that it has not confirmed within
`CONFIRMED_WITHIN_S`, because it could not read them, go through Redis; it takes the first answer.
"""

import asyncio
from collections.abc import Sequence

from qinfer.core.messages import MemoryReference, Response
from qinfer.queue.entries import process_at, reply_address
from qinfer.segments.connector import TensorConnector
from qinfer.segments.memory import HeldTensors, OwnMemory
from qinfer.segments.shelf import Shelf
from qinfer.wire.frame import encode_responses, tensor_parts

CONFIRMED_WITHIN_S = 2.0


class KeptResponses:
    """Responses that wait for their confirmation."""

    def __init__(self, memory: "ReplyMemory") -> None:
        self._memory = memory
        self._waiting: dict[int, tuple[HeldTensors, Response]] = {}
        self._is_done = asyncio.Event()
        self.references: dict[str, MemoryReference] = {}

    def add(self, response: Response, held: HeldTensors) -> None:
        """Adds a response."""
        self.references[response.request_id] = held.reference
        self._waiting[held.reference.generation] = held, response

    def confirmed(self, generation: int) -> None:
        """Takes note that the caller has read one."""
        held, _ = self._waiting.pop(generation)
        held.release()
        if not self._waiting:
            self._is_done.set()

    async def unconfirmed(self) -> list[Response]:
        """Waits for the confirmations; returns the responses that lack one, whose memory is free then."""
        try:
            async with asyncio.timeout(CONFIRMED_WITHIN_S):
                await self._is_done.wait()
        except TimeoutError:
            return [response for _, response in self._waiting.values()]
        finally:
            self.release()
        return []

    def release(self) -> None:
        """Waits no longer, and frees the memory."""
        waiting, self._waiting = self._waiting, {}
        for generation, (held, _) in waiting.items():
            self._memory.forget(generation)
            held.release()


class SentResponses:
    """Responses that were sent to another machine, whose caller confirms them as one."""

    def __init__(self, responses: Sequence[Response], came: "asyncio.Future[bool]") -> None:
        self._responses = responses
        self._came = came

    async def unconfirmed(self) -> Sequence[Response]:
        """Waits for the confirmation; returns the responses without it."""
        done, _ = await asyncio.wait([self._came], timeout=CONFIRMED_WITHIN_S)
        return () if done and self._came.result() else self._responses

    def release(self) -> None:
        """Does nothing: the memory ends with the sending."""


class ReplyMemory:
    """Keeps outputs of at least `least_bytes` for the readers of the shelf; `far` sends them to other machines."""

    def __init__(self, memory: OwnMemory, shelf: Shelf, least_bytes: int, far: TensorConnector | None = None) -> None:
        self._memory = memory
        self._shelf = shelf
        self._least_bytes = least_bytes
        self._far = far
        self._waiting: dict[int, KeptResponses] = {}
        shelf.confirmed = self._confirmed

    def may_take(self, nbytes: int) -> bool:
        """Returns whether `nbytes` of outputs may be large enough for `keep` or `send`."""
        return nbytes >= self._least_bytes

    def keep(self, address: str, responses: Sequence[Response], nbytes: int) -> KeptResponses | None:
        """Writes the large of `nbytes` of outputs to an address; `None` if none is large, or its process can't read."""
        if nbytes < self._least_bytes:
            return None
        # A stream may have several of one request.
        large = [one for one in responses if one.nbytes >= self._least_bytes and one.final and not one.index]
        if not large or address not in {reply_address(reader) for reader in self._shelf.readers}:
            return None
        kept = KeptResponses(self)
        for response in large:
            parts, size = tensor_parts(response.outputs)
            held = self._memory.write(parts, size, "")
            if held is not None:
                self._waiting[held.reference.generation] = kept
                kept.add(response, held)
        return kept if kept.references else None

    def send(self, address: str, responses: Sequence[Response], nbytes: int) -> SentResponses | None:
        """Sends `nbytes` of outputs to another machine; `None` if they are small, or the address is not reached."""
        if self._far is None or nbytes < self._least_bytes or not all(one.final and not one.index for one in responses):
            return None
        came = self._far.send_reply(process_at(address), lambda: encode_responses(responses))
        return None if came is None else SentResponses(responses, came)

    def forget(self, generation: int) -> None:
        """Stops waiting for a confirmation."""
        self._waiting.pop(generation, None)

    def _confirmed(self, generations: Sequence[int]) -> None:
        for generation in generations:
            kept = self._waiting.pop(generation, None)
            if kept is not None:
                kept.confirmed(generation)
