"""Load metrics of ORCA (Open Request Cost Aggregation) in replies: how full the key-value cache of a language model is.

Triton computes two numbers of the gauges of TensorRT-LLM's backend (server `src/orca_http.cc`). qinfer computes them of
the same gauges, which a `python` model exports. Load balancers ask with each request, so that gauges are read once in
the time in which workers write them.
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
"""The request header that asks for the metrics, as `text` or `json`."""

HEADER = "endpoint-load-metrics"
"""The reply header that has them."""

FAMILY = "nv_trt_llm_kv_cache_block_metrics"
"""The gauges, one for each type of count: `used`, `max` and `tokens_per`."""

READ_EVERY_S = 1.0
"""Workers write metrics that have changed once a second."""

_WITHIN_S = 0.25
_TYPE = "kv_cache_block_type"


class CacheLoad(NamedTuple):
    """The load of a key-value cache.

    Attributes:
        utilization: The used part of its blocks.
        capacity: Tokens that it has room for.
    """

    utilization: float
    capacity: int

    def shown(self, form: str) -> str:
        """Returns the value of the reply header; empty for a format that does not exist."""
        if form == "json":
            named = {"kv_cache_utilization": self.utilization, "max_token_capacity": self.capacity}
            return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
        if form == "text":
            capacity = f"named_metrics.max_token_capacity={self.capacity}"
            return f"TEXT named_metrics.kv_cache_utilization={self.utilization:.6f}, {capacity}"
        return ""


class EndpointLoad:
    """Tells the load of models; one for each gateway.

    Args:
        catalog: Knows the workers.
        store: Where their models' metrics are.
    """

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._store = store
        self._reading = asyncio.Lock()
        self._gauges: list[ModelSeries] = []
        self._read_at_s = float("-inf")

    async def of(self, model: str, form: str) -> dict[str, str]:
        """Returns the reply header with the load of a model; none where it exports none, or Redis is away.

        Args:
            model: The model.
            form: The value of the request header.
        """
        async with self._reading:
            if time.monotonic() - self._read_at_s >= READ_EVERY_S:
                self._gauges = await self._read()
                self._read_at_s = time.monotonic()
        load = load_of(self._gauges, model)
        value = "" if load is None else load.shown(form)
        return {HEADER: value} if value else {}

    async def _read(self) -> list[ModelSeries]:
        try:
            async with asyncio.timeout(_WITHIN_S):
                records = await self._store.model_metrics([record.id for record in self._catalog.workers()])
        except (BrokerUnavailable, TimeoutError):
            return []
        return await asyncio.to_thread(_gauges_in, records)


def _gauges_in(records: Iterable[bytes | None]) -> list[ModelSeries]:
    """Returns the gauges of key-value caches in the records of workers."""
    return merged(one for one in series_of(records) if (one.name, one.kind) == (FAMILY, GAUGE))


def load_of(gauges: Iterable[ModelSeries], model: str) -> CacheLoad | None:
    """Returns the load that gauges tell of; `None` where one of the three types is missing, or no possible number.

    Args:
        gauges: The gauges of all workers.
        model: The model whose own gauges count; those of any model where it has none, as an ensemble.
    """
    known = [(dict(one.labels), one.values[0]) for one in gauges]
    own = [(labels, value) for labels, value in known if labels.get("model") == model]
    blocks = {labels[_TYPE]: value for labels, value in own or known if _TYPE in labels}
    used, most, tokens = (blocks.get(name, math.nan) for name in ("used", "max", "tokens_per"))
    if not all(math.isfinite(value) and value >= 0 for value in (used, most, tokens, most * tokens)):
        return None
    return CacheLoad(used / most if most else 0.0, int(most * tokens))
