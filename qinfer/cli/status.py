"""`qinfer status`, `qinfer queues`: models, lanes and workers, read from Redis."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import DataDirOption, JsonOption, RedisOption, model_names, show
from qinfer.errors import ModelNotFound

STATUS_EXAMPLE = "Example: qinfer status --watch   or   qinfer status --redis redis://queue:6379/0"
QUEUES_EXAMPLE = "Example: qinfer queues   or   qinfer queues --model digits --json"


def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C; with --json one document per line.")
    ] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes.")] = 2.0,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show models, lanes, workers and gateways.

    Reads Redis and needs no gateway. Depth counts waiting and executing requests. Work is the seconds that one worker
    needs for them, with a ? if the model has never been executed and its speed is assumed. The rows below the workers
    show executions that have lasted for more than a second, with their start; the last rows show why bulk jobs can't
    continue.
    """
    from qinfer.cli.overview import Overview, redis_settings, run_overview
    from qinfer.cli.tables import overview_tables
    from qinfer.cli.tables import watch as watch_overview

    def read() -> Overview:
        return run_overview(redis_settings(redis, data_dir))

    if watch:
        # Wrong options end the command at once.
        redis_settings(redis, data_dir)
        watch_overview(read, interval, as_json=as_json)
        return
    overview = read()
    show(overview, lambda: overview_tables(overview), as_json=as_json)


def queues(
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Show only this model's lanes.", autocompletion=model_names)
    ] = "",
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show every lane: depth, requests in flight, age of the oldest, and the work of each model version.

    Bulk lanes exist while a model has jobs; their depth and in-flight counts are shards. Work is the seconds that one
    worker needs, as in `GET /v1/models/MODEL/backlog`. Lanes that several tenants use are shown with their shares.
    """
    import msgspec

    from qinfer.cli.overview import redis_settings, run_overview
    from qinfer.cli.tables import queues_tables

    overview = run_overview(redis_settings(redis, data_dir))
    if model and model not in {row.name for row in overview.models}:
        raise ModelNotFound(f"model '{model}' is not among the models to load; `qinfer models list` shows them")
    lanes = [lane for lane in overview.lanes if model in ("", lane.model)]
    work = [row for row in overview.work if model in ("", row.model)]
    of_version: dict[tuple[str, int], list[object]] = {}
    for lane in lanes:
        fields = msgspec.to_builtins(lane)
        of_version.setdefault((fields.pop("model"), fields.pop("version")), []).append(fields)
    versions = [msgspec.to_builtins(row) | {"lanes": of_version.get((row.model, row.version), [])} for row in work]
    show(versions, lambda: queues_tables(lanes, work), as_json=as_json)
