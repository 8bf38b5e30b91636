"""`qinfer queues`: what the lanes hold, and how much work it is."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.complete import model_names
from qinfer.cli.console import JsonOption, print_json
from qinfer.cli.status import DataDirOption, RedisOption
from qinfer.errors import ModelNotFound

EXAMPLE = "Example: qinfer queues   or   qinfer queues --model digits --json"


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
    worker needs, as in `GET /v1/models/MODEL/backlog`.
    """
    import msgspec
    from rich.console import Console

    from qinfer.cli.overview import redis_settings, run_overview
    from qinfer.cli.tables import queues_tables

    overview = run_overview(redis_settings(redis, data_dir))
    if model and model not in {row.name for row in overview.models}:
        raise ModelNotFound(f"no model '{model}' is to be loaded; `qinfer models list` shows those that are")
    lanes = [lane for lane in overview.lanes if model in ("", lane.model)]
    work = [row for row in overview.work if model in ("", row.model)]
    if not as_json:
        Console().print(queues_tables(lanes, work))
        return
    of_version: dict[tuple[str, int], list[object]] = {}
    for lane in lanes:
        fields = msgspec.to_builtins(lane)
        of_version.setdefault((fields.pop("model"), fields.pop("version")), []).append(fields)
    print_json([msgspec.to_builtins(row) | {"lanes": of_version.get((row.model, row.version), [])} for row in work])
