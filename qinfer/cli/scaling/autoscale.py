"""`qinfer autoscale`: as many workers on this machine as the waiting work needs."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import DataDirOption, RedisOption, with_options

EXAMPLE = "Example: qinfer autoscale --min 0 --max 4 --redis redis://queue:6379/0"


class ScalingFlags:
    """The settings of the autoscaler that are options, too."""

    min_workers: Annotated[
        int, typer.Option("--min", envvar="QINFER_AUTOSCALE__MIN_WORKERS", min=0, help="Minimum number of workers.")
    ] = 0
    max_workers: Annotated[
        int,
        typer.Option(
            "--max", envvar="QINFER_AUTOSCALE__MAX_WORKERS", min=0, help="Maximum number of workers; 0 = one per core."
        ),
    ] = 0
    target_s: Annotated[
        float,
        typer.Option(envvar="QINFER_AUTOSCALE__TARGET_S", help="Seconds of waiting work per worker."),
    ] = 10.0
    up_after_s: Annotated[
        float,
        typer.Option(
            envvar="QINFER_AUTOSCALE__UP_AFTER_S",
            min=0,
            help="Seconds of sustained demand before scaling up; the first worker starts at once.",
        ),
    ] = 0.0
    down_after_s: Annotated[
        float,
        typer.Option(
            envvar="QINFER_AUTOSCALE__DOWN_AFTER_S",
            min=0,
            help="Seconds of sustained lower demand before scaling down.",
        ),
    ] = 60.0
    idle_s: Annotated[
        float,
        typer.Option(envvar="QINFER_AUTOSCALE__IDLE_S", min=0, help="Idle seconds before scaling down to --min."),
    ] = 300.0
    cooldown_s: Annotated[
        float,
        typer.Option(
            envvar="QINFER_AUTOSCALE__COOLDOWN_S",
            min=0,
            help="Seconds without scaling down after scaling up; at least 1.5 times the models' load time.",
        ),
    ] = 30.0


@with_options(ScalingFlags)
def autoscale(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    **given: float,
) -> None:
    """Run as many workers on this machine as the waiting work needs, beside an existing gateway and Redis.

    The autoscaler reads the queue each second. The wanted number of workers is the waiting and executing work, in
    seconds of one worker, divided by --target-s. A model accepts requests without a worker if the gateways run with
    QINFER_REPOSITORY__MIN_WORKERS=0 or its configuration sets qinfer.min_workers to 0; otherwise one worker is kept.

    Workers inherit this command's environment. A crashed worker is restarted. SIGTERM drains all workers and exits.

    While Redis is unreachable the number of workers does not change.

    Exit codes: 0 stopped; 64 an option or a setting is wrong.
    """
    from qinfer.cli.overview import program_variables, redis_settings
    from qinfer.cli.scaling.scaler import run_autoscaler

    run_autoscaler(redis_settings(redis, data_dir), given, program_variables(redis, data_dir))
