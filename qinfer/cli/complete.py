"""Completion of model names in shells: from Redis, within moments, and nothing where that can't be."""

from pathlib import Path

import typer

TIMEOUT_S = 0.3
"""Somebody has pressed a key and waits."""


def model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns the names of models that begin with what was typed; typer's callback.

    It looks where the command would: at its --redis, QINFER_REDIS__URL, or a running `up` of its --data-dir. A cluster
    or Sentinels take too long to ask.
    """
    import os

    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from qinfer.cli.local import runfile
        from qinfer.queue import keys

        url = str(ctx.params.get("redis") or os.environ.get("QINFER_REDIS__URL") or "")
        if not url:
            run = runfile.read(Path(ctx.params.get("data_dir") or ".qinfer"))
            if run is None:
                return []
            url = run.redis_url
        timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "protocol": 2}
        with Redis.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts) as client:
            names = sorted(name.decode() for name in client.hgetall(keys.desired()))
    except Exception:  # noqa: BLE001 - a line that is being typed is no place for errors
        return []
    return [name for name in names if name.startswith(incomplete)]
