"""Demand of sequences: the open ones of each stateful model, and the workers whose slots they need.

    workers = ⌈open sequences ÷ slots of one worker⌉         those that wait for an owner are open, too

An open sequence has a slot of one worker for as long as it lasts, whether a step of it waits or not: seconds of work
say nothing of that. Nothing else is read of a sequence here.
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

_PARTITION = 0  # all that there is, until models are spread


class SequenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of a stateful model, of all its versions.

    Attributes:
        model: The model's name.
        open: Sequences that have begun and not ended; those that wait for an owner are among them.
        waiting: Sequences that wait for a worker with a free slot.
        handed_over: Sequences that went on at another worker, since the model is known.
        lost: Sequences whose state was lost, since the model is known.
        slots: Sequences that one worker has at a time.
    """

    model: str
    open: int
    waiting: int
    handed_over: int
    lost: int
    slots: int

    @property
    def workers(self) -> int:
        """The number of workers that have slots for all open sequences."""
        return math.ceil(self.open / self.slots)


async def read_sequences(queue: Queue, stored: Mapping[str, StoredModel]) -> tuple[SequenceWork, ...]:
    """Counts the sequences of the stateful ones among some models, sorted; one script for each, all at once.

    Raises:
        BrokerUnavailable: The queue can't be reached.
    """
    slots = {name: count for name, model in sorted(stored.items()) if (count := _slots(model.config))}
    sizes = await asyncio.gather(*(queue.sequences(name, _PARTITION).sizes(stored[name].versions) for name in slots))
    return tuple(
        SequenceWork(model=name, slots=slots[name], **size._asdict()) for name, size in zip(slots, sizes, strict=True)
    )


async def read_backlogs(queue: Queue, stored: Mapping[str, StoredModel]) -> dict[tuple[str, int], int]:
    """Counts the steps of sequences that wait for a worker with a free slot, of each version of the stateful models.

    Raises:
        BrokerUnavailable: The queue can't be reached.
    """
    keys = [(name, version) for name, model in stored.items() if _slots(model.config) for version in model.versions]
    counts = await asyncio.gather(*(queue.sequences(name, _PARTITION).backlog(version) for name, version in keys))
    return dict(zip(keys, counts, strict=True))


@lru_cache(maxsize=4096)  # scrapers ask every few seconds, and configurations hardly change
def _slots(config: str) -> int:
    """Returns how many sequences one worker has at a time; 0 = the model is not stateful, or can't be used."""
    try:
        spec = to_spec(from_json(config))
    except QinferError:
        return 0
    return spec.instance_count * spec.sequences.slots if spec.is_stateful and spec.sequences else 0
