"""Statistics in the shape of Triton's extension."""

from unittest.mock import AsyncMock

import msgspec
import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.state import WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.host import MemoryUse
from qinfer.observe.stats import StatsTally, add
from qinfer_api.observe.statistics import Statistics, model_statistics
from tests.support.stub_catalog import stub_catalog


def worked() -> dict[str, int]:
    """Two executions of two rows, one of one, and two failures."""
    tally = StatsTally()
    tally.executed(2, [1000, 3000], 10, 100, 1, begin_s=1000.5)
    tally.executed(2, [500], 20, 200, 2, begin_s=1001.5)
    tally.executed(1, [0], 1, 1, 1, begin_s=999.0)
    tally.failed("inference_failed", 2)
    tally.spent_failing(77)
    return tally.drain()


def test_every_field_is_there() -> None:
    """As reference §1.13 has it: requests charged with their batch's time, batches with their own."""
    fields = worked() | {"refusals:queue_full": 3, "fail_ns": 80}

    assert msgspec.to_builtins(model_statistics("m", 3, fields)) == {
        "name": "m",
        "version": "3",
        "last_inference": 1001500,
        "inference_count": 5,
        "execution_count": 3,
        "inference_stats": {
            "success": {"count": 4, "ns": 4500 + 2 * 111 + 222 + 3},
            "fail": {"count": 5, "ns": 80},
            "queue": {"count": 4, "ns": 4500},
            "compute_input": {"count": 4, "ns": 20 + 20 + 1},
            "compute_infer": {"count": 4, "ns": 200 + 200 + 1},
            "compute_output": {"count": 4, "ns": 2 + 2 + 1},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 1,
                "compute_input": {"count": 1, "ns": 1},
                "compute_infer": {"count": 1, "ns": 1},
                "compute_output": {"count": 1, "ns": 1},
            },
            {
                "batch_size": 2,
                "compute_input": {"count": 2, "ns": 30},
                "compute_infer": {"count": 2, "ns": 300},
                "compute_output": {"count": 2, "ns": 3},
            },
        ],
        "memory_usage": [],
    }


def test_a_model_that_did_nothing_has_zeros() -> None:
    """All fields are there from the start."""
    shown = model_statistics("m", 1, {})

    assert (shown.last_inference, shown.inference_stats.success.count, shown.batch_stats) == (0, 0, [])


def test_totals_of_several_processes() -> None:
    """Counts add up; the last inference is the latest of all, whoever writes last."""
    totals: dict[str, int] = {}
    for fields in (worked(), worked(), {"last_inference_ms": 5}):
        add(totals, fields)

    shown = model_statistics("m", 1, totals)

    assert (shown.last_inference, shown.execution_count, shown.batch_stats[1].compute_infer.count) == (1001500, 6, 4)


@pytest.fixture
async def statistics(store: ControlStore) -> Statistics:
    """`m` with versions 1 (ready) and 2 (not), `other` with version 1, `away` without a worker."""
    await store.add_stats("m", 1, worked())
    catalog = await stub_catalog(store, {"m": {1: True, 2: False}, "other": {1: True}, "away": {1: False}})
    return Statistics(catalog, store, AsyncMock())


async def test_all_ready_versions_are_told(statistics: Statistics) -> None:
    """By name and version; those that can't be asked are left out."""
    found = await statistics.model_statistics()

    assert [(entry.name, entry.version, entry.execution_count) for entry in found] == [("m", "1", 3), ("other", "1", 0)]


@pytest.mark.parametrize("version", [0, 1])
async def test_one_model(statistics: Statistics, version: int) -> None:
    """With its ready versions, or the one that was named."""
    assert [entry.version for entry in await statistics.model_statistics("m", version)] == ["1"]


@pytest.mark.parametrize(
    ("model", "version", "text"),
    [
        ("nothing", 0, "requested model 'nothing' is not available"),
        ("nothing", 1, "requested model 'nothing' is not available"),
        ("away", 0, "requested model 'away' is not available"),
        ("m", 2, "requested model version is not available for model 'm'"),
        ("m", 9, "requested model version is not available for model 'm'"),
    ],
)
async def test_what_is_not_ready_has_none(statistics: Statistics, model: str, version: int, text: str) -> None:
    """Triton's texts; 400 and not 404 (reference §1.5)."""
    with pytest.raises(InvalidRequest, match=f"^{text}$"):
        await statistics.model_statistics(model, version)


async def test_memory_is_added_up_over_workers_and_by_device(store: ControlStore) -> None:
    """Of live workers, and of the version alone; a GPU's number is its own in each worker."""
    catalog = await stub_catalog(store, {"m": {1: True}})
    for number, uses in enumerate((_uses(cpu=10, gpu=5), _uses(cpu=1, gpu=7))):
        memory = {"m": {1: uses, 2: _uses(cpu=1000, gpu=1000)}}
        await store.heartbeat(WorkerRecord(id=f"w{number}", started_at=0.0, models={}, memory=memory), 60)
    await catalog.refresh()

    (found,) = await Statistics(catalog, store, AsyncMock()).model_statistics("m", 1)

    assert msgspec.to_builtins(found.memory_usage) == [
        {"type": "CPU", "id": 0, "byte_size": 11},
        {"type": "GPU", "id": 1, "byte_size": 12},
    ]


def _uses(cpu: int, gpu: int) -> tuple[MemoryUse, ...]:
    return MemoryUse("CPU", 0, cpu), MemoryUse("GPU", 1, gpu)
