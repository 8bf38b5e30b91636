"""One measurement: a load, and what the server's processes took meanwhile."""

from collections.abc import Callable

import psutil

from benchmarks.load import LoadResult
from benchmarks.results import CLIENT, Sample, Setting
from benchmarks.servers import Server


def measure(server: Server, setting: Setting, number: int, generate: Callable[[], LoadResult]) -> Sample:
    """Loads a running server once.

    Args:
        server: The server.
        setting: What is measured.
        number: The round.
        generate: Makes the load.
    """
    stolen, used = _stolen_s(), server.usage()
    loaded = generate()
    now = server.usage()
    share = (_stolen_s() - stolen) / (loaded.duration_s * (psutil.cpu_count() or 1)) if loaded.duration_s else 0.0
    each = 1e6 / max(1, loaded.requests + loaded.late)
    return Sample(
        setting=setting,
        round=number,
        rate=loaded.rate,
        p50_us=loaded.p50_us,
        p99_us=loaded.p99_us,
        errors=loaded.errors,
        cpu_us={**{role: s * each for role, s in now.cpu_since(used).items()}, CLIENT: loaded.client_cpu_s * each},
        rss_before_bytes=used.rss_bytes,
        rss_bytes=now.rss_bytes,
        stolen=share,
    )


def _stolen_s() -> float:
    """Seconds that the host gave to others, summed over the cores."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
