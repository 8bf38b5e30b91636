"""Triton's statistics extension (reference §1.13), for REST and gRPC.

Workers and gateways add counts once a second and before a read, so that every gateway shows the whole system. A killed
process loses its last counts.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.observe import stats
from qinfer.observe.host import MemoryUse, added_up
from qinfer.observe.stats import response_counts
from qinfer.traffic.routing import Endpoints


class Duration(msgspec.Struct, frozen=True):
    """Number of occurrences, and their total nanoseconds."""

    count: int
    ns: int


class InferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by outcome, and their cumulative times."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ResponseStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Responses of one index by outcome; durations begin at the previous response."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


class MemoryUsage(msgspec.Struct, frozen=True):
    """Memory of a kind (`CPU` or `GPU`) that the instances of all workers hold; `id` is the number of a GPU."""

    type: str
    id: int
    byte_size: int


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one model version.

    Attributes:
        last_inference: Start of the last execution, in milliseconds since the epoch, on Redis' clock; 0 = never.
        inference_count: Rows executed.
        execution_count: Batches executed.
        response_stats: The statistics of a decoupled model's responses, by index, up to the first thousand.
        batch_stats: The statistics of batches, by ascending size.
        memory_usage: Memory of the loaded instances, if their backends report it.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    response_stats: dict[str, ResponseStatistics]
    batch_stats: list[BatchStatistics]
    memory_usage: list[MemoryUsage]


class ModelStats(msgspec.Struct, frozen=True):
    """Statistics of model versions."""

    model_stats: list[ModelStatistics]


class Statistics:
    """Reads the statistics of models, after awaiting `added`; an endpoint has the statistics of its stable target."""

    def __init__(self, catalog: Catalog, store: ControlStore, added: Callable[[str], Awaitable[None]]) -> None:
        self.endpoints: Endpoints | None = None
        self._catalog = catalog
        self._store = store
        self._added = added

    async def model_statistics(
        self, model: str = "", version: int = 0, *, is_latest: bool = True
    ) -> list[ModelStatistics]:
        """Returns ready versions' statistics; an empty model or version 0 = all.

        With `is_latest` they wait for the counts of the last second, which each worker is asked to write.
        """
        asked = model
        if self.endpoints is not None:
            model, version = self.endpoints.stable(model, version)
        wanted = self._all() if not model else [(model, v) for v in self._versions(model, version)]
        if is_latest:
            await self._added(model)
        found = await self._store.all_stats(wanted)
        return [
            model_statistics(asked or which[0], which[1], fields, self._memory(*which))
            for which, fields in found.items()
        ]

    def _memory(self, model: str, version: int) -> tuple[MemoryUse, ...]:
        workers = self._catalog.workers()
        return added_up(use for worker in workers for use in worker.memory.get(model, {}).get(version, ()))

    def _all(self) -> list[tuple[str, int]]:
        return sorted(which for which, is_ready in self._catalog.readiness().items() if is_ready)

    def _versions(self, model: str, version: int) -> tuple[int, ...]:
        ready = self._catalog.ready_versions(model)
        if not ready:
            raise InvalidRequest(f"requested model '{model}' is not available")
        if not version:
            return ready
        if version not in ready:
            raise InvalidRequest(f"requested model version is not available for model '{model}'")
        return (version,)


def model_statistics(
    model: str, version: int, fields: Mapping[str, int], memory: Sequence[MemoryUse] = ()
) -> ModelStatistics:
    """Builds a version's statistics from `qinfer.observe.stats` and its memory."""
    requests = fields.get(stats.SUCCESS_COUNT, 0)
    executed = requests - fields.get(stats.CACHE_HIT_COUNT, 0)

    def of_requests(field: str) -> Duration:
        return Duration(requests, fields.get(field, 0))

    def of_executed(field: str) -> Duration:
        return Duration(executed, fields.get(field, 0))

    return ModelStatistics(
        name=model,
        version=str(version),
        last_inference=fields.get(stats.LAST_INFERENCE_MS, 0),
        inference_count=fields.get(stats.INFERENCE_COUNT, 0),
        execution_count=fields.get(stats.EXECUTION_COUNT, 0),
        inference_stats=InferStatistics(
            success=of_requests(stats.SUCCESS_NS),
            fail=Duration(stats.failure_count(fields), fields.get(stats.FAIL_NS, 0)),
            queue=of_requests(stats.QUEUE_NS),
            compute_input=of_executed(stats.INPUT_NS),
            compute_infer=of_executed(stats.INFER_NS),
            compute_output=of_executed(stats.OUTPUT_NS),
            cache_hit=Duration(fields.get(stats.CACHE_HIT_COUNT, 0), fields.get(stats.CACHE_HIT_NS, 0)),
            cache_miss=Duration(fields.get(stats.CACHE_MISS_COUNT, 0), fields.get(stats.CACHE_MISS_NS, 0)),
        ),
        response_stats={
            str(index): ResponseStatistics(**{what: Duration(*counted) for what, counted in fields_of.items()})
            for index, fields_of in response_counts(fields).items()
        },
        memory_usage=[MemoryUsage(use.kind, use.number, use.nbytes) for use in memory],
        batch_stats=[
            BatchStatistics(
                batch_size=batch.rows,
                compute_input=Duration(batch.executions, batch.input_ns),
                compute_infer=Duration(batch.executions, batch.infer_ns),
                compute_output=Duration(batch.executions, batch.output_ns),
            )
            for batch in stats.batches(fields)
        ],
    )
