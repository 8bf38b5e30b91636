"""Lease → pending item: what has to be true of an entry before it may be batched."""

import logging
from collections.abc import Iterable

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Pending
from qinfer.codec.frame import NewerFrame, decode_request
from qinfer.delivery.base import Lease
from qinfer.errors import CorruptEntry, InferenceFailed, InvalidRequest
from qinfer.repository.validate import validate
from qinfer_workers.inference.publisher import Publisher

logger = logging.getLogger(__name__)

NEWER_FRAME_PAUSE_S = 1.0


class Intake:
    """Makes the pending items of one worker.

    Args:
        publisher: Takes what can't be executed.
        max_deliveries: An entry that was handed out more often is not tried again.
    """

    def __init__(self, publisher: Publisher, max_deliveries: int) -> None:
        self._publisher = publisher
        self._max_deliveries = max_deliveries

    def items(self, batcher: Batcher, leases: Iterable[Lease]) -> list[Pending]:
        """Decodes leases; those that can't be executed are answered, finished or released, and left out."""
        items: list[Pending] = []
        for lease in leases:
            item = self._item(batcher, lease)
            if item is None:
                continue
            if lease.deliveries > self._max_deliveries:
                logger.error("given up", extra={"request_id": item.request.id, "deliveries": lease.deliveries})
                text = f"the request was given up: {lease.deliveries - 1} executions did not end"
                batcher.fail([item], InferenceFailed(text))
            elif item.request.generation == batcher.model.generation or self.fits(batcher, item):
                items.append(item)
        return items

    def fits(self, batcher: Batcher, item: Pending) -> bool:
        """Checks an item that was admitted under another generation; one that does not fit any more is answered."""
        try:
            item.rows = validate(item.request, batcher.model.spec)
        except InvalidRequest as error:
            batcher.fail([item], error)
            return False
        item.key = batcher.key_of(item.request)
        return True

    def _item(self, batcher: Batcher, lease: Lease) -> Pending | None:
        try:
            request = decode_request(lease.frame)
        except NewerFrame:
            logger.warning("frame of a newer qinfer released", extra={"entry_id": lease.entry.entry_id})
            self._publisher.release_later(lease, NEWER_FRAME_PAUSE_S)
            return None
        except CorruptEntry as error:
            logger.error("corrupt entry dropped", extra={"entry_id": lease.entry.entry_id, "reason": error.message})
            self._publisher.discard(lease)
            return None
        spec = batcher.model.spec
        enqueued_s = lease.entry.enqueued_s
        return Pending(
            rows=request.inputs[0].shape[0] if spec.max_batch_size and request.inputs else 1,
            key=batcher.key_of(request),
            enqueued_s=enqueued_s,
            deadline_s=enqueued_s + (request.timeout_s or spec.default_timeout_s),
            alone=lease.suspect,
            lease=lease,
            request=request,
        )
