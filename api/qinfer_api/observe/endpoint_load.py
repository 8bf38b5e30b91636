"""Load metrics of ORCA (Open Request Cost Aggregation) in replies: the load of a language model's key-value cache.

As Triton does (server `src/orca_http.cc`), two numbers are computed from TensorRT-LLM's gauges, which are cached.
"""

import asyncio
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.observe.model_metrics import GAUGE, ModelSeries, merged, series_of

FORMAT_HEADER = "endpoint-load-metrics-format"

HEADER = "endpoint-load-metrics"

FAMILY = "nv_trt_llm_kv_cache_block_metrics"

READ_EVERY_S = 1.0
"""Workers write changed metrics once a second."""

_WITHIN_S = 0.25
_TYPE = "kv_cache_block_type"


class CacheLoad(NamedTuple):
    """A key-value cache: the used share of blocks, and the tokens that fit."""

    utilization: float
    capacity: int

    def shown(self, form: str) -> str:
        """Returns the reply header's value, or empty."""
        if form == "json":
            named = {"kv_cache_utilization": self.utilization, "max_token_capacity": self.capacity}
            return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
        if form == "text":
            capacity = f"named_metrics.max_token_capacity={self.capacity}"
            return f"TEXT named_metrics.kv_cache_utilization={self.utilization:.6f}, {capacity}"
        return ""


class EndpointLoad:
    """Returns the load of models; each gateway has one."""

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._store = store
        self._reading = asyncio.Lock()
        self._gauges: list[ModelSeries] = []
        self._read_at_s = float("-inf")

    async def load_header(self, model: str, form: str) -> dict[str, str]:
        """Returns the reply header with a model's load, if any."""
        async with self._reading:
            if time.monotonic() - self._read_at_s >= READ_EVERY_S:
                self._gauges = await self._read_gauges()
                self._read_at_s = time.monotonic()
        load = load_of(self._gauges, model)
        value = "" if load is None else load.shown(form)
        return {HEADER: value} if value else {}

    async def _read_gauges(self) -> list[ModelSeries]:
        try:
            async with asyncio.timeout(_WITHIN_S):
                records = await self._store.model_metrics([record.id for record in self._catalog.workers()])
        except (BrokerUnavailable, TimeoutError):
            return []
        return await asyncio.to_thread(_gauges_in, records)


def _gauges_in(records: Iterable[bytes | None]) -> list[ModelSeries]:
    return merged(one for one in series_of(records) if (one.name, one.kind) == (FAMILY, GAUGE))


def load_of(gauges: Iterable[ModelSeries], model: str) -> CacheLoad | None:
    """Returns the load in a model's gauges, or in all gauges for a model without its own."""
    known = [(dict(one.labels), one.values[0]) for one in gauges]
    own = [(labels, value) for labels, value in known if labels.get("model") == model]
    blocks = {labels[_TYPE]: value for labels, value in own or known if _TYPE in labels}
    used, most, tokens = (blocks.get(name, math.nan) for name in ("used", "max", "tokens_per"))
    if not all(math.isfinite(value) and value >= 0 for value in (used, most, tokens, most * tokens)):
        return None
    return CacheLoad(used / most if most else 0.0, int(most * tokens))
