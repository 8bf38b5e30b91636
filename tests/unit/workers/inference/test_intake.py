"""The intake of leases: which items have their tensors at once, and which are to be read beside other work."""

from types import SimpleNamespace
from typing import Any, cast

from qinfer.core.messages import InferRequest, MemoryReference
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.segments.connector import TensorConnector
from qinfer.segments.reading import SegmentReader, TensorsUnreachable
from qinfer_workers.inference.intake import LeaseIntake
from qinfer_workers.inference.publisher import Publisher
from qinfer_workers.inference.serving import LaneBatcher


async def test_a_caller_whose_memory_stops_to_be_mapped_is_read_over_the_network_from_the_next_request_on() -> None:
    """Also in the same batch: the others need not wait until they are fetched again."""
    asked, put_off = list[str](), list[Any]()

    def fail(reference: MemoryReference) -> bytes:
        asked.append(reference.owner)
        raise TensorsUnreachable("no descriptors left")

    reference = MemoryReference("gateway", 1, 0, 16, 1)
    requests = {
        b"%d" % number: InferRequest(model="m", inputs=(), id=f"r{number}", reply_to="reply:g", memory=reference)
        for number in range(3)
    }
    leases = [Lease(Entry(Lane("m", 1), f"1000-{frame.decode()}"), "w", frame) for frame in requests]
    intake = LeaseIntake(
        cast(Queue, SimpleNamespace(clock=SimpleNamespace(now_s=lambda: 1.0))),
        cast(Publisher, SimpleNamespace(release_later=lambda item, _: put_off.append(item.request.id))),
        3,
        cast(SegmentReader, SimpleNamespace(read=fail)),
        cast(TensorConnector, SimpleNamespace(knows=lambda owner: owner in asked)),
    )
    intake._reader = cast(Any, SimpleNamespace(decode=requests.__getitem__))
    spec = SimpleNamespace(copies_once=False, default_timeout_s=60.0, name="m")
    batcher = cast(LaneBatcher, SimpleNamespace(model=SimpleNamespace(spec=spec, version=1)))

    taken = intake.items(batcher, leases)

    assert (put_off, [item.request.id for item in taken.external], taken.ready) == (["r0"], ["r1", "r2"], [])
