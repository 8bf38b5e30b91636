"""Demand of sequences: the open sequences of each stateful model, and the workers that they need.

    workers = ⌈open sequences ÷ slots of one worker⌉         sequences that wait for an owner are open, too

An open sequence holds a slot even while no step of it waits.
"""

import asyncio
import math
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from qinfer.errors import QinferError
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.state import StoredModel
from qinfer.queue.lanes import Queue

_PARTITION = 0


class SequenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of a stateful model.

    Attributes:
        open: Sequences that have begun and not ended, including waiting sequences.
        waiting: Sequences that wait for a worker with a free slot.
    """

    model: str
    open: int
    waiting: int
    handed_over: int
    lost: int
    slots: int

    @property
    def workers(self) -> int:
        """The workers with slots for all open sequences."""
        return math.ceil(self.open / self.slots)


async def read_sequences(queue: Queue, stored: Mapping[str, StoredModel]) -> tuple[SequenceWork, ...]:
    """Returns the stateful models' sequences, sorted."""
    slots = {name: count for name, model in sorted(stored.items()) if (count := _slots(model.config))}
    sizes = await asyncio.gather(*(queue.sequences(name, _PARTITION).sizes(stored[name].versions) for name in slots))
    return tuple(
        SequenceWork(model=name, slots=slots[name], **size._asdict()) for name, size in zip(slots, sizes, strict=True)
    )


async def read_backlogs(queue: Queue, stored: Mapping[str, StoredModel]) -> dict[tuple[str, int], int]:
    """Returns (model, version) → steps without a worker."""
    keys = [(name, version) for name, model in stored.items() if _slots(model.config) for version in model.versions]
    counts = await asyncio.gather(*(queue.sequences(name, _PARTITION).backlog(version) for name, version in keys))
    return dict(zip(keys, counts, strict=True))


@lru_cache(maxsize=4096)
def _slots(config: str) -> int:
    try:
        spec = to_spec(from_json(config))
    except QinferError:
        return 0
    return spec.instance_count * spec.sequences.slots if spec.is_stateful and spec.sequences else 0
